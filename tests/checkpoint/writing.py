"""Run on ranks: a model's weights cut into uneven shards and written by all of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist.checkpoint.file_sums import FileSums, digest_of
from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.checkpoint.weight_plan import WeightPlan
from hf_dist.checkpoint.weight_write import write_weights
from hf_dist.dist.mesh import build_mesh
from hf_dist.errors import CheckpointError
from hf_dist.hf.naming import buffer_parts, weight_plan_for
from hf_dist.sharding.layout import FlatLayout

from .families import make_model

Case = tuple[str, str, int | str, str | None, str]
"""(family, dtype on disk, max_shard_size, mode, folder)."""


def shards(model: nn.Module, rank: int, world: int) -> list[OwnedPart]:
    """This rank's parts of two flat groups, so that cuts fall anywhere inside the parameters."""
    params = [(name, param.detach()) for name, param in model.named_parameters()]
    parts = []
    for group in (params[::2], params[1::2]):
        values = dict(group)
        layout = FlatLayout.pack([(name, tuple(p.shape)) for name, p in group], world)
        for slot in layout.slots:
            start, stop = layout.fragment(slot, rank)
            if start < stop:
                part = values[slot.name].reshape(-1)[start:stop].float()
                parts.append(OwnedPart(slot.name, slot.held, start, stop, part))
    return parts


def plan_and_parts(
    family: str, dtype: torch.dtype, size: int | str, rank: int, world: int
) -> tuple[WeightPlan, list[OwnedPart]]:
    """What a rank passes to `write_weights`."""
    model = make_model(family)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    plan = weight_plan_for(model, {name: dtype for name, _ in model.named_parameters()}, size)
    return plan, shards(model, rank, world) + (buffer_parts(model, plan) if rank == 0 else [])


def write_cases(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Write every case; returns the modes used."""
    axis = build_mesh(device="cpu").dp
    modes = []
    for family, dtype, size, mode, folder in cases:
        plan, parts = plan_and_parts(family, getattr(torch, dtype), size, rank, world)
        sums = FileSums()
        modes.append(write_weights(folder, plan, parts, axis, mode, sums))
        sums.close()
        assert sums.digests() == {file.name: digest_of(Path(folder, file.name)) for file in plan.files}
    return modes


def message_of(act: Callable[[], Any]) -> str:
    """The text of the `CheckpointError` that `act` raises, empty when it raises none."""
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writes beyond `nbytes` of any file fail with EFBIG in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failures(rank: int, world: int, folder: str, small_disk: str | None) -> dict[str, str]:
    """Failure -> message on this rank. Nothing may hang, and a good write must work afterwards."""
    axis = build_mesh(device="cpu").dp
    root = Path(folder)
    plan, parts = plan_and_parts("llama", torch.float32, "50GB", rank, world)
    found = {}
    for name, mode in (("limit_parallel", "parallel"), ("limit_in_order", "in order")):
        (root / name).mkdir(exist_ok=True)
        # The limit lets rank 0 make the file; in parallel it is another rank that fails.
        failing = rank == (world - 1 if mode == "parallel" else 0)
        with file_size_limit(plan.nbytes // 2 if failing else resource.RLIM_INFINITY):
            found[name] = message_of(lambda mode=mode, name=name: write_weights(root / name, plan, parts, axis, mode))
    missing = parts[1:] if rank == 1 else parts
    found["missing"] = message_of(lambda: write_weights(root / "missing", plan, missing, axis))
    found["absent"] = message_of(lambda: write_weights(root / "nowhere", plan, parts, axis))
    found["unwritable"] = message_of(lambda: write_weights("/proc/self", plan, parts, axis))
    if small_disk is not None:
        found["full"] = message_of(lambda: write_weights(small_disk, plan, parts, axis))
    found["afterwards"] = message_of(lambda: write_weights(root / "good", plan, parts, axis))
    return found


def vanishing(rank: int, world: int, folder: str) -> str:
    """A file that disappears between its creation and the writes of the others."""
    import hf_dist.checkpoint.weight_write as writing

    axis = build_mesh(device="cpu").dp
    plan, parts = plan_and_parts("llama", torch.float32, 4000, rank, world)
    real = writing._Writer.write

    def late(self: Any) -> None:
        if rank == 0:
            os.unlink(Path(folder) / plan.files[1].name)
        writing.collectives.barrier(axis)
        real(self)

    writing._Writer.write = late  # type: ignore[method-assign]
    return message_of(lambda: write_weights(folder, plan, parts, axis, "parallel"))


def separate_disks(rank: int, world: int, folders: list[str]) -> str:
    """Every rank has a folder of its own under one name, as on machines without a shared disk."""
    axis = build_mesh(device="cpu").dp
    plan, parts = plan_and_parts("qwen3_moe", torch.float32, 4000, rank, world)
    return write_weights(folders[rank], plan, parts, axis)
