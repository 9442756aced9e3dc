"""Which layers multiply in eight bits, what is refused by name, and how a model gets its own layers back."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.config import AutoSources, load_config, resolve
from hf_dist.config.accelerate import launched_precision
from hf_dist.config.convert import from_accelerate
from hf_dist.errors import ConfigError
from hf_dist.float8.blocks import is_mxfp8
from hf_dist.float8.choice import choose
from hf_dist.float8.convert import choose_layers, convert
from hf_dist.float8.linear import is_float8, plain
from hf_dist.float8.recipe import recipe_of
from hf_dist.hf.args import DistTrainingArguments
from tests import needs
from tests.float8.training import Case, model_of

needs.package("torchao", "it multiplies in float8")

CPU = torch.device("cpu")


def config(**section: Any) -> Any:
    """With the section on."""
    return load_config({"bf16": {"enabled": True}, "hf_dist": {"fp8": {"enabled": True, "emulate": True, **section}}})


class Mixture(nn.Module):
    """One of everything that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.first, self.middle, self.odd = nn.Linear(32, 32), nn.Linear(32, 48), nn.Linear(48, 40)
        self.gate, self.shared_gate = nn.Linear(32, 16), nn.Linear(32, 1)
        self.own = nn.Linear(32, 32)
        self.own.forward = lambda x: x  # type: ignore[method-assign]
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.zeros(16, 32, 32))
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16)})
        self.head = nn.Linear(32, 32)


def test_what_stays_as_it_is_has_a_reason() -> None:
    found = choose(Mixture(), experts=[16], skip=["inner.1"])
    assert set(found.chosen) == {"middle", "inner.0"}
    assert {reason: list(paths) for reason, paths in found.left.items()} == {
        "first and last": ["first", "head"],
        "with sizes that are no multiple of 16": ["odd"],
        "routers": ["gate", "shared_gate"],
        "with a forward of their own": ["own"],
        "stacks of experts whose implementation is not grouped_mm": ["experts"],
        "named in skip": ["inner.1"],
        "of adapters": ["lora_A.default"],
    }
    assert found.rows()[0] == "2 linear layers multiply in float8"
    assert "2 first and last" in found.rows()[1]
    # Without a mixture "gate" is the name of an ordinary layer (the MLP's of a Llama is gate_proj).
    assert "gate" in choose(Mixture()).chosen


@pytest.mark.parametrize("name", ["inner", "inner.0", "middle"])
def test_a_name_skips_a_module_and_all_inside(name: str) -> None:
    chosen = choose(Mixture(), experts=[16], skip=[name]).chosen
    assert not [path for path in chosen if f".{name}." in f".{path}."] and chosen


def test_layers_are_the_same_objects_and_come_back() -> None:
    for family in ("llama", "gpt2"):
        model = model_of(Case(family=family, bf16=False))
        before = {n: (id(p), p.shape) for n, p in model.named_parameters()}
        modules, classes = {n: id(m) for n, m in model.named_modules()}, {n: type(m) for n, m in model.named_modules()}
        x = {"input_ids": torch.arange(12).view(1, 12)}
        stock = model(**x).logits
        eights = choose_layers(model, config(), CPU)
        assert eights is not None
        converted = convert(eights, config())
        assert before == {n: (id(p), p.shape) for n, p in model.named_parameters()}
        assert modules == {n: id(m) for n, m in model.named_modules()}
        assert {n for n, m in model.named_modules() if is_float8(m)} == set(converted.chosen)
        rounded = model(**x).logits
        assert not torch.equal(rounded, stock) and torch.allclose(rounded, stock, atol=0.2)
        with plain(model):
            assert classes == {n: type(m) for n, m in model.named_modules()}
            assert torch.equal(model(**x).logits, stock)
        assert torch.equal(model(**x).logits, rounded)
        assert torch.equal(copy.deepcopy(model)(**x).logits, rounded)


