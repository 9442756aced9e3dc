"""What users do between `from_pretrained` and prepare, in one process: the same as with an ordinary model."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

import hf_dist
from hf_dist import DistTrainingArguments
from hf_dist.checkpoint.safetensors_source import bytes_read
from hf_dist.errors import CheckpointError, ModelError
from hf_dist.hf import loading
from hf_dist.hf.deepspeed_config import HfDeepSpeedConfig
from hf_dist.sharding.lazy import lazy_source, lazy_sources
from tests.loading.checkpoints import CASES, inputs_for, write
from tests.loading.on_ranks import compare, logits, prepare
from tests.loading.test_equal import assert_same


@pytest.fixture(autouse=True, scope="module")
def nobody_streams() -> None:
    """Training arguments of earlier tests, alive in a cycle, would make the stock calls stream as well."""
    gc.collect()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, folder) for name in ("llama", "llama tied, several files", "bert", "qwen3_moe")}


def both(path: Path, name: str = "llama", **kwargs: Any) -> tuple[Any, Any]:
    """(streamed, stock)"""
    kwargs = {**CASES[name].kwargs, **kwargs}
    return hf_dist.from_pretrained(CASES[name].load, path, **kwargs), CASES[name].load.from_pretrained(path, **kwargs)


def _resize(model: Any, mean: bool = True) -> Any:
    model.resize_token_embeddings(117, mean_resizing=mean)
    return model


def _shrink(model: Any) -> Any:
    model.resize_token_embeddings(90)
    return model


def _lora(model: Any, **kwargs: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **kwargs)
    return peft.get_peft_model(model, config)


def _edit(model: Any) -> Any:
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
        model.model.layers[0].self_attn.q_proj.weight[3, 4] = 7
        model.model.layers[1].mlp.up_proj.weight.data.fill_(0.5)
        model.model.layers[1].mlp.down_proj.weight.data = torch.ones(32, 56)
        torch.nn.init.normal_(model.lm_head.weight)
    return model


def _freeze(model: Any) -> Any:
    for p in model.model.layers[0].parameters():
        p.requires_grad = False
    model.model.embed_tokens.requires_grad_(False)
    return model


def _replace(model: Any) -> Any:
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.data.clone() * 2)
    return model


def _checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def _through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _through_state_dict(model: Any) -> Any:
    other = tf.AutoModelForCausalLM.from_config(model.config)
    other.load_state_dict(model.state_dict())
    return other


def _through_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = tf.AutoModelForCausalLM.from_config(model.config)
    other.load_state_dict(torch.load(buffer))
    return other


CHANGES: dict[str, Callable[[Any], Any]] = {
    "resize, mean": _resize,
    "resize, random": lambda m: _resize(m, mean=False),
    "shrink": _shrink,
    "lora": _lora,
    "dora": lambda m: _lora(m, use_dora=True),
    "lora, modules_to_save": lambda m: _lora(m, modules_to_save=["lm_head"]),
    "lora after resize": lambda m: _lora(_resize(m)),
    "pissa": lambda m: _lora(m, init_lora_weights="pissa"),
    "edits": _edit,
    "freeze": _freeze,
    "replace": _replace,
    "checkpointing": _checkpointing,
    "deepcopy": copy.deepcopy,
    "pickle": _through_pickle,
    "to bf16": lambda m: m.to(torch.bfloat16),
    "half and back": lambda m: m.half().float(),
    "state_dict": _through_state_dict,
    "torch.save": _through_torch_save,
    "nothing to do": lambda m: m.to("cpu").float(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", ["llama", "llama tied, several files"])
def test_change_has_the_same_effect_as_on_an_ordinary_model(case: str, change: str, paths: dict[str, Path]) -> None:
    results = []
    for model in both(paths[case], case):
        torch.manual_seed(11)
        results.append((CHANGES[change](model), torch.get_rng_state()))
    (ours, rng), (stock, stock_rng) = results
    assert torch.equal(rng, stock_rng)
    engine = prepare(ours, 3) if change != "half and back" else None
    if engine is not None:
        assert compare(engine, stock) == []
        assert torch.equal(logits(ours), logits(stock))
    else:
        assert_same(ours, stock)


def test_metadata_and_lora_read_nothing(paths: dict[str, Path]) -> None:
    model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, paths["llama"])
    before = bytes_read()
    count = len(lazy_sources(model))
    assert model.num_parameters() == sum(p.numel() for p in model.parameters()) > 0
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert "not in memory" in repr(model.lm_head.weight)
    model.gradient_checkpointing_enable()
    torch.optim.AdamW(model.parameters(), lr=1.0)
    names = set(model.state_dict())
    copied = copy.deepcopy(model)
    model = _lora(model)
    model.print_trainable_parameters()
    assert names and len(lazy_sources(copied)) == count == len(lazy_sources(model))
    assert bytes_read() == before


def test_a_parameter_that_is_given_other_elements_is_not_read_first(paths: dict[str, Path]) -> None:
    model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, paths["llama"])
    weight, count, before = model.lm_head.weight, len(lazy_sources(model)), bytes_read()
    weight.data = torch.ones(101, 32)
    assert (weight == 1).all() and type(weight) is torch.nn.Parameter
    model.to(torch.float32)  # nothing to do
    assert bytes_read() == before
    assert len(lazy_sources(model)) == count - 1


def test_reading_one_parameter_reads_only_it(paths: dict[str, Path]) -> None:
    ours, stock = both(paths["llama"])
    weight = ours.model.layers[1].mlp.up_proj.weight
    alias = weight.data
    before = bytes_read()
    assert torch.equal(alias, stock.model.layers[1].mlp.up_proj.weight)
    assert bytes_read() - before == weight.nbytes
    assert type(weight) is torch.nn.Parameter and type(alias) is torch.Tensor
    alias[0, 0] = 5
    assert weight[0, 0] == 5
    assert lazy_source(weight) is None and lazy_source(ours.lm_head.weight) is not None


@pytest.mark.parametrize("case", ["llama", "bert", "qwen3_moe"])
def test_saving_a_streamed_model_over_its_own_files(case: str, paths: dict[str, Path], tmp_path: Path) -> None:
    path = write(case, tmp_path)
    ours, stock = both(path, case)
    ours.save_pretrained(path)
    assert_same(CASES[case].load.from_pretrained(path), stock)


def test_generate_and_train_without_preparing(paths: dict[str, Path]) -> None:
    ours, stock = both(paths["llama"])
    ids = torch.tensor([[5, 6, 7]])
    kwargs = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(ids, **kwargs), stock.generate(ids, **kwargs))
    for model in (ours, stock):
        model(input_ids=ids, labels=ids).loss.backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_optimizer_made_before_prepare_steps_the_weights(paths: dict[str, Path]) -> None:
    ours, stock = both(paths["llama"])
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    engine = hf_dist.initialize(ours, config=config, optimizer=optimizer)
    reference = torch.optim.AdamW(stock.parameters(), lr=1e-2)
    batch = inputs_for(stock)
    for _ in range(2):
        engine.backward(engine(**batch, labels=batch["input_ids"]).loss)
        engine.step()
        stock(**batch, labels=batch["input_ids"]).loss.backward()
        torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
    with hf_dist.gathered(ours):
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def test_resize_after_prepare_is_refused_by_name(paths: dict[str, Path]) -> None:
    ours, _ = both(paths["llama"])
    engine = prepare(ours, 3)
    assert ours.resize_token_embeddings(101) is ours.get_input_embeddings()
    with pytest.raises(ModelError, match=r"resize_token_embeddings\(110\).*before"):
        ours.resize_token_embeddings(110)
    del engine  # nobody trains the model any more: it becomes an ordinary one
    assert ours.resize_token_embeddings(110).weight.shape[0] == ours.lm_head.weight.shape[0] == 110


def test_ddp_around_a_model_in_training_is_refused_by_name(paths: dict[str, Path]) -> None:
    ours, _ = both(paths["llama"])
    engine = prepare(ours, 3)
    assert engine.model is ours
    with pytest.raises(ModelError, match=r"DistributedDataParallel\(Llama\w+\): .* in training.*hf_dist\.unprepare"):
        torch.nn.parallel.DistributedDataParallel(ours)


@pytest.mark.parametrize("what", ["changed", "vanished", "truncated"])
def test_file_that_is_not_the_planned_one_is_an_error_by_name(what: str, tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, path)
    file = path / "model.safetensors"
    if what == "changed":
        os.utime(file, ns=(1, 1))
    elif what == "vanished":
        file.unlink()
    else:
        os.truncate(file, 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        prepare(model, 3)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            model.lm_head.weight.sum()
    assert lazy_source(model.lm_head.weight) is not None  # nothing half read


def test_stock_call_streams_while_training_arguments_live(paths: dict[str, Path], tmp_path: Path) -> None:
    hook = PreTrainedModel.__dict__["_load_pretrained_model"]

    def streams() -> bool:
        return bool(lazy_sources(tf.AutoModelForCausalLM.from_pretrained(paths["llama"])))

    assert not streams()
    arguments = [
        DistTrainingArguments(str(tmp_path), dist_config={"zero_optimization": {"stage": s}}, report_to=[])
        for s in (2, 3)
    ]
    assert streams()
    arguments.pop()
    gc.collect()
    assert streams()
    arguments.clear()
    gc.collect()
    assert not streams()
    assert PreTrainedModel.__dict__["_load_pretrained_model"] is hook
    off = DistTrainingArguments(str(tmp_path), dist_config={"hf_dist": {"lazy_load": False}}, report_to=[])
    assert not streams()
    del off
    for stage in (2, 3):
        declared = HfDeepSpeedConfig({"zero_optimization": {"stage": stage}})
        assert streams() is (stage == 3)
        del declared
        assert not streams()
    plain = DistTrainingArguments(str(tmp_path), report_to=[])
    assert not streams()
    del plain


def test_what_is_not_streamed_loads_the_ordinary_way(paths: dict[str, Path], tmp_path: Path, caplog: Any) -> None:
    stock = tf.AutoModelForCausalLM.from_pretrained(paths["llama"])
    torch.save(stock.state_dict(), tmp_path / "pytorch_model.bin")
    stock.config.save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="hf_dist"):
        for path, kwargs in ((tmp_path, {}), (paths["llama"], {"device_map": "cpu"})):
            model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, path, **kwargs)
            assert not lazy_sources(model)
            assert_same(model, stock)
        given = hf_dist.from_pretrained(
            tf.LlamaForCausalLM, None, config=stock.config, state_dict=copy.deepcopy(stock.state_dict())
        )
        assert not lazy_sources(given)
    assert "not safetensors" in caplog.text and "device_map" in caplog.text and "state_dict" in caplog.text


def test_surprise_while_planning_loads_the_ordinary_way(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def surprise(path: str, module: torch.nn.Module) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(loading, "_adopt", surprise)
    with caplog.at_level("INFO", logger="hf_dist"):
        model, stock = both(paths["qwen3_moe"], "qwen3_moe")
    assert "surprise" in caplog.text
    assert not lazy_sources(model)
    assert_same(model, stock)


def test_check_load_finds_a_wrong_element(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, paths["llama"])
    source = lazy_source(model.model.layers[1].mlp.up_proj.weight)
    assert source is not None
    read = source.read

    def shifted(start: int, stop: int, out: torch.Tensor) -> None:
        read(start, stop, out)
        out.copy_(out.roll(1))

    monkeypatch.setattr(source, "read", shifted)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        prepare(model, 3)
    again = hf_dist.from_pretrained(tf.AutoModelForCausalLM, paths["llama"])
    wrong = lazy_source(again.lm_head.weight)
    monkeypatch.setattr(wrong, "read", lambda start, stop, out: out.zero_())
    prepare(again, 3, hf_dist={"check_load": False})
