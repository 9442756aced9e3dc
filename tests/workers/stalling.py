"""Trainings in which one rank is late, stopped, killed or raises, at the place that the case's name says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.workers.failing import rank

LIMIT = 1.5
"""Seconds after which the watchdog reports."""
NAP = 4.0


def train(
    folder: str, *, in_collate: Any = None, in_save: Any = None, hook: Any = None, read: Any = None, cp: int = 1,
    **changes: Any,
) -> None:  # fmt: skip
    """Six steps with the HF Trainer; each of the functions is called with the number of the call, on every rank."""
    from hf_dist import DistTrainer, DistTrainingArguments
    from tests.hf.recipes import make_model, pad, plain_arguments, texts

    counts = {"collate": 0}

    def collate_rows(rows: Any) -> Any:
        counts["collate"] += 1
        if in_collate is not None:
            in_collate(counts["collate"])
        return pad(rows)

    class Trainer(DistTrainer):
        """With a save that can be disturbed."""

        def save_model(self, *args: Any, **kwargs: Any) -> None:
            """HF calls it on every rank for a checkpoint."""
            if in_save is not None:
                in_save()
            super().save_model(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            """With outputs that are looked at."""
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if read is not None:
                read(outputs)
            return (loss, outputs) if return_outputs else loss

    config = {"zero_optimization": {"stage": 3}, "hf_dist": {"stall_report_seconds": LIMIT}}
    if cp > 1:
        config["sequence_parallel_size"] = cp  # type: ignore[assignment]
    values = dict(max_steps=6, gradient_accumulation_steps=1, dist_config=config)
    arguments = DistTrainingArguments(**plain_arguments(folder, 2, **values) | changes)
    model = make_model()
    if hook is not None:
        hook(model)
    Trainer(model, arguments, train_dataset=texts(), data_collator=collate_rows).train()


def _only(number: int, act: Callable[[], None]) -> Callable[..., None]:
    def disturb(*_: Any) -> None:
        if rank() == number:
            act()

    return disturb


def _once(act: Callable[..., None], at: int = 2) -> Callable[..., None]:
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            act()

    return count


def nap() -> None:
    """The function that a stack must show."""
    time.sleep(NAP)


def _forward(act: Callable[..., None]) -> Callable[[Any], None]:
    return lambda model: model.model.layers[1].register_forward_pre_hook(_once(act, at=3))


def _backward(act: Callable[..., None]) -> Callable[[Any], None]:
    """In the backward of the first block, from a hook on its output."""
    disturb = _once(act, at=3)

    def watch(module: Any, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:  # not while the Trainer asks the model about its loss
            tensor.register_hook(disturb)

    return lambda model: model.model.layers[0].register_forward_hook(watch)


def _fail() -> None:
    raise RuntimeError("this rank has had enough")


def _naps(folder: str) -> None:
    """One training, three places where rank 1 is late, one where both are equally slow."""
    late = _only(1, nap)

    def in_collate(call: int) -> None:
        if call == 4:
            late()
        if call == 6:
            nap()

    train(folder, hook=_forward(late), in_collate=in_collate, in_save=late, save_strategy="steps", save_steps=6)


def _stop(number: int) -> Callable[..., None]:
    return _only(number, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def _killed_on_gpus(number: int, folder: str) -> None:
    """What NCCL's ranks see of one that is killed: nothing. The host stands at a line that reads a number from the GPU."""
    from hf_dist.dist import mesh
    from hf_dist.dist.watchdog.departure import Departure

    mesh.device_is_busy = lambda ask: ask
    Departure.grace = 3.0
    try:
        train(folder, hook=_forward(_only(number, lambda: os.kill(os.getpid(), signal.SIGKILL))))
    except RuntimeError:  # gloo's, which NCCL has not
        while True:
            time.sleep(1.0)


def _killed_after_a_failed_look(folder: str) -> None:
    """The watchdog's thread meets errors while the job is set up, as from a dictionary that changes while it is read."""
    from hf_dist.dist.watchdog.thread import Watchdog

    look = Watchdog._location

    def fail_at_first(self: Watchdog) -> Any:
        if not self.engines:
            raise RuntimeError("dictionary changed size during iteration")
        return look(self)

    Watchdog._location = fail_at_first  # type: ignore[method-assign]
    train(folder, hook=_forward(_only(1, lambda: os.kill(os.getpid(), signal.SIGKILL))))


def _split(folder: str) -> None:
    """Rank 1 of a split is late in a block; the other one is at a sum of it."""
    cut = {"tensor_parallel": {"autotp_size": 2}, "hf_dist": {"stall_report_seconds": LIMIT}}
    train(folder, hook=_forward(_only(1, nap)), dist_config=cut, max_steps=4)


def _look(outputs: Any) -> None:
    if rank() == 1:
        float(outputs.logits.sum())


SAVES = dict(save_strategy="steps", save_steps=2)
CASES: dict[str, Callable[[str], None]] = {
    "naps": _naps,
    "split": _split,
    "stops_rank_1": lambda folder: train(folder, hook=_forward(_stop(1)), ddp_timeout=8),
    "stops_rank_0": lambda folder: train(folder, hook=_forward(_stop(0)), ddp_timeout=8),
    "killed": lambda folder: train(folder, hook=_forward(_only(1, lambda: os.kill(os.getpid(), signal.SIGKILL)))),
    "killed_after_a_failed_look": _killed_after_a_failed_look,
    "killed_listener_on_gpus": lambda folder: _killed_on_gpus(2, folder),
    "killed_first_on_gpus": lambda folder: _killed_on_gpus(0, folder),
    "one_rank_reads": lambda folder: train(folder, read=_look, cp=2, ddp_timeout=8),
    "forward": lambda folder: train(folder, hook=_forward(_only(1, _fail))),
    "backward": lambda folder: train(folder, hook=_backward(_only(1, _fail))),
    "collate": lambda folder: train(folder, in_collate=lambda call: _only(1, _fail)() if call == 4 else None),
    "save": lambda folder: train(folder, in_save=_only(1, _fail), **SAVES),
}
