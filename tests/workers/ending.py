"""Trainings that end in a way that is easily misread: told to end while they hang, out of memory outside of the model,
interrupted in a save, with one error on every rank, at a port that another program has."""

from __future__ import annotations

import errno
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hf.layout_jobs import matrices, stages
from tests.workers.failing import rank, train

Z3: dict[str, Any] = {"zero_optimization": {"stage": 3}}
LAYOUTS: dict[str, dict[str, Any]] = {"z3": Z3, "pp": stages(2), "tp": matrices(2)}


def _hangs_and_is_told(folder: str) -> None:
    """Rank 1 never comes out of its data; rank 0, which waits in native code, is told to end."""
    from hf_dist.dist.watchdog import thread

    thread._HEED_SECONDS = 2.0

    def told() -> None:
        while not Path(folder, "hangs").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    def hang() -> None:
        Path(folder, "hangs").touch()
        time.sleep(600)

    from tests.workers.stalling import train as stalling

    if rank() == 0:
        threading.Thread(target=told, daemon=True).start()
    stalling(
        folder,
        in_collate=lambda call: hang() if call == 3 and rank() == 1 else None,
        save_strategy="steps",
        save_steps=1,
    )


def _out_of_memory(folder: str, config: dict[str, Any]) -> None:
    def act() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    train(folder, config, act=act)


def _says_memory(folder: str) -> None:
    def act() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory (said by a callback)")

    train(folder, Z3, act=act)


