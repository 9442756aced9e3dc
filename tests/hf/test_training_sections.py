"""Sections about training in a DistTrainer: growing lengths, elastic batches, the table of a forward."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dist.config.training_sections import LayerDropConfig
from hf_dist.hf.callbacks.layer_drop import left_out
from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.hf.on_ranks import dist_trainer, record_of, run_jobs
from tests.hf.recipes import RECIPES

TOLERANCE = 1e-5
HERE, DROPS = "tests.hf.test_training_sections:", "layer drop, "
LENGTHS = (4, 6, 6, 8, 10, 12, 12)
"""What `CURRICULUM` gives the steps of the recipe."""
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 12,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 6, 8, 10, 12], "max_step": [1, 3, 4, 5]},
}
LAYER_DROP = {"enabled": True, "theta": 0.2, "gamma": 0.5}
PIPELINE = {"pipeline": {"stages": 2}}
SPAN: dict[str, Any] = {} if FULL_GRID else {"max_steps": 6}
"""Of the runs that are compared: two epochs of four steps, by default one and a half."""
ELASTIC = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 4], "prefer_larger_batch": True}


def watched(trainer: Any, seen: list[int]) -> Any:
    """The trainer; `seen` gets the lengths that the model sees on this rank."""
    hook = lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1])  # noqa: E731
    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)
    return trainer


def curriculum(folder: Path, stage: int, config: dict[str, Any]) -> dict[str, Any]:
    """A run whose lengths grow; with the lengths that the model saw on this rank."""
    seen: list[int] = []
    config = {"curriculum_learning": CURRICULUM, **config}
    trainer = watched(dist_trainer("plain", stage, folder, config=config, **SPAN), seen)
    trainer.train()
    return {**record_of(trainer), "seen": seen}


class StopsAfterThree(TrainerCallback):
    """Ends a training in the middle of its schedule."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HF's."""
        if state.global_step == 3:
            control.should_training_stop = True


def resumed(folder: Path, stage: int) -> dict[str, Any]:
    """The same, stopped after three steps and resumed."""
    seen: list[int] = []
    for callback, checkpoint in ((StopsAfterThree(), None), (TrainerCallback(), str(folder / "checkpoint-3"))):
        changes = {"save_strategy": "steps", "save_steps": 3, **SPAN}
        config = {"curriculum_learning": CURRICULUM}
        trainer = watched(dist_trainer("plain", stage, folder, config=config, **changes), seen)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=checkpoint)
    return {**record_of(trainer), "seen": seen}


def elastic(folder: Path) -> dict[str, Any]:
    """What becomes of the arguments; one step."""
    trainer = dist_trainer("plain", 2, folder, config={"elasticity": ELASTIC}, max_steps=1)
    trainer.train()
    args = trainer.args
    return {
        "sizes": (args.per_device_train_batch_size, args.gradient_accumulation_steps, trainer.dist.train_batch_size)
    }


def flops(folder: Path, stage: int, **section: Any) -> str:
    """The table of the second step."""
    file = folder / "flops.txt"
    config = {"flops_profiler": {"enabled": True, "output_file": str(file), **section}}
    trainer = dist_trainer("plain", stage, folder, config=config, max_steps=2)
    trainer.train()
    return file.read_text() if trainer.args.process_index == 0 else ""


def layer_drop(folder: Path, stage: int, **changes: Any) -> dict[str, Any]:
    """A run in which blocks are left out."""
    trainer = dist_trainer("plain", stage, folder, config={"progressive_layer_drop": LAYER_DROP}, **SPAN, **changes)
    trainer.train()
    assert not any("forward" in vars(module) and not stage for module in trainer.model.modules())
    return record_of(trainer)


JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 0": (HERE + "curriculum", {"stage": 0, "config": {}}),
    "stage 3": (HERE + "curriculum", {"stage": 3, "config": {}}),
    "pipeline": (HERE + "curriculum", {"stage": 0, "config": PIPELINE}),
    "resumed": (HERE + "resumed", {"stage": 2 if FULL_GRID else 3}),
    "layer drop, stage 0": (HERE + "layer_drop", {"stage": 0}),
    "layer drop, stage 3": (HERE + "layer_drop", {"stage": 3}),
    "layer drop, checkpointed": (HERE + "layer_drop", {"stage": 3, "gradient_checkpointing": True}),
    "elastic": (HERE + "elastic", {}),
    "flops": (HERE + "flops", {"stage": 3}),
    "flops, short": (HERE + "flops", {"stage": 0, "detailed": False, "module_depth": 3, "top_modules": 1}),
}
# The run that is resumed is at stage 3, the pipeline at stage 0, and what checkpoints recompute at stage 3.
JOBS = some_of(JOBS, "pipeline", "resumed", "layer drop, checkpointed", "elastic", "flops", "flops, short")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the main rank of two saw of each job."""
    folder = str(tmp_path_factory.mktemp("sections"))
    found = run_ranks(run_jobs, 2, (list(JOBS.values()), folder), timeout=400)[0]
    return dict(zip(JOBS, found, strict=True))


class CutsByHand:
    """The stock Trainer on batches that are cut before anybody counts their tokens."""

    def get_batch_samples(self, iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """HF's."""
        step = self.state.global_step  # type: ignore[attr-defined]
        length = LENGTHS[min(step, len(LENGTHS) - 1)]
        cut = ({key: value[:, :length] for key, value in batch.items()} for batch in iterator)
        return super().get_batch_samples(cut, *args, **kwargs)  # type: ignore[misc]


@functools.cache
def stock_record_of(override: type, ranks: int) -> dict[str, Any]:
    """The expected record for so many data ranks."""
    recipe = RECIPES["plain"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = type(recipe)(recipe.model, recipe.rows, override).in_one_process(folder, ranks, **SPAN)
        trainer.train()
        return record_of(trainer)


@pytest.mark.parametrize("job", [job for job in ("stage 0", "stage 3", "pipeline", "resumed") if job in JOBS])
def test_a_growing_length_equals_batches_cut_by_hand(job: str, results: Any) -> None:
    ours = results[job]
    assert isinstance(ours, dict), ours
    stock = stock_record_of(CutsByHand, 1 if job == "pipeline" else 2)
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=2e-4, atol=1e-4)  # logs are rounded
    torch.testing.assert_close(ours["norms"], stock["norms"], rtol=TOLERANCE, atol=0.0)
    for name, value in stock["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=TOLERANCE, atol=1e-7)


class DropsByHand:
    """The stock Trainer whose blocks pass their input on in the steps that leave them out."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """HF's, with other forwards for the time of the call."""
        layers = model.model.layers
        section = LayerDropConfig(**LAYER_DROP)
        out = left_out(section, self.state.global_step, len(layers), self.args.seed)  # type: ignore[attr-defined]
        for index in out:
            layers[index].forward = lambda hidden_states, *args, **kwargs: hidden_states
        loss = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        for index in out:
            del layers[index].forward
        return loss


@pytest.mark.parametrize("job", [job.removeprefix(DROPS) for job in JOBS if job.startswith(DROPS)])
def test_blocks_left_out_of_a_step_are_those_of_one_process(job: str, results: Any) -> None:
    ours = results[DROPS + job]
    assert isinstance(ours, dict), ours
    stock = stock_record_of(DropsByHand, 2)
    torch.testing.assert_close(ours["norms"], stock["norms"], rtol=TOLERANCE, atol=0.0)
    for name, value in stock["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=TOLERANCE, atol=1e-7)


def test_the_deeper_and_the_later_the_more_is_left_out() -> None:
    section = LayerDropConfig(enabled=True, theta=0.5, gamma=0.01)
    assert left_out(section, 0, 24, 5) == frozenset()
    shares = [sum(block in left_out(section, step, 4, 5) for step in range(2000, 4000)) / 2000 for block in range(4)]
    for share, expected in zip(shares, (0.125, 0.25, 0.375, 0.5), strict=True):
        assert abs(share - expected) < 0.04


def test_the_model_sees_no_row_longer_than_the_step_allows(results: Any) -> None:
    seen = results["stage 3" if FULL_GRID else "resumed"]["seen"]
    allowed = [length for length in LENGTHS for _ in range(3)]
    assert all(length <= most for length, most in zip(seen, allowed, strict=False)), seen
    assert seen[:3] == [4, 4, 4] and max(seen) > 8


def test_elasticity_decides_the_arguments_of_the_trainer(results: Any) -> None:
    assert results["elastic"]["sizes"] == (4, 3, 24)


def test_the_table_of_a_forward_names_modules_with_their_share(results: Any) -> None:
    text = results["flops"]
    head, whole, *_ = text.splitlines()
    assert head.startswith("flops_profiler: one forward of LlamaForCausalLM, ")
    assert whole.split()[0] == "LlamaForCausalLM" and "100%" in whole
    for name in ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn", "lm_head"):
        assert any(line.split()[0] == name for line in text.splitlines()), name
    short = results["flops, short"].splitlines()
    assert len(short) < len(text.splitlines()) and not any("mlp" in line and "self_attn" in line for line in short)
