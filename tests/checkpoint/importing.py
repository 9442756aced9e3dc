"""Checkpoints of other programs: how they are made, and what a rank does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.covering import FULL_GRID
from tests.hf.lifecycle import logged
from tests.hf.on_ranks import dist_trainer
from tests.hf.recipes import RECIPES

AT = 3
"""The step whose checkpoint is taken; the schedule is of six."""
LAST = 6 if FULL_GRID else 5
"""Where runs stop: the second step after the checkpoint is the first whose loss depends on the optimizer's state."""
STEPS: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": AT}


class StopsAfter(TrainerCallback):
    """A run that is longer ends here."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """On every rank."""
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


def stock(folder: Path, recipe: str) -> list[tuple[Any, ...]]:
    """The stock Trainer in one process, with a checkpoint on the way: its log."""
    trainer = RECIPES[recipe].build(Trainer, TrainingArguments, folder, 4, **STEPS)
    trainer.add_callback(StopsAfter(LAST))
    trainer.train()
    return logged(trainer)


def resumed(
    folder: Path, recipe: str, stage: int, checkpoint: str, micro: int = 2, last: int = LAST, **changes: Any
) -> dict[str, Any]:
    """Resume from a checkpoint of another program and train to the end, or to step `last`."""
    said: list[str] = []
    import hf_dist.hf.resuming as resuming

    resuming.say = said.append
    trainer = dist_trainer(recipe, stage, folder, per_device_train_batch_size=micro, max_steps=6, **changes)
    trainer.add_callback(StopsAfter(last))
    trainer.train(resume_from_checkpoint=checkpoint)
    return {"logs": logged(trainer)[AT:], "said": [line for line in said if "was written by" in line]}


def refused(folder: Path, checkpoint: str, recipe: str = "even") -> str:
    """The error a user sees."""
    from hf_dist.errors import CheckpointError

    try:
        resumed(folder, recipe, 3, checkpoint)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def file_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder as they are stored."""
    from safetensors.torch import load_file

    return dict(load_file(checkpoint / "model.safetensors"))


def write_file(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """As `save_pretrained`, in one file."""
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def named_state(checkpoint: Path, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]], Any]:
    """Weights, optimizer state and param groups of a stock checkpoint under full names."""
    from safetensors.torch import load_file

    weights = load_file(checkpoint / "model.safetensors")
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    trainer = Trainer(model, TrainingArguments(output_dir=str(checkpoint / "x"), use_cpu=True, report_to=[]))
    decay = set(trainer.get_decay_parameter_names(model))
    names = [n for n, _ in model.named_parameters() if n in decay]
    names += [n for n, _ in model.named_parameters() if n not in decay]
    state = {names[number]: values for number, values in saved["state"].items()}
    groups = [{**g, "params": [names[number] for number in g["params"]]} for g in saved["param_groups"]]
    return weights, state, groups


def write_sharded(rank: int, world: int, folder: str, weights: Any, state: Any, groups: Any) -> None:
    """What accelerate writes for FSDP2 with SHARDED_STATE_DICT: DTensors, in torch's own DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items()}
        return distribute_tensor(value, mesh, [Shard(0)]) if value.dim() else value

    dcp.save({"model": cut(weights)}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
    dcp.save({"optimizer": {"state": cut(state), "param_groups": groups}}, checkpoint_id=f"{folder}/optimizer_0")


def write_universal(folder: Path, weights: Any, state: Any, *, flat: bool) -> None:
    """What `ds_to_universal.py` writes; for stage 3 (`flat`) without shapes and steps."""
    zero = folder / "global_step3_universal" / "zero"
    for name, value in weights.items():
        (zero / name).mkdir(parents=True)
        values = {"fp32": value, "exp_avg": state[name]["exp_avg"], "exp_avg_sq": state[name]["exp_avg_sq"]}
        for key, tensor in values.items():
            torch.save(tensor.reshape(-1) if flat else {"param": tensor, "cat_dim": 0}, zero / name / f"{key}.pt")
        if not flat:
            torch.save(int(state[name]["step"]), zero / name / "step.pt")
    (zero / "optimizer_state.pt").write_bytes(b"a pickle of DeepSpeed's own classes: never opened")
    (folder / "latest_universal").write_text("global_step3_universal")
