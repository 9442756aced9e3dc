"""Batches of fragments that are stepped together, and how their master weights and optimizer states get into memory.

[Note: stepping in batches] If states are offloaded, the optimizer is stepped group by group: `param_groups` is narrowed to
the fragments of one group, then restored. For an element-wise optimizer, the result is bitwise that of one whole step. Step
hooks run once per batch. Options that the step itself writes (a counter in a param group) have the same initial value in each
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hf_dist.memory.offload.resting import Resting, Sliceable, Tier
from hf_dist.optim.compound import leaves
from hf_dist.optim.fragment import Fragment
from hf_dist.optim.runs import Run
from hf_dist.optim.stand_in import point_at
from hf_dist.sharding.group import FlatGroup

_HOST_NUMEL = 1 << 24
"""A batch on the host ends once it has this many elements: each call of the optimizer has a fixed cost."""


class StepBatch:
    """A batch of fragments whose states stay in memory."""

    def __init__(self, groups: Sequence[FlatGroup], fragments: Sequence[Fragment]) -> None:
        self.groups = list(groups)
        self.fragments = list(fragments)
        self.on_device = all(g.master.tier is Tier.DEVICE for g in self.groups)
        self.in_place = True
        """Whether states are stepped where they rest."""
        self.runs: list[Run] | None = None
        """Fragments that can be stepped as one; None if not computed since the states were last opened."""
        self.options: list[list[int]] = []
        """The tensors of each param group when the runs were found (`runs.groups_of`)."""

    def parted(self, first: Sequence[FlatGroup]) -> list[StepBatch]:
        """The fragments of `first` as one batch, the others as a second one; without empty batches."""
        ids = {id(g) for g in first}
        ahead = StepBatch(first, [f for f in self.fragments if id(f.group) in ids])
        rest = StepBatch(
            [g for g in self.groups if id(g) not in ids], [f for f in self.fragments if id(f.group) not in ids]
        )
        return [part for part in (ahead, rest) if part.groups]

    def fetch(self) -> None:
        """Start to bring the states into memory."""

    def swap_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the states available to `optimizer`, waiting for them if needed."""

    def swap_out(self, optimizer: torch.optim.Optimizer) -> None:
        """After the step: copy masters to weights, and move states to where they rest."""
        for group in self.groups:
            group.masters_changed()
            group.write_back()

    def wait(self) -> None:
        """Wait until the states are where they rest."""

    def states(self, fragment: Fragment, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Sliceable]]:
        """(key, 1-D elements) of the fragment's element-wise states, which may be on disk."""
        for key, value in leaves(optimizer.state.get(fragment.tensor, {})):
            if fragment.is_like(value):
                yield key, value.reshape(-1)

    def nbytes(self, optimizer: torch.optim.Optimizer) -> dict[Tier, int]:
        """Bytes of the optimizer's states at rest, by tier, without master weights."""
        held = dict.fromkeys(Tier, 0)
        for fragment in self.fragments:
            tensors = (v for _, v in leaves(optimizer.state.get(fragment.tensor, {})) if isinstance(v, torch.Tensor))
            held[fragment.group.master.tier] += sum(t.numel() * t.element_size() for t in tensors)
        return held


class SwappedBatch(StepBatch):
    """Fragments of one group whose states rest on disk. Values that are not element-wise stay in memory."""

    def __init__(self, group: FlatGroup, fragments: Sequence[Fragment]) -> None:
        super().__init__([group], fragments)
        self.group = group
        self._states: dict[str, Resting] = {}  # by key, laid out like the masters
        self._held: dict[Fragment, set[str]] = {f: set() for f in self.fragments}
        self._on_loan = False

    def fetch(self) -> None:
        """Start to read masters and states from disk."""
        for resting in (self.group.master, *self._states.values()):
            resting.fetch()

    def swap_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Lend the optimizer views of the host buffers; idempotent."""
        if self._on_loan:
            return
        self._on_loan = True
        self.fetch()
        masters = self.group.master.get()
        values = {key: resting.get() for key, resting in self._states.items()}
        for f in self.fragments:
            point_at(f.tensor, masters[f.start : f.stop])
            for key in self._held[f]:
                optimizer.state[f.tensor][key] = values[key][f.start : f.stop]

    def swap_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the views back, with any new states, and start to write."""
        self._on_loan = False
        for f in self.fragments:
            state = optimizer.state.get(f.tensor, {})
            held = {key for key, value in state.items() if f.is_like(value)}
            for key in held:
                self._take(f, key, state.pop(key))
            self._held[f] = held
            point_at(f.tensor, torch.empty(0))
        self.group.masters_changed()
        self.group.rest.deliver(self.group.master.get())
        for resting in (self.group.master, *self._states.values()):
            resting.release(changed=True)

    def _take(self, f: Fragment, key: str, value: torch.Tensor) -> None:
        if key not in self._states:
            self._states[key] = self.group.rest.storage.optim.new(
                self.group.master.elements.numel(), value.dtype, Tier.DISK
            )
            self._states[key].get(blank=True).zero_()
        into = self._states[key].get()[f.start : f.stop]
        if value.data_ptr() != into.data_ptr():  # created by this step, or replaced by the optimizer
            into.copy_(value)

    def wait(self) -> None:
        """Wait for running writes."""
        for resting in (self.group.master, *self._states.values()):
            resting.wait()

    def states(self, fragment: Fragment, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Sliceable]]:
        """(key, elements) of states on disk, read only on access."""
        for key in self._held[fragment]:
            yield key, self._states[key].part(fragment.start, fragment.stop)

    def nbytes(self, optimizer: torch.optim.Optimizer) -> dict[Tier, int]:
        """Bytes of states on disk, and of values in memory, by tier."""
        held = super().nbytes(optimizer)
        held[Tier.HOST] += held[Tier.DISK]
        held[Tier.DISK] = sum(resting.nbytes for resting in self._states.values())
        return held


