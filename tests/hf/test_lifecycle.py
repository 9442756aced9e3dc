"""Saving for `from_pretrained`, resuming bit for bit, the best model, precision, generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.lifecycle import file_dtype, generate, pairs
from tests.hf.on_ranks import run_jobs
from tests.hf.recipes import make_model, plain_arguments

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
LIFE = "tests.hf.lifecycle:"
Job = tuple[str, dict[str, Any]]

SAVED = [
    *(("plain", stage, None) for stage in (0, 2, 3)),
    *(("plain", stage, BF16) for stage in (1, 3)),
    *((name, stage, None) for name in ("moe", "lora") for stage in (1, 3)),
]
SAVED = SAVED if FULL_GRID else SAVED[4:7:2]  # adapters: `test_checkpoint_models.py`
RESUMED = [
    *(("plain", stage, None) for stage in (1, 3)),
    *(("dropout", 3, BF16), ("lora", 3, None), ("moe", 3, None), ("adagrad", 1, None)),
    *(("random_collator", stage, None) for stage in (0, 3)),
]
RESUMED = RESUMED if FULL_GRID else RESUMED[-1:]  # with dropout; experts: `parallel/experts/test_resume.py`
BEST = [
    *(
        ("plain", stage, only_model, config)
        for stage in (1, 3)
        for only_model in (False, True)
        for config in (None, BF16)
    ),
    *((name, 3, only_model, None) for name in ("lora", "moe") for only_model in (False, True)),
]
BEST = BEST if FULL_GRID else BEST[8:9]  # of whole models: `test_checkpoint_models.py`
HALF = [(stage, dtype) for stage in (1, 3) for dtype in ("bf16", "fp16")]
HALF = HALF if FULL_GRID else HALF[1:3]
AT = (3, 4, 6) if FULL_GRID else (3,)
"""Inside the first epoch of four steps, at its end, inside the second; `test_resume_elsewhere.py` has all places."""
GENERATED = (1, 3) if FULL_GRID else (3,)  # stage 1: `test_generation.py`
JOBS: list[Job] = [
    *((LIFE + "saved", {"recipe": name, "stage": stage, "config": config}) for name, stage, config in SAVED),
    *(
        (LIFE + "resumed", {"recipe": name, "stage": stage, "config": config, "at": AT})
        for name, stage, config in RESUMED
    ),
    *(
        (LIFE + "best", {"recipe": name, "stage": stage, "only_model": only, "config": config})
        for name, stage, only, config in BEST
    ),
    *((LIFE + "precision", {"stage": stage, "dtype": dtype}) for stage, dtype in HALF),
    *((LIFE + "generated", {"stage": stage}) for stage in GENERATED),
]
AGAIN = {"recipe": "lora" if FULL_GRID else "random_collator", "stage": 3}
RESUMED_AGAIN = {**AGAIN, "config": None, "at": AT}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], list[Any]]:
    """`outcomes(function, arguments)`: what each of two ranks returned; one spawn for all."""
    folder = tmp_path_factory.mktemp("ranks")
    whole = JOBS.index((LIFE + "resumed", RESUMED_AGAIN))
    again = {**AGAIN, "checkpoint": str(folder / str(whole) / f"checkpoint-{AT[len(AT) // 2]}")}
    jobs = [*JOBS, (LIFE + "resumed_after_evaluation", again)]
    results = run_ranks(run_jobs, 2, (jobs, str(folder)), timeout=800)

    def of(name: str, arguments: dict[str, Any]) -> list[Any]:
        index = -1 if name == "resumed_after_evaluation" else JOBS.index((LIFE + name, arguments))
        for rank in results:
            assert not isinstance(rank[index], str), rank[index]
        return [rank[index] for rank in results]

    return of


def named(*values: Any) -> str:
    """The id of a case."""
    return "-".join("bf16" if v == BF16 else str(v) for v in values if v is not None)


def equal(a: Any, b: Any) -> bool:
    """Same structure and the same bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def check_same_weights(loaded: Any, weights: dict[str, torch.Tensor]) -> None:
    """`loaded`, a plain model, holds `weights` bit for bit, and they are not the ones training started from."""
    state = loaded.state_dict()
    assert state.keys() == weights.keys()
    assert [n for n, w in weights.items() if not torch.equal(state[n].float(), w.float())] == []


# ---- save