def _interrupted_in_a_save(folder: str) -> None:
    """Rank 1 gets Ctrl-C between two collectives of the second save."""
    from hf_dist.dist import collectives

    signal.signal(signal.SIGINT, signal.default_int_handler)
    gather, calls = collectives.all_gather_object, [0]

    def interrupt(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return gather(*args)

    def act() -> None:
        collectives.all_gather_object = interrupt
        import hf_dist.dist.raise_on_all_ranks as agreement

        agreement.collectives.all_gather_object = interrupt

    train(folder, Z3, act=act, save_strategy="steps", save_steps=1, max_steps=8)


def _everywhere(folder: str) -> None:
    """A collator that forgets the labels."""
    from hf_dist import DistTrainer, DistTrainingArguments
    from tests.hf.recipes import make_model, pad, plain_arguments, texts

    def collate(rows: Any) -> Any:
        raise LookupError(f"rank {rank()} has no labels")

    arguments = DistTrainingArguments(**plain_arguments(folder, 2, max_steps=2, dist_config=Z3))
    assert pad is not collate
    DistTrainer(make_model(), arguments, train_dataset=texts(), data_collator=collate).train()


def _at_a_strangers_port(folder: str) -> None:
    """Another program has been listening there for a while."""
    taken = Path(folder, "taken")
    if rank() == 0 and os.fork() == 0:
        with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
            taken.touch()
            time.sleep(40)
        os._exit(0)
    while not taken.exists():
        time.sleep(0.05)
    train(folder, Z3)


def _alone_without_memory(folder: str) -> None:
    """`auto_find_batch_size`, and one rank runs out."""
    from tests.hf.recipes import make_model

    model = make_model()

    def run_out(module: Any, args: Any) -> None:
        if module.training and rank() == 1 and len(args[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.model.layers[0].register_forward_pre_hook(run_out)
    train(folder, {**Z3, "hf_dist": {"stall_report_seconds": 3}}, model, auto_find_batch_size=True)


def _writes_beside(folder: str, waits: bool) -> None:
    """A job whose output folder another one has, too. The first one waits in its second step until the second has ended."""
    out, over = Path(folder).parent / "out", Path(folder).parent / "over"

    def act() -> None:
        (out / "in the middle").touch()
        while not over.exists():
            time.sleep(0.05)

    train(str(out), Z3, act=act if waits else None, resume="auto", max_steps=3, save_strategy="steps", save_steps=1)


def _nowhere(folder: str) -> None:
    """An output folder below a file."""
    Path(folder, "file").touch()
    train(f"{folder}/file/out", Z3)


class WithoutText(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


KINDS: dict[str, Callable[[], BaseException]] = {
    "reset": lambda: ConnectionResetError("Connection reset by peer: the object store of PLANTED"),
    "closed": lambda: RuntimeError("Connection closed by peer PLANTED"),
    "timeout": lambda: TimeoutError("Timed out waiting for PLANTED"),
    "memory": lambda: MemoryError("PLANTED"),
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. PLANTED"),
    "full": lambda: OSError(errno.ENOSPC, "No space left on PLANTED"),
    "key": lambda: KeyError("PLANTED"),
    "value": lambda: ValueError("PLANTED\nin two lines"),
    "exit": lambda: SystemExit("PLANTED"),
    "silent": lambda: WithoutText("PLANTED"),
}
PLACES = ("data", "collate", "forward", "backward", "step", "save", "evaluation")


def _planted(folder: str, kind: str, place: str, number: int) -> None:
    """One exception on one rank in the second step."""
    from transformers import TrainerCallback

    from hf_dist import DistTrainer, DistTrainingArguments
    from tests.hf.recipes import make_model, pad, plain_arguments, texts

    def plant(here: str, step: int) -> None:
        if here == place and rank() == number and step >= 2:
            raise KINDS[kind]()

    class Rows(list):  # type: ignore[type-arg]
        """A map-style set."""

        def __getitem__(self, index: Any) -> Any:
            plant("data", trainer.state.global_step + 1)
            return super().__getitem__(index)

    class Planted(DistTrainer):
        """The places that a Trainer calls."""

        def save_model(self, *args: Any, **kwargs: Any) -> None:
            """In a checkpoint."""
            plant("save", self.state.global_step)
            super().save_model(*args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            """In an evaluation."""
            plant("evaluation", self.state.global_step)
            return super().prediction_step(*args, **kwargs)

    class Act(TrainerCallback):
        """Between steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """After the optimizer."""
            plant("step", state.global_step)

    def collate(rows: Any) -> Any:
        plant("collate", trainer.state.global_step + 1)
        return pad(rows)

    def after(module: Any, args: Any, output: Any) -> Any:
        plant("forward", trainer.state.global_step + 1)
        if output.requires_grad:  # not in a probe
            output.register_hook(lambda _: plant("backward", trainer.state.global_step + 1))

    model = make_model()
    model.model.layers[0].mlp.register_forward_hook(after)
    values = dict(
        max_steps=4, dist_config={**Z3, "hf_dist": {"stall_report_seconds": 5}}, save_strategy="steps", save_steps=1
    )
    values |= dict(eval_strategy="steps", eval_steps=1, gradient_accumulation_steps=1)
    arguments = DistTrainingArguments(**plain_arguments(folder, 2, **values))
    rows = Rows(texts())
    trainer = Planted(
        model, arguments, train_dataset=rows, eval_dataset=texts()[:4], data_collator=collate, callbacks=[Act()]
    )
    trainer.train()


PLANTED = {
    f"{kind}-{place}-{number}": functools.partial(_planted, kind=kind, place=place, number=number)
    for index, (kind, place) in enumerate((kind, place) for kind in KINDS for place in PLACES)
    for number in [index % 2]
}
CASES: dict[str, Callable[[str], None]] = {
    **PLANTED,
    "told": _hangs_and_is_told,
    **{f"memory_{name}": functools.partial(_out_of_memory, config=config) for name, config in LAYOUTS.items()},
    "memory_said": _says_memory,
    "interrupted": _interrupted_in_a_save,
    "everywhere": _everywhere,
    "nowhere": _nowhere,
    "stranger": _at_a_strangers_port,
    "alone": _alone_without_memory,
    "first": functools.partial(_writes_beside, waits=True),
    "second": functools.partial(_writes_beside, waits=False),
}