def make_batches(
    groups: Sequence[FlatGroup],
    fragments: Sequence[Fragment],
    *,
    one_by_one: bool = False,
    of_group: Callable[[FlatGroup, Sequence[Fragment]], StepBatch] | None = None,
) -> list[StepBatch]:
    """Batches of `fragments`: one for all on the device, a few for those on the host, one per group on disk. Local.

    `one_by_one`: make one batch per group, wherever it rests, with `of_group` if given.
    """
    own_of: dict[int, list[Fragment]] = {}
    for f in fragments:
        own_of.setdefault(id(f.group), []).append(f)
    groups = [g for g in groups if id(g) in own_of]
    if one_by_one:
        of = [(g, own_of[id(g)]) for g in groups]
        if of_group is not None:
            return [of_group(g, own) for g, own in of]
        return [SwappedBatch(g, own) if g.master.tier is Tier.DISK else StepBatch([g], own) for g, own in of]
    here = [g for g in groups if g.master.tier is Tier.DEVICE]
    batches = [StepBatch(here, [f for g in here for f in own_of[id(g)]])] if here or not groups else []
    on_host: list[FlatGroup] = []
    for group in groups:
        if group.master.tier is Tier.DISK:
            batches.append(SwappedBatch(group, own_of[id(group)]))
        elif group.master.tier is Tier.HOST:
            on_host.append(group)
            if sum(g.master.elements.numel() for g in on_host) >= _HOST_NUMEL:
                batches.append(StepBatch(on_host, [f for g in on_host for f in own_of[id(g)]]))
                on_host = []
    if on_host:
        batches.append(StepBatch(on_host, [f for g in on_host for f in own_of[id(g)]]))
    return batches


class Narrowed:
    """Restricts an optimizer to some of its parameters; see [Note: stepping in batches]."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, keeps_places: bool = False) -> None:
        """`keeps_places`: others stay in the param groups, without a gradient."""
        self.optimizer = optimizer
        self._keeps_places = keeps_places
        self._groups = optimizer.param_groups
        self._before = [{k: v for k, v in g.items() if k != "params"} for g in self._groups]
        self._all = [g["params"] for g in self._groups]

    @contextmanager
    def to(self, fragments: Sequence[Fragment]) -> Iterator[None]:
        """Inside the block, the optimizer has only `fragments`, in its own order.

        A param group without fragments on this rank is always present: its counters may be saved from any rank.
        """
        wanted = {id(f.tensor) for f in fragments}
        here = []
        try:
            for group, options, params in zip(self._groups, self._before, self._all, strict=True):
                own = [p for p in params if id(p) in wanted]
                group["params"] = params if self._keeps_places else own
                if own or not any(p.is_stepped for p in params):
                    group.update(options)
                    here.append(group)
            self.optimizer.param_groups = here
            yield
        finally:
            self.optimizer.param_groups = self._groups
            for group, params in zip(self._groups, self._all, strict=True):
                group["params"] = params


@contextmanager
def restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore options of param groups that change inside the block."""
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, options in zip(optimizer.param_groups, before, strict=True):
            group.update(options)


def prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """Use torch's fused CPU kernel for states on the host, unless the user has chosen another kernel. Local.

    On a GPU, torch's default is "foreach", which steps CPU tensors one operation at a time.
    """
    for group in optimizer.param_groups:
        chosen: object = (group.get("fused"), group.get("foreach"))
        if "fused" in group and chosen == (None, None) and not group.get("differentiable"):
            group["fused"] = True