@pytest.mark.parametrize(("recipe", "stage", "config"), [pytest.param(*c, id=named(*c)) for c in SAVED])
def test_save_model_writes_what_from_pretrained_loads(recipe: str, stage: int, config: Any, outcomes: Any) -> None:
    saved, _ = outcomes("saved", {"recipe": recipe, "stage": stage, "config": config})
    start = make_model(recipe if recipe != "plain" else "llama").state_dict()
    assert any(not torch.equal(start[n], w) for n, w in saved["weights"].items())
    if recipe == "lora":
        from peft import PeftModel

        assert not Path(saved["folder"], "model.safetensors").exists()
        check_same_weights(PeftModel.from_pretrained(make_model("llama"), saved["folder"]), saved["weights"])
        return
    loaded = tf.AutoModelForCausalLM.from_pretrained(saved["folder"])
    check_same_weights(loaded, saved["weights"])
    tied = recipe == "plain"
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    # Loaded in fp32: the file has all bits of the master weights, whatever the compute dtype.
    assert file_dtype(saved["folder"]) == ("float32", {"float32"})


def test_experts_are_saved_under_the_names_of_the_hub(outcomes: Any) -> None:
    saved, _ = outcomes("saved", {"recipe": "moe", "stage": 3, "config": None})
    names = load_file(f"{saved['folder']}/model.safetensors").keys()
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
    assert not [n for n in names if n.endswith("experts.gate_up_proj")]


# ---- resume


@pytest.mark.parametrize(
    ("step", "recipe", "stage", "config"),
    [pytest.param(step, *case, id=f"{named(*case)}-{step}") for case in RESUMED for step in AT],
)
def test_resume_equals_the_run_without_a_break_bit_for_bit(
    step: int, recipe: str, stage: int, config: Any, outcomes: Any
) -> None:
    for rank in outcomes("resumed", {"recipe": recipe, "stage": stage, "config": config, "at": AT}):
        whole, again = rank["whole"], rank["runs"][step]
        assert [entry[0] for entry in again["logs"]] == list(range(1, 9))
        assert again["logs"] == whole["logs"]
        assert equal(again["state"], whole["state"])


def test_resume_into_a_model_that_is_already_sharded(outcomes: Any) -> None:
    again = outcomes("resumed_after_evaluation", {})
    for mine, expected in zip(again, outcomes("resumed", RESUMED_AGAIN), strict=True):
        assert equal(mine["state"], expected["whole"]["state"])


# ---- the best model


@pytest.mark.parametrize(
    ("recipe", "stage", "only_model", "config"),
    [pytest.param(*c, id=named(c[0], c[1], "only" if c[2] else "full", c[3])) for c in BEST],
)
def test_load_best_model_at_end_restores_it(
    recipe: str, stage: int, only_model: bool, config: Any, outcomes: Any
) -> None:
    arguments = {"recipe": recipe, "stage": stage, "only_model": only_model, "config": config}
    outcome, _ = outcomes("best", arguments)
    assert outcome["checkpoint"].endswith("checkpoint-4"), "the first epoch, not the last"
    assert outcome["losses"][0] == pytest.approx(outcome["losses"][1], rel=1e-6)
    if recipe == "lora":
        from peft import PeftModel

        best: Any = PeftModel.from_pretrained(make_model("llama"), outcome["checkpoint"])
    else:
        best = tf.AutoModelForCausalLM.from_pretrained(outcome["checkpoint"])
    check_same_weights(best, outcome["weights"])


# ---- precision, optimizers


@pytest.mark.parametrize(("stage", "dtype"), HALF)
def test_the_json_alone_turns_on_half_precision_without_autocast(stage: int, dtype: str, outcomes: Any) -> None:
    outcome, _ = outcomes("precision", {"stage": stage, "dtype": dtype})
    name = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    assert outcome["seen"] == {(False, name, name)}
    assert outcome["masters"] == outcome["moments"] == {"torch.float32"}
    assert len(outcome["losses"]) == 3
    assert all(0 < loss < 10 for loss in outcome["losses"])
    assert outcome["scale"] == (65536 if dtype == "fp16" else 1)
    assert outcome["scaler"], "accelerate must neither scale nor autocast"


# ---- generation


@pytest.mark.parametrize("stage", GENERATED)
def test_generation_with_uneven_lengths_equals_one_process(stage: int, outcomes: Any, tmp_path: Path) -> None:
    both = outcomes("generated", {"stage": stage})
    arguments = tf.Seq2SeqTrainingArguments(
        **plain_arguments(tmp_path, 12, max_steps=2, predict_with_generate=True, generation_max_length=12)
        | {"gradient_accumulation_steps": 1, "per_device_eval_batch_size": 4}
    )
    expected = generate(tf.Seq2SeqTrainer, arguments)
    assert len(expected) == len(pairs(8))
    assert len({len(row) for row in expected}) > 1, "lengths must differ for the test to say anything"
    assert both[0] == both[1] == expected
