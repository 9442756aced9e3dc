"""`hf-dist check`: equal layouts are found equal, others are not, and the first tensor that differs is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ConfigError, ModelError
from hf_dist.hf.model_class import keep_layers, without_dropout_modules
from hf_dist.tools.check import Asked, outputs, prepare, prove
from hf_dist.tools.check.compare import compare
from hf_dist.tools.check.data import microbatches
from hf_dist.tools.check.itself import TOGETHER, TWICE, itself
from hf_dist.tools.check.job import Job
from hf_dist.tools.check.limits import FP32, limits, wider
from hf_dist.tools.check.runs import _differences
from hf_dist.tools.check.training import clip
from hf_dist.tools.cli import app
from tests.covering import FULL_GRID_ONLY, some_of
from tests.hf import own_losses
from tests.parity.families import make_model
from tests.tools.proofs import asked_for, start_fork_server

ONE_RANK = MeshAxis("world", 1, 0, None)
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("llama", {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2}),
    "pipeline": ("qwen3", {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}),
    "offload": ("bert", {"zero_optimization": OFFLOAD, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
    "bf16": ("t5", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": "auto"}),
    "moe": ("qwen3_moe", {"zero_optimization": {"stage": 3}, "train_batch_size": 8}),
    "experts, bf16": ("qwen3_moe", {"expert_parallel": {"enabled": True, "autoep_size": 2}, "bf16": {"enabled": True}}),
    "images": ("vit", {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}),
}
# Below, others have stages and offload (the table) and images in bf16 (key biases).
LAYOUTS = some_of(LAYOUTS, "zero3")


def command(asked: Asked, *options: str) -> Result:
    """`hf-dist check` with two short steps, in this process."""
    start_fork_server()
    given = ["check", "--model", asked.model, "--config", str(asked.config), "--steps", "2", "--seq", "12"]
    return CliRunner().invoke(app, [*given, *options])


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_equal_layout_is_found_equal(name: str, tmp_path: Path) -> None:
    start_fork_server()
    asked = asked_for(tmp_path, *LAYOUTS[name], steps=5 if "bf16" in name else 2)
    proof = prove(prepare(asked, tmp_path), asked.world)
    assert proof.equal, proof
    assert not proof.differs
    assert proof.precision == ("bf16" if "bf16" in name else "fp32")
    assert len(proof.rows) == 9
    for row in proof.rows:
        # bf16 is allowed what bf16 costs one process, no more
        assert FP32 <= row.allowed < 0.05
        assert row.allowed == FP32 or proof.precision == "bf16"


MIXED = {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2, "gradient_accumulation_steps": 2}


@FULL_GRID_ONLY  # the one in half precision is found equal, too
def test_a_mixture_is_found_equal(tmp_path: Path) -> None:
    start_fork_server()
    asked = asked_for(tmp_path, "llama", MIXED, world=4)
    proof = prove(prepare(asked, tmp_path), 4)
    assert proof.equal, proof
    assert not proof.blamed and not proof.to_blame


HALF: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("llama", {"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}),
    "fp16": ("qwen3_moe", {"expert_parallel": {"enabled": True, "autoep_size": 2}, "sequence_parallel_size": 2}),
}


@FULL_GRID_ONLY  # what half precision is allowed is below, without processes and for images
@pytest.mark.parametrize("dtype", HALF)
def test_a_mixture_in_half_precision_is_as_near_as_one_process_is(dtype: str, tmp_path: Path) -> None:
    start_fork_server()
    family, axes = HALF[dtype]
    config = {**axes, dtype: {"enabled": True}, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    asked = asked_for(tmp_path, family, config, world=4)
    proof = prove(prepare(asked, tmp_path), 4)
    assert proof.equal, proof
    assert not proof.blamed and not proof.to_blame
    assert proof.precision == dtype and max(row.allowed for row in proof.rows) < 0.05


@FULL_GRID_ONLY  # the same loss is found in fp32 below
def test_a_loss_that_is_wrong_by_less_than_one_in_a_thousand_is_found_in_bf16(tmp_path: Path) -> None:
    start_fork_server()
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    asked = asked_for(tmp_path, "llama", config, steps=5, class_name="tests.workers.skewed:Skewed")
    proof = prove(prepare(asked, tmp_path), 2)
    assert [row.what for row in proof.rows if not row.equal] == ["loss, 5 steps", "next step, loss"]


def itself_of(model: Any) -> dict[str, tuple[float, float]]:
    without_dropout_modules(model)
    return itself(model.train(), microbatches(model, rows=2, count=2, seq=12))


@pytest.mark.parametrize(
    ("cls", "what"),
    [(own_losses.Own, ""), (own_losses.Random, TWICE), (own_losses.Centred, TOGETHER), (own_losses.Summed, TOGETHER),
     (own_losses.Negatives, TOGETHER), (own_losses.Padded, TOGETHER)],
)  # fmt: skip
def test_a_loss_that_no_layout_can_equal_is_told(cls: Any, what: str) -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    assert list(itself_of(cls(transformers.LlamaConfig(**sizes)))) == [what] * bool(what)


@pytest.mark.parametrize("family", ["llama", "qwen3", "bert", "t5", "vit", "qwen3_moe", "gpt2", "deepseek_v3"])
def test_a_stock_loss_is_a_mean_that_draws_nothing(family: str) -> None:
    assert not itself_of(make_model(family))


def verdict(folder: Path, loss: str, **config: Any) -> Any:
    """Of two ranks with a loss of `own_losses`."""
    start_fork_server()
    asked = asked_for(
        folder, "llama", {"zero_optimization": {"stage": 3}, **config}, class_name=f"tests.hf.own_losses:{loss}"
    )
    return prove(prepare(asked, folder), asked.world)


@FULL_GRID_ONLY  # `tests/hf/test_loss_kinds.py` has the sum, a verdict without processes below what is said of it
def test_a_sum_over_rows_is_equal_because_the_trainer_adds_up(tmp_path: Path) -> None:
    assert verdict(tmp_path, "Summed").equal


@FULL_GRID_ONLY  # the loss is told by itself, above, and what the note says of it, below, without processes
@pytest.mark.parametrize("half", [False, True])
def test_in_batch_negatives_are_not_equal_and_the_note_says_why(half: bool, tmp_path: Path) -> None:
    """Also in half precision, where one process has all rows of a step in one batch, as in fp32."""
    proof = verdict(tmp_path, "Negatives", bf16={"enabled": half})
    assert {"loss, 2 steps", "next step, loss"} <= {row.what for row in proof.rows if not row.equal}
    assert any("the loss depends on which rows are in one batch" in note for note in proof.notes)


def test_one_wrong_tensor_is_found_in_half_precision_however_far_others_are() -> None:
    """A limit per tensor: the worst one, which a right layout may reach, hides no other."""
    same = {
        "losses": [4.0],
        "norms": [1.0],
        "evaluation": 0.1,
        "differences": [{"far": 1e-2, "near": 1e-4, "middle": 2e-4}] * 2,
    }
    allowed = limits({"losses": [4.0], "norms": [1.0], "evaluation": 0.1}, same, 2, cut=False)
    assert allowed.of("far") == pytest.approx(math.sqrt(2) * 1e-2)
    assert allowed.of("near") == allowed.of("middle") == pytest.approx(2 * math.sqrt(2) * 2e-4)


def test_a_tensor_that_is_rounding_is_compared_with_the_size_of_all(tmp_path: Path) -> None:
    """Its own size says nothing: a key bias after a step is as large as what two right layouts differ by."""
    theirs = {"weight": torch.full((100,), 0.1), "bias": torch.full((10,), 1e-8)}
    save_file(theirs, tmp_path / "alone_1.safetensors")
    own = {"weight": theirs["weight"] * (1 + 1e-6), "bias": -theirs["bias"]}
    found = _differences(own.items(), str(tmp_path / "alone_1.safetensors"))
    assert found["weight"] == pytest.approx(1e-6, rel=0.1) and found["bias"] < 1e-3


def test_a_key_bias_that_is_rounding_does_not_differ_and_hides_no_other_tensor(tmp_path: Path) -> None:
    """Weights as of a checkpoint: key biases are zero, their gradients zero in theory."""
    start_fork_server()
    asked = asked_for(tmp_path, "vit", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, steps=5)
    model: Any = make_model("vit")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.zero_()
    model.save_pretrained(tmp_path / "tiny")
    proof = prove(prepare(asked, tmp_path), asked.world)
    assert proof.equal, proof
    assert all(row.allowed < 0.05 for row in proof.rows)


def test_a_layout_that_differs_is_found_and_the_command_fails(tmp_path: Path) -> None:
    asked = asked_for(tmp_path, "llama", {"zero_optimization": {"stage": 3}})
    result = command(asked, "--class", "tests.workers.skewed:Skewed", "--num-layers", "2", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["equal"] is False
    assert (found["blamed"], found["to_blame"]) == ([], ""), "one axis needs no further runs"
    assert found["differs_at"] == 1
    names = [name for name, _ in make_model("llama").named_parameters()]
    assert found["differs"] == [name for name in names if name in found["differs"]], "in the model's order"
    assert not any("layers.2" in name for name in found["differs"]), "--num-layers 2"
    rows = {row["what"]: row for row in found["rows"]}
    assert not rows["loss, 2 steps"]["equal"]
    assert rows["loss, 2 steps"]["difference"] == pytest.approx(5e-4, rel=0.1)
    assert rows["resumed, loss and norm"]["equal"], "the layout is equal to itself"


def test_the_table_says_what_was_compared(tmp_path: Path) -> None:
    # Stages, offload, an optimizer of the file, and microbatches as a tokenizer pads them: of two lengths, in a mapping that
    # is no dict.
    config: dict[str, Any] = {
        "pipeline": {"stages": 2},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
    }
    config |= {"zero_optimization": {**OFFLOAD, "stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    asked = asked_for(tmp_path, "llama", config)
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [5, 6, 7]}\n{"input_ids": [8, 9]}\n')
    result = command(asked, "--data", str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 0, result.output
    for words in (
        "on 2 ranks, fp32, against one process",
        "gradient norm",
        "saved, read by from_pretrained",
        "resumed",
        "evaluation of 3 rows",
    ):
        assert words in result.stdout
    assert result.stdout.rstrip().endswith("\nequal")
    assert "AdamW, learning rate 0.001; dropout is 0" in result.stdout


# ---- without processes


def job(**changes: Any) -> Job:
    """Of two steps."""
    plain = Job("", "X", {"bf16": {"enabled": False}}, {}, "AdamW", {"lr": 1e-3}, 2, 2, 1)
    return replace(plain, **changes)


def ranks(**changes: Any) -> list[dict[str, Any]]:
    """What two equal ranks return."""
    one = {
        "losses": [4.0, 3.0],
        "norms": [1.0, 0.5],
        "differences": [{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 1e-7}],
        "next": {"going on": (2.0, 0.1), "resumed": (2.0, 0.1)},
        "reloaded": {"a": 0.0, "b": 0.0},
        "skipped": 0,
        "evaluation": 1.5,
    }
    return [one | changes, one]


ALONE = {"plain": {"losses": [4.0, 3.0, 2.0], "norms": [1.0, 0.5, 0.1], "evaluation": 1.5}}


def test_the_verdict_is_equal_only_if_every_row_is() -> None:
    assert compare(job(), ALONE, ranks()).equal
    for change in (
        {"losses": [4.0, 3.001]},
        {"norms": [1.0, math.nan]},
        {"differences": [{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 1e-4}]},
        {"reloaded": {"a": 0.0, "b": math.nan}},
        {"next": {"going on": (2.0, 0.1), "resumed": (2.1, 0.1)}},
        {"next": {"going on": (2.1, 0.1), "resumed": (2.1, 0.1)}},
        {"evaluation": 1.501},
        {"evaluation": math.nan},
    ):
        assert not compare(job(), ALONE, ranks(**change)).equal, change


def test_a_loss_that_needs_its_rows_together_is_told_only_where_the_layout_differs() -> None:
    alone = {**ALONE, "itself": {TOGETHER: (4.0, 2.0)}}
    for change, told in (({}, False), ({"losses": [4.0, 3.001]}, True)):
        proof = compare(job(), alone, ranks(**change))
        assert proof.equal is not told
        assert any("the loss depends on which rows are in one batch" in note for note in proof.notes) is told


def test_the_first_step_and_the_first_tensor_that_differ_are_named() -> None:
    proof = compare(job(), ALONE, ranks(differences=[{"a": 0.0, "b": 2e-5, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}]))
    assert proof.differs == ["b", "c"]
    assert proof.differs_at == 1


def test_a_half_precision_is_allowed_what_it_costs_one_process() -> None:
    same = {**ALONE["plain"], "losses": [4.04, 3.0, 2.0], "differences": [{"a": 2e-3}, {"a": 3e-3}]}
    half = job(layout={"bf16": {"enabled": True}})
    proof = compare(half, {**ALONE, "same": same}, ranks(losses=[4.04, 3.0]))
    assert proof.equal
    off = math.sqrt(0.01**2 / 3)  # the rms of three losses, of which one is off by a percent
    assert proof.rows[0].allowed == pytest.approx(math.sqrt(2) * 12.9 * off)
    assert proof.rows[2].allowed == pytest.approx(math.sqrt(2) * 2e-3)
    assert any("allowed is what its distance from fp32 makes likely" in note for note in proof.notes)
    cut = job(layout={"bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}})
    assert compare(cut, {**ALONE, "same": same}, ranks()).rows[2].allowed == pytest.approx(2 * 2e-3)


def test_a_choice_of_a_router_may_differ_in_fp16() -> None:
    names = (("layers.0.gate", "layers.0.experts"), ("layers.1.gate", "layers.1.experts"))
    # One process has sent a token of layer 0 elsewhere in the second step; the layout one of layer 1.
    quiet, loud = dict.fromkeys(sum(names, ()), 3e-4) | {"dense": 5e-4}, {"layers.0.gate": 1e-3}
    same = {"losses": [4.0], "norms": [1.0], "evaluation": 0.1, "differences": [quiet, quiet | loud, quiet | loud]}
    plain = {"losses": [4.0], "norms": [1.0], "evaluation": 0.1}
    allowed = limits(plain, same, 3, cut=False, routed=names)
    rms = math.sqrt((4 * 3e-4**2 + 2 * 1e-3**2) / 6)
    for name in sum(names, ()):
        assert allowed.of(name) == pytest.approx(math.sqrt(2) * 6.0 * rms)
    assert allowed.of("dense") == pytest.approx(math.sqrt(2) * 1e-3)
    assert allowed.of("dense", 0) == pytest.approx(math.sqrt(2) * 5e-4)
    assert limits(plain, same, 3, cut=False).of("layers.1.gate") == pytest.approx(2 * math.sqrt(2) * 3e-4)  # its own
    assert limits(plain, None, 3, cut=True).of("layers.1.gate") == FP32


def test_another_order_of_rows_may_widen_a_limit_and_never_narrow_it() -> None:
    plain = {"losses": [4.0], "norms": [1.0], "evaluation": 0.1}
    near, far = {"bias": 1e-6, "a": 1e-4, "b": 1e-4}, {"bias": 1e-5, "a": 1e-4, "b": 1e-4}
    same = {**plain, "differences": [near, near, far]}
    other = {**plain, "differences": [{"bias": 1e-7, "a": 2e-4, "b": 1e-5}], "outputs": {"logits": 1e-3}}
    other |= {"evaluation": 0.101}  # after all steps, and of a small loss
    before = limits(plain, same, 3, cut=False)
    allowed = wider(before, same, other)
    assert allowed.of("a") == pytest.approx(max(before.of("a"), 4 * 2e-4, 12.9 * 1e-4))
    assert allowed.of("bias") == pytest.approx(max(before.of("bias"), 4 * 1e-5, 12.9 * math.sqrt(1.02e-10 / 3)))
    assert allowed.of_output("logits") == pytest.approx(4e-3) and allowed.losses == before.losses
    assert allowed.evaluation == pytest.approx(4 * 0.01)
    alone = {**plain, "differences": [{"bias": 1e-9, "a": 1e-9}], "outputs": {}}
    assert wider(limits(plain, None, 1, cut=False), plain, alone).of("bias") == FP32


def test_the_reference_norm_is_right_where_torchs_own_is_not() -> None:
    big = torch.nn.Parameter(torch.zeros(2_000_000))
    big.grad = torch.full_like(big, 1e-4)
    exact = 1e-4 * 2_000_000**0.5
    assert clip([big], 0.0) == pytest.approx(exact, rel=1e-7)
    assert clip([big], exact / 2) == pytest.approx(exact, rel=1e-7)
    assert float(big.grad.double().norm()) == pytest.approx(exact / 2, rel=1e-5)


def test_fewer_layers_in_every_part_and_in_lists_per_layer() -> None:
    config = transformers.Qwen3Config(num_hidden_layers=6)
    assert len(config.layer_types) == 6
    assert keep_layers(config, 2)
    assert config.num_hidden_layers == len(config.layer_types) == 2
    t5 = transformers.T5Config(num_layers=4, num_decoder_layers=5)
    assert keep_layers(t5, 2)
    assert (t5.num_layers, t5.num_decoder_layers) == (2, 2)
    assert not keep_layers(t5, 2)


def test_rows_of_a_file_are_cut_padded_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2, 3, 4, 5, 6]}\n\n{"input_ids": [7], "labels": [9]}\n')
    batches = microbatches(torch.nn.Linear(1, 1), rows=3, count=2, seq=4, path=path)
    assert batches[0]["input_ids"].tolist() == [[1, 2, 3, 4], [7, 0, 0, 0], [1, 2, 3, 4]]
    assert batches[0]["labels"].tolist() == [[1, 2, 3, 4], [9, -100, -100, -100], [1, 2, 3, 4]]
    assert batches[0]["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batches[1]["input_ids"][0].tolist() == [7, 0, 0, 0]
    found = microbatches(torch.nn.Linear(1, 1), rows=1, count=2, seq=4, path=path, ragged=True)
    assert [batch["input_ids"].tolist() for batch in found] == [[[1, 2, 3, 4]], [[7]]], "as long as its longest row"
    assert all(len({value.shape for value in batch.values()}) == 1 for batch in found)


@pytest.mark.parametrize(
    ("options", "words", "kind"),
    [
        ({"class_name": "nowhere:Model"}, "--class", ConfigError),
        ({"data": Path("missing.jsonl")}, "--data", ConfigError),
        ({"model": "a folder without a config"}, "--model", ConfigError),
        ({"world": 3}, "pipeline.stages: 2 does not divide the 3 processes", ConfigError),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str, kind: Any, tmp_path: Path) -> None:
    asked = asked_for(tmp_path, "llama", {"pipeline": {"stages": 2}})
    if "model" in options:
        options = {"model": str(tmp_path)}
    with pytest.raises(kind, match=words):
        prepare(replace(asked, **options), tmp_path)


def test_every_output_is_compared_but_those_that_a_layout_refuses(tmp_path: Path) -> None:
    class Refused:
        def detach(self) -> None:
            raise ModelError("states: an earlier stage's")

    class Model(torch.nn.Module):
        config = SimpleNamespace()
        states: Any = torch.zeros(2)

        def forward(self, input_ids: torch.Tensor) -> dict[str, Any]:
            return {"logits": torch.ones(2, 3), "states": [self.states], "routers": torch.ones(2, 3)}

    class Trainer:
        model, off, _prepare_inputs = Model(), 1.0, dict
        dist_engine = SimpleNamespace(
            evaluate=lambda batch, read: read(Trainer.model, batch), mesh=SimpleNamespace(control=ONE_RANK)
        )

        def predict(self, rows: Any, ignore_keys: Any = None) -> Any:
            given = {"logits": torch.ones(2, 3) * self.off, "states": [torch.zeros(2)], "routers": torch.ones(2, 3)}
            return SimpleNamespace(predictions=[x for name, x in given.items() if name not in (ignore_keys or ())])

    trainer, rows, file = Trainer(), [{"input_ids": torch.zeros(1, 3)}], str(tmp_path / "outputs.safetensors")
    names = {"logits": True, "states.0": True, "routers": False}
    whole, why = outputs.predicted(trainer, rows, names)
    outputs.keep(whole, file)
    assert (list(whole), why) == (list(names), "")
    assert outputs.names_in(file) == names
    assert outputs.differences(whole, file) == {"logits": 0.0, "states.0": 0.0}
    trainer.off = 1.01
    assert outputs.differences(outputs.predicted(trainer, rows, names)[0], file)["logits"] == pytest.approx(0.01)
    Model.states = Refused()
    found, why = outputs.predicted(trainer, rows, names)
    assert (list(found), why) == (["logits", "routers"], "states: an earlier stage's")
    assert outputs.differences(found, file, refused=why).keys() == {"logits"}
    assert outputs.differences(found, file)["states.0"] == math.inf  # gone without a word
    assert len(outputs.few_rows(rows * 9, 1 << 24)) == 1
