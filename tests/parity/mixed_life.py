"""One training that stops after every step and goes on under another mixture of axes, in the Trainer; what a rank does."""

from __future__ import annotations

from typing import Any

import torch

from tests.covering import FULL_GRID
from tests.hf import lifetimes
from tests.hf.lifetimes import PROMPT

CHAIN: list[tuple[int, dict[str, Any]]] = [
    (3, {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}),
    (1, {"pipeline": {"stages": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}}),
    (3, {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}}),
    (1, {"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}),
    (2, {"sequence_parallel_size": 2, "expert_parallel": {"enabled": True, "autoep_size": 2}}),
    (0, {"pipeline": {"stages": 2}, "sequence_parallel_size": 2}),
    (3, {}),
]
"""ZeRO's stage and axes, step by step; four ranks."""
MORE: list[dict[str, Any]] = [
    {},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    {},
    {"activation_checkpointing": {"every_n_layers": 1}},
    {"hf_dist": {"memory_budget": "1GB"}},
    {"activation_checkpointing": {"every_n_layers": 1}},
    {"zero_optimization": {"mics_shard_size": 2}},
]
"""What else a config has."""
if not FULL_GRID:  # stages and experts become shards; cut matrices: `parallel/tensor/test_layouts.py`
    CHAIN, MORE = ([steps[step] for step in (1, 6)] for steps in (CHAIN, MORE))  # type: ignore[assignment]


def config_of(step: int) -> dict[str, Any]:
    """The JSON of a step."""
    stage, axes = CHAIN[step]
    quiet = {"stall_report_seconds": 0, "check_load": False, **MORE[step].get("hf_dist", {})}
    if "tensor_parallel" in axes:
        quiet["sequence_regions"] = "auto"
    zero = {"stage": stage, **MORE[step].get("zero_optimization", {})}
    return {**axes, **MORE[step], "zero_optimization": zero, "hf_dist": quiet}


def data_ranks(step: int, world: int) -> int:
    """That read different rows."""
    axes = CHAIN[step][1]
    same = axes.get("pipeline", {}).get("stages", 1) * axes.get("tensor_parallel", {}).get("autotp_size", 1)
    return int(world // (same * axes.get("sequence_parallel_size", 1)))


OPTIONS = {
    "max_steps": len(CHAIN),
    "save_strategy": "no",
    "optim": "adamw_torch",
    "adam_epsilon": 1e-3,
    "learning_rate": 1e-2,
}


def seen(trainer: Any) -> dict[str, Any]:
    """The last loss and norm, an evaluation, greedy tokens."""
    found = {key: [log[key] for log in trainer.state.log_history if key in log][-1] for key in ("loss", "grad_norm")}
    found["eval_loss"] = trainer.evaluate()["eval_loss"]
    trainer.model.eval()
    tokens = trainer.model.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False)
    trainer.model.train()
    return {key: float(value) for key, value in found.items()} | {"tokens": tokens.tolist()}


def one_step(step: int, folder: str, world: int) -> dict[str, Any]:
    """Go on from the checkpoint of the step before, under the layout of this one."""
    from transformers import TrainerCallback

    class StopHere(TrainerCallback):
        """Saves, too."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            """The only step."""
            control.should_training_stop = control.should_save = True
            return control

    model = lifetimes.mixture()
    if step:  # a load that does nothing is seen
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=0.1)
    ranks = data_ranks(step, world)
    trainer = lifetimes.trainer(model, folder, CHAIN[step][0], ranks, config_of(step), **OPTIONS)
    trainer.add_callback(StopHere())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}" if step else None)
    return seen(trainer)


def stock_life(folder: str) -> list[dict[str, Any]]:
    """One process of the stock Trainer that never stops. (Its own resume leaves experts as they were made.)"""
    from transformers import TrainerCallback

    found: list[dict[str, Any]] = []

    class Look(TrainerCallback):
        """After each step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            """The record of a step is there."""
            if "loss" in logs:
                found.append(seen(trainer))
                trainer.save_model(f"{folder}/checkpoint-{state.global_step}")

    trainer = lifetimes.trainer(lifetimes.mixture(), folder, None, **OPTIONS)
    trainer.add_callback(Look())
    trainer.train()
    return found


def whole_life(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """Every step, each by a Trainer of its own."""
    return [one_step(step, folder, world) for step in range(len(CHAIN))]
