"""Start-up checks that all ranks train the same model and that it matches its files, before a difference hangs the job."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.errors import CheckpointError, ModelError
from hf_dist.format_bytes import size_text
from hf_dist.log import say, warn_once
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import LAZY
from hf_dist.sharding.layout import ParamSlot
from hf_dist.sharding.lazy import WeightSource, lazy_sources
from hf_dist.sharding.param_slice import held_slice
from hf_dist.tensors.checksum import checksum
from hf_dist.tensors.tensor_slice import TensorSlice

_Part = tuple[str, TensorSlice | None, int]
"""Something that several ranks may hold: (name of a tensor, its slice, shard of the slice or -1 for all of it)."""
_SAMPLES = 8
"""Number of elements of each parameter that are compared with its file."""


def check_same_model(model: nn.Module, mesh: ParallelMesh) -> None:
    """Raise `ModelError` on every rank when names, shapes, dtypes or `requires_grad` differ. Collective over world."""
    rows = [f"{n} {held_slice(p).whole} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
    if (found := _first_difference(rows, mesh)) is None:
        return
    (first, rank), (mine, theirs), counts = found
    raise ModelError(
        f"the model is not the same on every rank: rank {first} has {counts[0]} parameters, rank {rank} has {counts[1]}; the "
        f"first difference is {mine} on rank {first} against {theirs} on rank {rank}. Build the model from the same "
        "configuration, and freeze the same parameters, on every rank."
    )


def check_same_params(names: Sequence[Sequence[str]], mesh: ParallelMesh) -> None:
    """Raise `ModelError` on every rank when the ranks' optimizers hold different parameters. Collective over world.

    `names`: parameter names of each param group. Each rank steps only its own part of a parameter, so a part whose rank lacks
    the parameter would silently never change. Pipeline stages may each have an optimizer over their own parameters.
    """
    rows = [f"{name} in group {number}" for number, group in enumerate(names) for name in group]
    if (found := _first_difference(rows, mesh, by_stage=True)) is None:
        return
    (first, rank), (mine, theirs), _ = found
    raise ModelError(
        f"the optimizer does not hold the same parameters on every rank: the first difference is {mine} on rank {first} "
        f"against {theirs} on rank {rank}. Create it with the same parameters, in the same order, on every rank. If the model "
        "was trained in pipeline stages before, call hf_dist.unprepare(model) before creating the optimizer."
    )


def _first_difference(
    rows: list[str], mesh: ParallelMesh, *, by_stage: bool = False
) -> tuple[tuple[int, int], tuple[str, str], tuple[int, int]] | None:
    """Two ranks whose rows differ, their first differing rows, and both row counts; None if all agree. Collective over world.

    `by_stage`: compare only ranks of the same pipeline stage.
    """
    stage = mesh.pp.rank if by_stage else 0
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    everyone = collectives.all_gather_object(mesh.world, (stage, digest))
    firsts: dict[int, int] = {}
    pairs = [(firsts.setdefault(stage, rank), rank) for rank, (stage, _) in enumerate(everyone)]
    other = next(((a, b) for a, b in pairs if everyone[a] != everyone[b]), None)
    if other is None:
        return None
    listed = collectives.all_gather_object(mesh.world, rows)
    mine, theirs = listed[other[0]], listed[other[1]]
    difference = next((a, b) for a, b in zip_longest(mine, theirs, fillvalue="nothing") if a != b)
    return other, difference, (len(mine), len(theirs))


def agree_on_sources(model: nn.Module, mesh: ParallelMesh) -> dict[str, WeightSource]:
    """Sources, by name, of the parameters that no rank has read from its files yet. Collective over world.

    A parameter that only some ranks have read (one rank printed its norm, say) is now read by the others too, so that all
    ranks continue alike. Raises `CheckpointError` when a rank cannot read its files, `ModelError` when the files differ.
    """
    sources = lazy_sources(model)
    prints, problem = {}, ""
    try:
        prints = {name: source.fingerprint() for name, source in sources.items()}
    except CheckpointError as error:
        problem = str(error)
    digest = hashlib.sha256(repr(sorted(prints.items())).encode()).hexdigest()
    agree(mesh.world, problem, CheckpointError, names_rank=True)
    if len(set(collectives.all_gather_object(mesh.world, digest))) > 1:
        everyone = collectives.all_gather_object(mesh.world, prints)
        common = set.intersection(*map(set, everyone))
        for name in sorted(common):
            other = next((r for r, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]), None)
            if other is not None:
                raise ModelError(
                    f"the weights of {name} come from different files on rank 0 and rank {other}. Give every rank the same "
                    "checkpoint (the same revision, and complete copies on every machine)."
                )
        for name, p in model.named_parameters():
            if name in sources and name not in common:
                getattr(p, LAZY).materialize(p)
    return lazy_sources(model)


WORTH_STREAMING = 100_000_000
"""Bytes of host memory per rank above which `tell_full_build` writes its log line."""


def tell_full_build(model: nn.Module, mesh: ParallelMesh) -> None:
    """Log the host memory spent on building the whole model on every rank instead of streaming it. Call before sharding."""
    sizes = [(p.numel() * p.element_size(), hasattr(p, LAZY)) for p in model.parameters()]
    built = sum(nbytes for nbytes, lazy in sizes if not lazy)
    if mesh.world.size > 1 and built >= WORTH_STREAMING and 2 * built > sum(nbytes for nbytes, _ in sizes):
        say(
            f"the model was built in full on each of {mesh.world.size} ranks: {size_text(built)} of host memory per "
            "rank. Call from_pretrained after the DistTrainingArguments (or the DistAccelerator) were made, or "
            "hf_dist.from_pretrained(AutoModel..., ...), and each rank reads only its part."
        )


def synchronize_weights(model: nn.Module, mesh: ParallelMesh) -> None:
    """Broadcast rank 0's values of tensors that differ between ranks (a randomly initialised head). Collective over world.

    Checksums are compared first, so no weights are sent when all ranks loaded the same checkpoint. Lazy parameters are
    skipped: `agree_on_sources` has already found them equal.
    """
    if mesh.world.size == 1:
        return
    named = [(n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if not hasattr(t, LAZY)]
    own = [int(checksum(t)) for _, t in named]
    # A digest first: thousands of ranks would send each other thousands of sums.
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    if len(set(collectives.all_gather_object(mesh.world, digest))) == 1:
        return
    sums = collectives.all_gather_object(mesh.world, own)
    different = [k for k in range(len(named)) if any(theirs[k] != sums[0][k] for theirs in sums)]
    if not different:
        return
    warn_once(
        f"{len(different)} of {len(named)} tensors differ between ranks (first: {named[different[0]][0]}), perhaps after a "
        "random initialisation with different seeds: all ranks use the values of rank 0"
    )
    for k in different:
        tensor = named[k][1].detach()
        on_device = tensor.to(mesh.device).contiguous()
        collectives.broadcast(mesh.world, on_device)
        with torch.no_grad():
            tensor.copy_(on_device)


def check_load(model: nn.Module, groups: list[FlatGroup], sources: dict[str, WeightSource], mesh: ParallelMesh) -> None:
    """Compare the sharded model with its files and between ranks. Collective over world.

    Against the files: a few elements of every parameter in `sources`, taken from the owning rank and read by another route.
    Between ranks, by checksum: replicated weights, shards of replicas (HSDP) and all buffers.
    Raises `ModelError` on every rank, naming the tensors that differ.
    """
    if not sources:
        return
    rows = [(g, slot) for g in groups for slot in g.layout.slots if slot.name in sources and slot.numel]
    held = _held_samples(rows, mesh)
    problems: list[str] = []
    for k in range(mesh.dp.rank, len(rows), mesh.dp.size):  # the ranks share the reading
        group, slot = rows[k]
        indices = _spread(slot.numel)
        try:
            stored = sources[slot.name].sample([slot.held.in_whole(i) for i in indices]).to(group.source.dtype).double()
        except Exception as error:  # told to all ranks, which are about to wait for this one
            problems.append(f"parameter {slot.name} cannot be read back ({error})")
            continue
        wrong = ~torch.isclose(held[k, : len(indices)], stored, rtol=0, atol=0, equal_nan=True)
        if wrong.any():
            owners = {
                (slot.offset + i) // group.layout.shard_numel for i, bad in zip(indices, wrong, strict=True) if bad
            }
            where = ", ".join(map(str, sorted(owners)))
            problems.append(f"parameter {slot.name} is not what its file says (shard {where})")
    found = collectives.all_gather_object(mesh.world, (problems, _checksums(model, rows)))
    problems = [line for lines, _ in found for line in lines] + _differences([sums for _, sums in found])
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ModelError(
            "the loaded model differs from its files or between ranks: "
            + "; ".join(problems[:10])
            + more
            + ". Check that "
            'the files are complete and did not change; "hf_dist": {"lazy_load": false} loads without streaming.'
        )


def _spread(numel: int) -> list[int]:
    return sorted({(numel - 1) * k // (_SAMPLES - 1) for k in range(_SAMPLES)})


def _held_samples(rows: list[tuple[FlatGroup, ParamSlot]], mesh: ParallelMesh) -> torch.Tensor:
    """(len(rows), _SAMPLES) on the host: the sampled elements as the ranks hold them. Collective over the shard axes."""
    held = torch.zeros(len(rows), _SAMPLES, dtype=torch.float64)
    for k, (group, slot) in enumerate(rows):
        first, last = group.owned
        at = [(i, slot.offset + index) for i, index in enumerate(_spread(slot.numel))]
        mine = [(i, position - group.resting[0]) for i, position in at if first <= position < last]
        if mine:
            columns, positions = (torch.tensor(column) for column in zip(*mine, strict=True))
            held[k, columns] = group.source[positions.to(group.source.device)].double().cpu()
    alike: dict[tuple[int, ...], list[int]] = {}
    for k, (group, _) in enumerate(rows):
        alike.setdefault(tuple(map(id, group.axes.among)), []).append(k)
    for own in alike.values():
        flat = held[own].view(-1).to(mesh.device)
        for axis in rows[own[0]][0].axes.among:
            collectives.all_reduce(axis, flat, "sum").wait()
        held[own] = flat.cpu().view(len(own), _SAMPLES)
    return held


def _checksums(model: nn.Module, rows: list[tuple[FlatGroup, ParamSlot]]) -> dict[_Part, int]:
    sums: dict[_Part, int] = {
        (f"buffer {name}", None, -1): int(checksum(buffer)) for name, buffer in model.named_buffers()
    }
    for group, slot in rows:
        name = f"parameter {slot.name}"
        if group.at_rest.whole:
            sums[name, slot.held, -1] = int(checksum(group.full.values[slot.offset : slot.stop]))
        elif group.axes.then:  # others hold the same shard
            start, stop = group.fragment(slot)
            sums[name, slot.held, group.axes.place] = int(checksum(group.source[start:stop]))
    return sums


def _differences(everyone: list[dict[_Part, int]]) -> list[str]:
    holders: dict[_Part, dict[int, list[int]]] = {}
    for rank, sums in enumerate(everyone):
        for key, value in sums.items():
            holders.setdefault(key, {}).setdefault(value, []).append(rank)
    return [
        f"{name} differs between ranks {' and '.join(map(str, ranks.values()))}"
        for (name, *_), ranks in holders.items()
        if len(ranks) > 1
    ]
