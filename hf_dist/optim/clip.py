"""The global gradient norm, exact at every ZeRO stage, and clipping."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hf_dist.dist import collectives
from hf_dist.memory.offload.host import sent, threads
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.runtime import ShardedModel

ROW = 2048
"""Number of elements whose squares are summed in fp32 before the sums are combined in fp64."""


@dataclass
class GradientSummary:
    """The facts about a gradient that all ranks agree on before a step."""

    norm: torch.Tensor  # 0D fp32
    """L2 norm over all trainable parameters, of the mean gradient, before clipping; inf or nan on overflow."""
    used: dict[tuple[int, int], bool]
    """(id of group, index) of a parameter without a gradient on this rank -> whether another rank had one."""


@dataclass
class EarlyNorms:
    """Norms of complete gradients, computed while the last reductions are in flight and the device has nothing else to do."""

    found: dict[int, tuple[torch.Tensor, int, torch.Tensor]]
    """id of a group -> (its gradient, the version that was read, `owned_norm`)."""

    @classmethod
    def of(cls, sharded: ShardedModel) -> EarlyNorms:
        """Norms of the gradients that are complete now. Local."""
        device = sharded.mesh.device
        groups = [g for g in sharded.reducer.complete_beside() if g.axes.owns and _made_on_the_way(g) is None]
        grads = {id(g): grad for g in groups if (grad := g.gradient_now[0]) is not None and grad.device == device}
        norms = _norms_of(sharded, {id(g): _owned_part(g) for g in groups if id(g) in grads})
        return cls({key: (grads[key], grads[key]._version, norm) for key, norm in norms.items()})

    def valid(self, groups: Sequence[FlatGroup]) -> dict[int, torch.Tensor]:
        """id of a group -> its norm, unless the gradient was written since. Local."""
        known = {id(g): self.found[id(g)] for g in groups if id(g) in self.found}
        same = (g for g in groups if id(g) in known and g.gradient_now[0] is known[id(g)][0])
        return {id(g): known[id(g)][2] for g in same if known[id(g)][0]._version == known[id(g)][1]}


def summarize_gradients(
    sharded: ShardedModel,
    scale: float = 1.0,
    stepped: Mapping[int, torch.Tensor] | None = None,
    early: EarlyNorms | None = None,
) -> GradientSummary:
    """Norm of `scale` times the reduced gradients, and which parameters had a gradient on any rank.

    Collective over dp, then tp: an all-reduce of 2 + (number of trainable parameters) floats; then over pp, of two. The second
    one says whether a rank has changed a buffer that the others do not know of (`buffers.py`).
    Every rank counts the interval it owns, so shared and replicated elements count once. If one rank along `tp` has used a
    parameter, all of them step it: copies stay equal, and slices are stepped as the whole would be. Only a rank with a
    parameter without a gradient reads the flags on the host; on other ranks the host does not wait. `stepped`: id of a group
    whose gradient was already stepped and freed -> its `owned_norm`; `early`: norms that are known already.
    """
    sharded.finish_gradients()
    mesh = sharded.mesh
    groups = sharded.trainable_groups
    known = {**(early.valid(groups) if early else {}), **(stepped or {})}
    flags = [used for g in groups for used in g.window.used]
    buffers = sharded.passes.buffers
    vector = torch.zeros(2 + len(flags), dtype=torch.float32, device=mesh.device)
    norms = [norm.to(mesh.device) for norm in owned_norms(sharded, known)]
    if norms:
        vector[0] = torch.stack(norms).square().sum()
    vector[1:] = _on_device(sharded, [buffers.flag(), *flags])
    for axis in (mesh.dp, mesh.tp):
        collectives.all_reduce(axis, vector, op="sum").wait()
    pair = vector[:2].clone()
    collectives.all_reduce(mesh.pp, pair, op="sum").wait()
    norm = pair[0].sqrt() * scale
    buffers.told(pair[1])
    places = [(id(g), i) for g in groups for i in range(len(g.window.used))]
    missing = [k for k, used in enumerate(flags) if not used]
    if not missing:
        return GradientSummary(norm, {})
    anywhere = vector[2:].tolist()
    return GradientSummary(norm, {places[k]: anywhere[k] > 0 for k in missing})


_sent: weakref.WeakKeyDictionary[ShardedModel, tuple[list[bool], torch.Tensor]] = weakref.WeakKeyDictionary()
"""Model -> the flags of its last step and their copy on its device."""


def _on_device(sharded: ShardedModel, flags: list[bool]) -> torch.Tensor:
    """`flags` as a 1-D tensor; sent to the device only if they differ from the previous step's, which is rare."""
    before = _sent.get(sharded)
    if before is None or before[0] != flags:
        before = _sent[sharded] = flags, sent(torch.tensor(flags), sharded.mesh.device)
    return before[1]


