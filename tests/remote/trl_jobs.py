"""TRL's trainers with a teacher or a reference in another role, or beside the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.ecosystem.runs import arguments, over
from tests.ecosystem.trl_trainers import RECIPES, config_of, trainers

TEACHERS = {
    "DistillationTrainer": "teacher_model", "gkd.GKDTrainer": "teacher_model", "DPOTrainer": "ref_model",
    "KTOTrainer": "ref_model",
}  # fmt: skip
"""Trainer -> the argument that takes the model of the other role."""


def with_teacher(root: str, ranks: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Roles: a teacher on `ranks` ranks in that layout, the trainer on the rest."""
    teacher = {"ranks": ranks, "model": f"{root}/teacher", "config": layout}
    return {"hf_dist": {"roles": {"trainer": {"ranks": "rest"}, "teacher": teacher}}}


def train(rank: int, world: int, name: str, root: str, config: dict[str, Any], out: str) -> dict[str, Any] | None:
    """Losses, norms and weights of three steps; None on the ranks of the teacher. Without roles it is loaded by every rank."""
    recipe = RECIPES[name]
    tf.set_seed(3)
    # The teacher's rows only: what a student samples depends on which rows a rank has.
    options = {**recipe.options, **({"lmbda": 0.0} if "gkd" in name else {}), "dist_config": config}
    try:
        args = arguments(Path(out), 3, False, config_of(name), **options)
    except SystemExit as end:
        assert not end.code, end
        return None
    given: dict[str, Any] = {"processing_class": recipe.makes()}
    if "hf_dist" in config:
        import hf_dist

        given[TEACHERS[name]] = hf_dist.remote_model("teacher")
    else:
        given[TEACHERS[name]] = tf.AutoModelForCausalLM.from_pretrained(f"{root}/teacher", dtype=torch.float32)
    trainer = over(3, trainers()[name])(f"{root}/lm", args=args, train_dataset=recipe.rows(24), **given)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    state = trainer.accelerator.get_state_dict(trainer.model)
    if "hf_dist" in config:
        given[TEACHERS[name]]._asker.close()
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "weights": {key: value.detach().float().clone() for key, value in state.items()} if rank == 0 else {},
    }