def test_a_slice_that_is_too_narrow_stays_as_it_is() -> None:
    model = Mixture()
    eights = choose_layers(model, config(), CPU)
    assert eights is not None
    model.middle.weight.data = torch.zeros(24, 32)
    found = convert(eights, config())
    assert "middle" not in found.chosen and found.left["whose slices have such sizes"] == ["middle"]


def test_bad_requests_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixture()
    with pytest.raises(ConfigError, match=r"hf_dist.fp8.enabled.*a cpu has no products in float8.*emulate"):
        choose_layers(model, config(emulate=False), CPU)
    with pytest.raises(ConfigError, match=r"hf_dist.fp8.skip: down_proj names no module"):
        choose_layers(model, config(skip=["down_proj"]), CPU)
    with pytest.raises(ConfigError, match=r"no linear layer of the model can multiply in float8: 2 first and last"):
        choose_layers(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), config(), CPU)
    with pytest.raises(ConfigError, match=r'hf_dist.fp8.recipe: "rowise" is not one of.*Did you mean "rowwise"'):
        config(recipe="rowise")
    with pytest.raises(ConfigError, match=r"hf_dist.fp8.enabled.*fp16"):
        load_config({"fp16": {"enabled": True}, "hf_dist": {"fp8": {"enabled": True}}})
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"torchao cannot be imported.*pip install \"hf_dist\[fp8\]\""):
        choose_layers(model, config(), CPU)
    assert choose_layers(model, load_config({}), CPU) is None


def test_accelerates_words_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = AutoSources(data_world_size=1, bf16=False, fp16=False, launcher_precision="fp8")
    found = resolve(load_config({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}), sources)
    assert found.hf_dist.fp8.enabled and found.bf16.enabled is True
    plain = resolve(load_config({"train_micro_batch_size_per_gpu": 1}), replace(sources, launcher_precision="bf16"))
    assert not plain.hf_dist.fp8.enabled and plain.bf16.enabled is True
    assert launched_precision(None, {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}) == "fp8"
    assert launched_precision("bf16", {"ACCELERATE_MIXED_PRECISION": "fp8"}) == "bf16"
    with pytest.raises(ConfigError, match=r"hf_dist.fp8.enabled: false differs from --fp8"):
        resolve(load_config({"hf_dist": {"fp8": {"enabled": False}}}), sources)
    for backend, words in (("TE", "Transformer Engine"), ("MSAMP", "MS-AMP")):
        with pytest.raises(ConfigError, match=rf"ACCELERATE_FP8_BACKEND: {backend} is {words}.*Use torchao"):
            launched_precision(None, {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": backend})
    section: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3},
        "mixed_precision": "fp8",
    }
    converted = from_accelerate({**section, "fp8_config": {"backend": "AO", "pad_inner_dim": True}})
    assert converted.config["hf_dist"]["fp8"] == {"enabled": True} and converted.config["bf16"] == {"enabled": True}
    assert "fp8_config.pad_inner_dim" in converted.notes
    with pytest.raises(ConfigError, match=r"fp8_config.backend: TE is Transformer Engine"):
        from_accelerate({**section, "fp8_config": {"backend": "TE"}})