def owned_norms(sharded: ShardedModel, known: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """`owned_norm`, or the value in `known`, of every group with a gradient whose elements this rank counts. Local.

    Gradients on a GPU need two kernels in all. Norms of offloaded gradients were computed on their way to the host.
    """
    groups = [g for g in sharded.trainable_groups if g.axes.owns]
    found = {id(g): known[id(g)] for g in groups if id(g) in known}
    left = [g for g in groups if id(g) not in found and g.gradient_now[0] is not None]
    on_way = {id(g): norm for g in left if (norm := _made_on_the_way(g)) is not None}
    found |= on_way
    if any(norm.is_cuda for norm in found.values()):
        sharded.storage.link.wait_device()
    found |= _norms_of(sharded, {id(g): _owned_part(g) for g in left if id(g) not in on_way})
    weights = {id(g): g.counted[2] for g in groups if id(g) in found}
    return [found[key] if weight == 1.0 else found[key] * weight**0.5 for key, weight in weights.items()]


def _norms_of(sharded: ShardedModel, parts: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    on_gpu = {key: part for key, part in parts.items() if part.is_cuda and part.numel()}
    if on_gpu:
        norms = torch._foreach_norm(list(on_gpu.values()), 2, dtype=torch.float32)
        found |= dict(zip(on_gpu, norms, strict=True))
    on_host = {key: part for key, part in parts.items() if not part.is_cuda}
    if on_host:
        with _host_threads(sharded):
            found |= {key: norm_of(part) for key, part in on_host.items()}
    return found


def _host_threads(sharded: ShardedModel) -> AbstractContextManager[None]:
    """Sets the number of threads that process a GPU's gradients on the host: launchers give each process one thread."""
    beside_gpu = sharded.mesh.device.type == "cuda"
    return threads(sharded.storage.num_threads if beside_gpu else torch.get_num_threads())


def _owned_part(group: FlatGroup) -> torch.Tensor:
    values, _, _ = group.counted
    assert values is not None
    return values


def owned_norm(group: FlatGroup) -> torch.Tensor:
    """L2 norm of the part of the reduced gradient that this rank owns, 0D fp32. Local.

    It is where the gradient is, or on the device if it was computed there; `owned_norms` makes the device wait for it.
    """
    known = _made_on_the_way(group)
    return norm_of(_owned_part(group)) if known is None else known


def _made_on_the_way(group: FlatGroup) -> torch.Tensor | None:
    return group.gradient.norm() if group.owned == group.resting else None


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """L2 norm of a 1-D tensor, fp32, computed by rows: a CPU's running sum of 10^5 fp32 squares is off by 1e-5. Local."""
    rows = values[: values.numel() // ROW * ROW].view(-1, ROW)
    rest = values[rows.numel() :]
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).view(-1) for part in (rows, rest)]
    joined: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
    return joined.float()


def norm_of_chosen(sharded: ShardedModel, chosen: Container[int], degree: float = 2.0) -> torch.Tensor:
    """Norm of the reduced gradients of some parameters, 0D fp32. Collective over dp and `model`.

    `chosen`: ids of the parameters; `degree`: of the norm, inf for the largest element. Every rank counts the elements it owns.
    Call `summarize_gradients` before it.
    """
    mesh = sharded.mesh
    is_max = degree == float("inf")
    total = torch.zeros(1, dtype=torch.float32, device=mesh.device)
    for group in sharded.trainable_groups:
        values, first, weight = group.counted
        if values is None or not group.axes.owns:
            continue
        for slot, param in zip(group.layout.slots, group.params, strict=True):
            if id(param) in chosen:
                start, stop = slot.within(first, first + values.numel())
                part = values[start:stop]
                if not part.numel():
                    continue
                norm = norm_of(part) if degree == 2 else torch.linalg.vector_norm(part, degree, dtype=torch.float32)
                norm = norm if is_max or weight == 1.0 else norm * weight ** (1.0 / degree)
                norm = norm.to(mesh.device)
                total = torch.maximum(total, norm) if is_max else total + norm.pow(degree)
    for axis in (mesh.dp, mesh.model):
        collectives.all_reduce(axis, total, op="max" if is_max else "sum").wait()
    return total[0] if is_max else total[0].pow(1.0 / degree)


def scale_gradients(sharded: ShardedModel, factor: torch.Tensor | float, chosen: Container[int] | None = None) -> None:
    """Multiply the reduced gradients in place: all of them, or those of parameters with these ids. Local."""
    by = dict[torch.device, torch.Tensor]()  # so that the factor is sent to the host once
    for grad in chosen_gradients(sharded, chosen):
        if isinstance(factor, torch.Tensor) and grad.device not in by:
            by[grad.device] = factor.to(grad.device)
        with nullcontext() if grad.is_cuda else _host_threads(sharded):
            grad.mul_(by.get(grad.device, factor))


def chosen_gradients(sharded: ShardedModel, chosen: Container[int] | None = None) -> Iterator[torch.Tensor]:
    """This rank's reduced gradients: whole groups, or the parts of parameters with these ids. Local."""
    for g in sharded.trainable_groups:
        grad, (first, last) = g.gradient_now
        if grad is None:
            continue
        if chosen is None:
            yield grad
            continue
        for slot, param in zip(g.layout.slots, g.params, strict=True):
            if id(param) in chosen:
                start, stop = slot.within(first, last)
                yield grad[start:stop]


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / norm), as `torch.nn.utils.clip_grad_norm_` computes it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
