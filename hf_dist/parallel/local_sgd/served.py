"""A replica that meets a server: it pushes its movement, and goes on from the weights that the server has by then.

    movement = anchor - weights        in fp32; the anchor: the weights that the server gave last
    weights  = anchor = what the server answers

The job is one replica, in any layout. Others come, go and are slower without its notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hf_dist.config.training_sections import LocalSgdConfig
from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ModelError
from hf_dist.log import warn_once
from hf_dist.memory.offload.resting import Resident, Resting, Tier, opened
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.parallel.local_sgd.cells import Cell, cells_for
from hf_dist.parallel.local_sgd.meeting_point import Reached
from hf_dist.parallel.local_sgd.outer import GroupMotion, let_masters_rest, resident_nbytes
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["ServedOuter"]

_STATES = ("momentum", "partial")
Answer = tuple[dict[str, Any], list[list[torch.Tensor]]]
"""The header, and for each rank of the server what it gave."""


class ServedOuter:
    """The end of one replica. Every rank of it has one and makes the same calls."""

    axis: MeshAxis | None = None
    """The other replicas are no ranks of this job."""
    copies = 1
    """Replicas whose optimizer states are in a checkpoint."""

    def __init__(self, sharded: ShardedModel, config: LocalSgdConfig, reach: Callable[[], Reached]) -> None:
        """`reach`: blocks for links to the server, at the first training step. Local."""
        self.sharded = sharded
        self.every = config.every
        """0: the caller of `synchronize` counts the steps."""
        self.met = True
        """Whether no step ran since the last meeting."""
        self.interval_ended = True
        """Whether the last step ended with a meeting."""
        self.version = 0
        """Pushes of all replicas in the weights that the server gave last."""
        self.pushed_nbytes = self.pulled_nbytes = 0
        """Bytes of values so far, of this rank."""
        self.kinds: Sequence[str] = _STATES if config.outer_momentum else ()
        """Of `states`."""
        self.motions = sorted((GroupMotion(group, config) for group in sharded.trainable_groups), key=_turn)
        self._reach = reach
        self._reached: Reached | None = None
        self._cells: list[list[list[Cell]]] = []
        """For each rank of the server and each motion."""
        self._joined = False
        self._due, self._lineage = config.every, 0
        self._steps, self._since = 0, time.monotonic()
        self._round = {"count": 0, "round": 1}
        self._loaded: dict[tuple[str, int], Resting] = {}

    # ------------------------------------------------------------------------- steps

    def before_training(self) -> bool:
        """Before a training forward: join the server, unless this replica has. Whether weights changed. Collective."""
        if self._joined:
            return False
        self._prepare()
        self.sharded.take_writes()
        shapes = {slot.name: list(slot.held.whole) for m in self.motions for slot in m.group.layout.slots}
        cells = [[cell.described for some in to for cell in some] for to in self._cells]
        join = {"call": "join", "version": self.version, "shapes": list(shapes.items())}
        header, values = self._exchange([{**join, "cells": some} for some in cells])
        founds = header["founds"]
        if founds:
            states = [self._values(lambda motion: motion.weights())]
            states += [self._values(self._loaded_values(kind)) for kind in self.kinds if self._loaded]
            found = {"call": "found", "version": self.version, **self._round}
            header, values = self._exchange([found] * len(self._cells), list(zip(*states, strict=True)))
        self._loaded.clear()
        self._settle(header, values)
        self._joined = True
        return True

    def before_backward(self) -> None:
        """Nothing: the anchor is what the server gave."""

    def after_step(self, number: int, scaler: DynamicLossScaler | None) -> bool:
        """After each step, also a skipped one: meet the server if it is time. Whether weights changed."""
        self.met = False
        self._steps += 1
        self.interval_ended = bool(self.every) and self._steps >= self._due
        if self.interval_ended:
            self.synchronize(scaler)
        return self.interval_ended

    def synchronize(self, scaler: DynamicLossScaler | None) -> None:
        """Push the movement since the last meeting, and take the server's weights. Collective over this job only."""
        let_masters_rest(self.sharded)
        push = {
            "call": "push",
            "lineage": self._lineage,
            "steps": self._steps,
            "seconds": time.monotonic() - self._since,
        }
        moved = self._values(lambda motion: motion.outgoing())
        header, values = self._exchange([push] * len(moved), [(part,) for part in moved])
        self.pushed_nbytes += sum(part.nbytes for part in moved)
        if not header["counts"]:
            warn_once(
                "the server of the replicas began again from a later checkpoint: steps since the last meeting are lost"
            )
        self._settle(header, values)

    def rest(self) -> None:
        """Training has ended: the server counts on this replica no more, until it trains again. Every rank calls it."""
        if self._joined:
            self._exchange([{"call": "rest"}] * len(self._cells))
            self._joined = False

    def leave(self) -> None:
        """Tell the server that nothing follows. Idempotent; runs at the end of the process, too."""
        if self._reached is not None:
            self._reached.leave()

    # ---------------------------------------------------------------- what crosses

    def _prepare(self) -> None:
        """Reach the server, and settle what goes where."""
        if self._reached is None:
            self._reached = self._reach()
        servers = len(self._reached.links)
        self._cells = [[[] for _ in self.motions] for _ in range(servers)]
        for index, motion in enumerate(self.motions):
            group = motion.group
            for slot in group.layout.slots if group.axes.owns else ():
                first, last = group.layout.fragment(slot, group.axes.shard.rank)
                at = slot.offset + first - group.resting[0]
                for to, cell in cells_for(slot.name, slot.held, first, last, at, servers):
                    self._cells[to][index].append(cell)

    def _values(self, of: Callable[[GroupMotion], torch.Tensor]) -> list[torch.Tensor]:
        """What each rank of the server gets: elements of `of(motion)`, 1-D over what rests here, on the host."""
        made = [torch.empty(sum(cell.numel for some in to for cell in some)) for to in self._cells]
        at = [0] * len(made)
        for index, motion in enumerate(self.motions):
            if not any(to[index] for to in self._cells):
                continue
            values = of(motion).to("cpu")
            for to, cells in enumerate(self._cells):
                for cell in cells[index]:
                    made[to][at[to] : at[to] + cell.numel].view(cell.sizes).copy_(cell.view(values))
                    at[to] += cell.numel
        return made

    def _exchange(self, headers: Sequence[dict[str, Any]], tensors: Sequence[Sequence[torch.Tensor]] = ()) -> Answer:
        """One call to every rank of the server, and their answers; the header is equal on all ranks of this job."""
        assert self._reached is not None
        links = self._reached.links
        for index, (link, header) in enumerate(zip(links, headers, strict=True)):
            link.send(header, tensors[index] if tensors else ())
        answers = [link.receive() for link in links]
        header = collectives.broadcast_object(self.sharded.mesh.world, answers[0][0])
        if "error" in header:
            raise ModelError(
                f"local_sgd: the server refuses this replica: {header['error']}. All replicas train one model"
            )
        values = [found for _, found in answers]
        self.pulled_nbytes += sum(t.nbytes for some in values for t in some)
        return header, values

    def _settle(self, header: dict[str, Any], values: list[list[torch.Tensor]]) -> None:
        """Go on from the weights that the server gave."""
        for motion, found in zip(self.motions, self._arrived([some[0] for some in values]), strict=True):
            motion.settle(found)
        self._lineage, self.version, self._due = header["lineage"], header["version"], header["every"]
        self._steps, self._since = 0, time.monotonic()
        self.met = self.interval_ended = True

    def _arrived(self, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """For each motion, the elements that rest here, on the device; they come to one rank, and from there to its copies."""
        at = [0] * len(parts)
        for index, motion in enumerate(self.motions):
            group = motion.group
            values = torch.zeros(group.resting[1] - group.resting[0])
            for to, cells in enumerate(self._cells):
                for cell in cells[index]:
                    cell.view(values).copy_(parts[to][at[to] : at[to] + cell.numel].view(cell.sizes))
                    at[to] += cell.numel
            values = values.to(group.mesh.device)
            axes = [group.axes.shard] if group.resting != group.owned else []
            for axis in (*axes, *(row.axis for row in group.axes.then)):
                if axis.size > 1 and values.numel():
                    collectives.all_reduce(
                        axis, values, "sum"
                    ).wait()  # zeros, but on the one rank that has the element
            yield values

    # ------------------------------------------------------------------ checkpoints

    def before_load(self) -> None:
        """Before weights are loaded. Local."""
        self._joined = False

    def restart(self) -> None:
        """After weights were loaded: the next training step joins the server, which takes them if it has none. Local."""
        self.met = self.interval_ended = True
        self._joined = False

    def anchors_loaded(self) -> None:
        """Nothing: anchors are never stored."""

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes of anchors at rest, by kind of memory."""
        return resident_nbytes(self.motions)

    def states(self) -> Iterator[tuple[str, FlatGroup, Resting]]:
        """(kind, group, values) for a checkpoint: what the server keeps beside the weights. Collective over this job."""
        if not self.kinds or not self._cells:
            return
        header, values = self._exchange([{"call": "states"}] * len(self._cells))
        self._round = {key: header[key] for key in self._round}
        for index, kind in enumerate(self.kinds):
            for motion, found in zip(self.motions, self._arrived([some[index] for some in values]), strict=True):
                yield kind, motion.group, Resident(found, Tier.HOST)

    def loading_states(self) -> Iterator[tuple[str, FlatGroup, Resting]]:
        """What a checkpoint is read into: the server gets it if this replica brings the weights. Local."""
        for index, motion in enumerate(self.motions):
            for kind in self.kinds:
                numel = motion.group.resting[1] - motion.group.resting[0]
                self._loaded[kind, index] = Resident(torch.zeros(numel), Tier.HOST)
                yield kind, motion.group, self._loaded[kind, index]

    def _loaded_values(self, kind: str) -> Callable[[GroupMotion], torch.Tensor]:
        def of(motion: GroupMotion) -> torch.Tensor:
            with opened(self._loaded[kind, self.motions.index(motion)]) as values:
                return values

        return of

    def plain_state(self) -> dict[str, int]:
        """Numbers for a checkpoint, equal on every rank."""
        return {"version": self.version, **self._round}

    def load_plain_state(self, state: dict[str, int]) -> None:
        """Restore them; a checkpoint of another mode has none."""
        self.version = state.get("version", 0)
        self._round = {key: state.get(key, value) for key, value in (("count", 0), ("round", 1))}


def _turn(motion: GroupMotion) -> tuple[bool, str]:
    """Groups that other pipeline stages hold, too, come last and in the order of their names: stages have others before."""
    is_held = any(row.between_stages for row in motion.group.axes.then)
    return is_held, motion.group.layout.slots[0].name if is_held and motion.group.layout.slots else ""