def test_the_argument_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    args = DistTrainingArguments(
        str(tmp_path), use_cpu=True, fp8=True, dist_config={"hf_dist": {"fp8": {"emulate": True}}}
    )
    assert args.dist.hf_dist.fp8.enabled and args.dist.bf16.enabled is True
    with pytest.raises(ConfigError, match="fp8: true needs a dist_config"):
        DistTrainingArguments(str(tmp_path), use_cpu=True, fp8=True)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_the_hardware_is_asked(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda = torch.device("cuda", 0)
    if capability >= (8, 9):
        assert choose_layers(Mixture(), config(emulate=False), cuda) is not None
        with pytest.raises(ConfigError, match=r"hf_dist.fp8.enabled.*needs bf16.*Set \"bf16\""):
            choose_layers(Mixture(), load_config({"hf_dist": {"fp8": {"enabled": True}}}), cuda)
        return
    with pytest.raises(ConfigError, match=r"A GPU has compute capability 8.0, and products in float8 need 8.9"):
        choose_layers(Mixture(), config(emulate=False), cuda)


@pytest.mark.parametrize("family", ["gpt2", "experts"])
def test_unprepare_gives_the_layers_back_and_pickles_have_stock_ones(family: str) -> None:
    import hf_dist

    model = model_of(Case(family=family, bf16=False))
    classes = {n: type(m) for n, m in model.named_modules()}
    engine = hf_dist.initialize(
        model,
        config={"train_batch_size": 1, "hf_dist": {"fp8": {"enabled": True, "emulate": True}}},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
    )
    assert any(is_float8(m) for m in model.modules())
    again = pickle.loads(pickle.dumps(model))
    assert classes == {n: type(m) for n, m in again.named_modules()}
    del engine
    hf_dist.unprepare(model)
    assert classes == {n: type(m) for n, m in model.named_modules()}
    assert not [m for m in model.modules() if {"linear_mm_config", "float8_product"} & vars(m).keys()]


def test_a_weight_that_other_code_reads_stays_as_it_is() -> None:
    """It would not multiply in float8, and would travel as if it did."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 2)
            self.fused, self.cast, self.made, self.plain = (nn.Linear(32, 32) for _ in range(4))
            self.inner = nn.Sequential(nn.Linear(32, 32))
            nn.init.zeros_(self.made.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.plain(x.to(self.cast.weight.dtype)) if isinstance(self.cast.weight, torch.Tensor) else x
            x = nn.functional.linear(x, self.fused.weight) + self.attention(x, x, x)[0]
            return self.made(self.cast(x)) @ self.inner[0].weight

    model = nn.Sequential(nn.Linear(32, 32), Fused(), nn.Linear(32, 32))
    found = choose(model)
    assert list(found.left["whose weight other code reads"]) == ["1.attention.out_proj", "1.fused"]
    assert {"1.cast", "1.made", "1.plain"} <= set(found.chosen)


def test_fused_kernels_of_mamba_read_weights_past_their_layers() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    with torch.device("meta"):
        model = MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=64, time_step_rank=16))
    found = choose(model)
    read = {path.rsplit(".", 1)[-1] for path in found.left["whose weight other code reads"]}
    assert read == {"x_proj", "dt_proj", "out_proj"} and {path.rsplit(".", 1)[-1] for path in found.chosen} == {
        "in_proj"
    }


def test_below_an_adapter_only_lora_leaves_the_weight_to_its_layer() -> None:
    from peft import IA3Config, LoraConfig, get_peft_model

    targets = {"target_modules": ["up_proj"]}
    dora = LoraConfig(r=16, use_dora=True, **targets)
    for adapter, reads in (
        (LoraConfig(r=16, **targets), 0),
        (dora, 3),
        (IA3Config(feedforward_modules=[], **targets), 3),
    ):
        found = choose(get_peft_model(model_of(Case()), adapter))
        assert len(found.left.get("whose weight other code reads", ())) == reads


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_subclasses_keep_their_methods_and_layers_of_torchaos_own_stay(recipe: str) -> None:
    from torchao.float8.float8_linear import Float8Linear

    class Named(nn.Linear):
        def named(self) -> str:
            return "its own"

    theirs = Float8Linear(32, 32, config=recipe_of(config()))
    model = nn.Sequential(nn.Linear(32, 32), Named(32, 32), theirs, nn.Linear(32, 32))
    choice = choose_layers(model, config(recipe=recipe), CPU)
    assert choice is not None and list(choice.chosen) == ["1"]
    convert(choice, config(recipe=recipe))
    converted, layer = (is_mxfp8 if recipe == "mxfp8" else is_float8), model[1]
    assert converted(layer) and isinstance(layer, Named) and layer.named() == "its own" and not converted(theirs)
    with plain(model):
        assert type(layer) is Named and type(theirs) is Float8Linear
    assert converted(layer)
