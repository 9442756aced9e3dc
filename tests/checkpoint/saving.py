"""Saves that are interrupted, fail, or run in the background: what a rank does."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.checkpoint.grid import digests, start, train


def save_steps(rank: int, world: int, root: str, steps: int) -> dict[int, Any]:
    """The digests after each step, without a save."""
    engine = start(3)
    found = {}
    for step in range(steps):
        train(engine, step, 1)
        found[step + 1] = digests(engine)
    return found


def save_until_killed(rank: int, world: int, root: str, steps: int, seed: int, in_background: bool) -> None:
    """A checkpoint after each step, two kept; one rank is killed at a random moment of a random save."""
    from hf_dist.checkpoint import folder

    chance = random.Random(seed)
    victim, doomed, fraction = chance.randrange(world), chance.randrange(2, steps), chance.random()
    engine = start(3)
    engine.writer.in_background = in_background
    seconds = 0.1
    for step in range(steps):
        train(engine, step, 1)
        if rank == victim and step == doomed:
            threading.Timer(fraction * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.perf_counter()
        engine.save_checkpoint(Path(root) / f"checkpoint-{step + 1}")
        if rank == 0:
            folder.rotate(Path(root), 2, keep=[])
        seconds = time.perf_counter() - began if not in_background else 0.1
    engine.writer.wait()


def load_newest(rank: int, world: int, roots: list[str]) -> list[Any]:
    """What `resume_from_checkpoint="auto"` finds, and the digests after loading it."""
    from hf_dist.checkpoint import folder, publish

    results = []
    for root in roots:
        publish.recover(Path(root))
        found, _ = folder.newest_complete(Path(root))
        if found is None:
            results.append((0, None))
            continue
        engine = start(1, seed=7)
        engine.load_checkpoint(found)
        results.append((int(found.name.removeprefix("checkpoint-")), digests(engine)))
    return results


def background(rank: int, world: int, root: str) -> dict[str, Any]:
    """Train on while a checkpoint is written slowly; a second save waits for it."""
    engine = start(2)
    engine.writer.in_background = True
    events: list[str] = []
    slow_writes(engine, events, 0.7)
    train(engine, 0, 2)
    before = digests(engine)
    engine.save_checkpoint(Path(root) / "checkpoint-2")
    train(engine, 2, 2)
    events.append("trained")
    engine.save_checkpoint(Path(root) / "checkpoint-4")
    after = digests(engine)
    events.append("second save began")
    engine.writer.wait()
    return {"events": events, "before": before, "after": after, "stall": engine.writer.stall_seconds}


def slow_writes(engine: Any, events: list[str], seconds: float) -> None:
    """Every write of weights takes `seconds` more."""
    write = engine.writer._write

    def slow(*args: Any) -> None:
        time.sleep(seconds)
        write(*args)
        events.append("written")

    engine.writer._write = slow


def failing_background(rank: int, world: int, root: str) -> dict[str, Any]:
    """The folder vanishes under a write in the background: when does training hear of it?"""
    from hf_dist.errors import CheckpointError

    engine = start(2)
    engine.writer.in_background = True
    train(engine, 0, 1)
    engine.save_checkpoint(Path(root) / "checkpoint-1")
    engine.writer.wait()
    write = engine.writer._write

    def spoiled(working: Path, *args: Any) -> None:
        if rank == 0:
            import shutil

            shutil.rmtree(working)
        write(working, *args)

    engine.writer._write = spoiled
    engine.save_checkpoint(Path(root) / "checkpoint-2")
    engine.writer.join()
    engine.writer._write = write
    message = ""
    try:
        train(engine, 1, 1)
    except CheckpointError as error:
        message = str(error)
    engine.save_checkpoint(Path(root) / "checkpoint-3")  # and the next one works again
    engine.writer.wait()
    return {"error": message, "left": sorted(p.name for p in Path(root).iterdir())}


def full_disk(rank: int, world: int, root: str, limit: int) -> dict[str, Any]:
    """A save on a disk with room for the first checkpoint only (files of this process may not grow beyond `limit`)."""
    from hf_dist.errors import CheckpointError

    engine = start(1)
    train(engine, 0, 1)
    engine.save_checkpoint(Path(root) / "checkpoint-1")
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    message = ""
    try:
        engine.save_checkpoint(Path(root) / "checkpoint-2")
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.load_checkpoint(Path(root) / "checkpoint-1")
    engine.save_checkpoint(Path(root) / "checkpoint-3")  # and the next one works again
    return {"error": message, "left": sorted(p.name for p in Path(root).iterdir())}


def read_only(rank: int, world: int, root: str) -> str:
    """A save below a path where no folder can be made."""
    from hf_dist.errors import CheckpointError

    engine = start(0)
    try:
        engine.save_checkpoint(Path(root) / "file" / "checkpoint-1")
    except CheckpointError as error:
        return str(error)
    return "saved"


def other_writers(rank: int, world: int, root: str, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """`another_writer` of every kind, one after the other on one engine."""
    engine = start(3)
    train(engine, 0, 1)
    return {what: another_writer(engine, str(Path(root, what)), what) for what in kinds}


def another_writer(engine: Any, root: str, what: str) -> dict[str, Any]:
    """Somebody loses, renames or adds a tensor of the weight file of the second save, before the folder has its name."""
    import safetensors.torch

    from hf_dist.checkpoint import model_files
    from hf_dist.errors import CheckpointError

    engine.save_checkpoint(Path(root) / "checkpoint-1")
    write = model_files.write_weights

    def broken(folder: Path, *args: Any, **more: Any) -> None:
        write(folder, *args, **more)
        path = folder / "model.safetensors"
        if engine.mesh.world.rank == 0:
            tensors = safetensors.torch.load_file(path)
            value = tensors.pop("model.norm.weight") if what != "added" else tensors["model.norm.weight"]
            tensors |= {"norm.weight": value.clone()} if what in ("renamed", "added") else {}
            tensors |= {"model.norm.weight": value[:1].clone()} if what == "cut" else {}
            safetensors.torch.save_file(tensors, path)

    model_files.write_weights = broken  # type: ignore[assignment]
    message = ""
    try:
        engine.save_checkpoint(Path(root) / "checkpoint-2")
    except CheckpointError as error:
        message = str(error)
    finally:
        model_files.write_weights = write
    engine.save_checkpoint(Path(root) / "checkpoint-3")
    return {"error": message, "left": sorted(p.name for p in Path(root).iterdir())}
