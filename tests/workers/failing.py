"""A training that fails in the way its argument says: `torchrun --nproc_per_node 2 failing.py typo FOLDER`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = str(Path(__file__).resolve().parents[2])


def rank() -> int:
    """Of this process."""
    return int(os.environ["RANK"])


def train(
    folder: str,
    config: Any = None,
    model: Any = None,
    act: Callable[[], None] | None = None,
    resume: str | None = None,
    **changes: Any,
) -> None:
    """Fifty short steps with the HF Trainer; `act` is called on rank 1 after the second."""
    from transformers import TrainerCallback

    from hf_dist import DistTrainer, DistTrainingArguments
    from tests.hf.recipes import make_model, pad, plain_arguments, texts

    class Act(TrainerCallback):
        """Runs `act`."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """In the middle of training."""
            if act is not None and state.global_step == 2 and rank() == 1:
                act()

    config = {"zero_optimization": {"stage": 3}} if config is None else config
    arguments = DistTrainingArguments(
        **plain_arguments(folder, 2, max_steps=50, gradient_accumulation_steps=1, dist_config=config) | changes
    )
    model = make_model() if model is None else model
    DistTrainer(model, arguments, train_dataset=texts(), data_collator=pad, callbacks=[Act()]).train(resume)


def _model(change: Callable[[Any], None], only_rank: int | None = 1) -> Any:
    from tests.hf.recipes import make_model

    model = make_model()
    if only_rank in (None, rank()):
        change(model)
    return model


def _fail() -> None:
    raise RuntimeError("the data of step 2 is broken")


def _spread(model: Any) -> None:
    model.hf_device_map = {"model.embed_tokens": "cpu", "model.layers.0": 0, "model.layers.1": 1, "lm_head": "disk"}


def _one_process_seen(folder: str) -> None:
    """What happens on a CPU machine when accelerate looks at the job before anything of ours."""
    from accelerate import Accelerator

    os.environ.pop("ACCELERATE_USE_CPU", None)
    Accelerator()
    train(folder, max_steps=2)


def _raw_loop_alone(folder: str) -> None:
    """The same with one's own loop."""
    from accelerate import PartialState

    from hf_dist import DistAccelerator

    os.environ.pop("ACCELERATE_USE_CPU", None)
    PartialState()
    DistAccelerator(dist_config={"zero_optimization": {"stage": 3}})


def _one_rank_has_a_typo(folder: str) -> None:
    train(folder, {"zero_optimization": {"stage": 3} | ({"stages": 3} if rank() == 1 else {})})


def _resume_from_damaged(folder: str) -> None:
    train(folder, max_steps=2, save_strategy="steps", save_steps=2)
    checkpoint = Path(folder) / "checkpoint-2"
    if rank() == 0:
        (checkpoint / "model.safetensors").write_bytes(b"")
        (checkpoint / "seen").touch()
    while not (checkpoint / "seen").exists():
        time.sleep(0.05)
    train(folder, resume=str(checkpoint))


def _leaves(folder: str) -> None:
    """What the interpreter does at its end."""
    train(folder, max_steps=2)
    atexit._run_exitfuncs()
    assert not torch.distributed.is_initialized(), "gloo's threads are still running"


PIPELINE = {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}


def _in_the_schedule(folder: str, act: Callable[[], None]) -> None:
    """`act` is called on the last stage in the middle of the second window."""
    model = _model(lambda m: None)
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)
        if rank() == 1 and len(calls) == 7:
            act()

    model.model.layers[1].register_forward_pre_hook(count)
    train(folder, PIPELINE, model, gradient_accumulation_steps=4)


def _broken() -> None:
    raise RuntimeError("the data of this microbatch is broken")


def _without_blocks() -> Any:
    from torch import nn

    class Flat(nn.Module):
        """Nothing in it repeats."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

        def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
            """A loss, as HF models return it."""
            logits = self.head(self.embed(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0))}

    return Flat()


CASES: dict[str, Callable[[str], None]] = {
    "more_stages_than_blocks": lambda folder: train(
        folder, {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}}
    ),
    "stages_do_not_divide": lambda folder: train(folder, {"pipeline": {"stages": 3}}),
    "no_blocks": lambda folder: train(folder, PIPELINE, _without_blocks()),
    "raises_in_schedule": lambda folder: _in_the_schedule(folder, _broken),
    "killed_in_schedule": lambda folder: _in_the_schedule(folder, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "typo": lambda folder: train(folder, {"zero_optimisation": {"stage": 3}}),
    "mismatch": lambda folder: train(folder, {"gradient_clipping": 2.0, "train_micro_batch_size_per_gpu": 3}),
    "typo_on_one_rank": _one_rank_has_a_typo,
    "configs_differ": lambda folder: train(folder, {"zero_optimization": {"stage": 3 - rank()}}),
    "parameters_differ": lambda folder: train(
        folder, model=_model(lambda m: m.add_module("extra", m.lm_head.__class__(4, 4)))
    ),
    "frozen_on_one_rank": lambda folder: train(folder, model=_model(lambda m: m.model.norm.requires_grad_(False))),
    "device_map": lambda folder: train(folder, model=_model(_spread, only_rank=None)),
    "damaged_checkpoint": _resume_from_damaged,
    "raises": lambda folder: train(folder, act=_fail),
    "killed": lambda folder: train(folder, act=lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "exits": lambda folder: train(folder, act=lambda: sys.exit(3)),
    "exits_cleanly": lambda folder: train(folder, act=lambda: sys.exit(0)),
    "one_process_seen": _one_process_seen,
    "raw_loop_alone": _raw_loop_alone,
    "leaves": _leaves,
    "nothing_wrong": lambda folder: train(folder, max_steps=3),
}


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    CASES[sys.argv[1]](sys.argv[2])
