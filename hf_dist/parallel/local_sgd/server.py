"""A server of replicas that train alone: each pushes its movement and takes the weights at its own pace.

All ranks of the server take the calls of the replicas in one order, which its rank 0 decides, and each answers for its rows.
A call counts once all ranks have all parts of it, so a replica that dies in the middle of a push has not pushed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_dist.config.training_sections import LocalSgdConfig
from hf_dist.dist import collectives
from hf_dist.dist.link import Message
from hf_dist.dist.mesh import MeshAxis
from hf_dist.log import say
from hf_dist.parallel.local_sgd.cells import Cell, rows_of
from hf_dist.parallel.local_sgd.delayed_nesterov import DelayedNesterov
from hf_dist.parallel.local_sgd.guests import Guest, Guests
from hf_dist.tensors.tensor_slice import strides_of

__all__ = ["ReplicaServer"]

_PULSE = 5.0
"""Seconds after which rank 0 tells the other ranks that there is nothing to do."""
_PART = 0.2
"""Seconds for which the other ranks wait for their part of a call; then another replica has its turn."""
Turn = dict[str, Any]


class _Share:
    """The rows that a rank of the server keeps, one after another in a flat buffer."""

    def __init__(self, wholes: Mapping[str, Sequence[int]], server: int, servers: int) -> None:
        self.wholes = {name: tuple(whole) for name, whole in wholes.items()}
        self.numel = 0
        self._at: dict[str, int] = {}
        for name, whole in sorted(self.wholes.items()):
            first, last = rows_of(whole, server, servers)
            row = math.prod(whole[1:])
            self._at[name] = self.numel - first * row
            self.numel += (last - first) * row

    def cell(self, described: Sequence[Any]) -> Cell:
        """A box of a parameter, in the flat buffer."""
        name, whole, offsets, sizes = described
        strides = strides_of(tuple(whole))
        at = self._at[name] + sum(first * stride for first, stride in zip(offsets, strides, strict=True))
        return Cell(name, tuple(whole), tuple(offsets), tuple(sizes), at, strides)


class ReplicaServer:
    """One of the ranks of a server. All make the same calls."""

    def __init__(self, world: MeshAxis, config: LocalSgdConfig, replicas: int | None) -> None:
        """`world`: the ranks of the server; `replicas`: how many come, and when the last has left it ends. None: never."""
        self.guests = Guests()
        self.version = 0
        """Pushes in the weights, those before a checkpoint included."""
        self.log: list[tuple[str, int, int]] = []
        """(call, number of the replica, replicas that train) of each push, and of each join."""
        self._world, self._config, self._replicas = world, config, replicas
        self._share: _Share | None = None
        self._outer: DelayedNesterov | None = None
        self._cells: dict[str, dict[int, list[Cell]]] = {}
        """Session of a replica -> its rank -> its boxes here, in the order of its messages."""
        self._lineage = 0
        """Counts the models that the replicas began with. Movements of an older one do not fit."""
        self._active: dict[int, float] = {}
        """Of rank 0: number of each replica that trains -> its speed in steps per second; 0 before its first push."""
        self._told: set[int] = set()

    def run(self) -> str:
        """Answer until the last replica has left. Every rank calls it. Returns a summary."""
        while True:
            turn: Turn = collectives.broadcast_object(self._world, self._next() if self._world.rank == 0 else None)
            if turn["call"] == "end":
                pushes = [number for call, number, _ in self.log if call == "push"]
                return f"took {len(pushes)} pushes of {len(set(pushes))} replicas"
            if turn["call"] != "wait":
                self._take(turn)

    # ---------------------------------------------------------------- whose turn it is, of rank 0

    def _next(self) -> Turn:
        with self.guests.news:
            self.guests.news.wait_for(lambda: self.guests.first() or self._is_over(), _PULSE)
            self._look_for_losses()
            guest = self.guests.first()
            if guest is None:
                return {"call": "end" if self._is_over() else "wait"}
            header = guest.inbox[0][0]
        turn = {"call": header["call"], "number": guest.number, "session": guest.session}
        return turn | self._decided(guest.number, header)

    def _decided(self, number: int, header: Mapping[str, Any]) -> Turn:
        """What all ranks do with a call."""
        call, version = header["call"], header.get("version", 0)
        if call in ("join", "found"):
            self._active.setdefault(number, 0.0)
            founds = self._outer is None or version > self.version
            return {"founds": founds, "replicas": len(self._active), "every": self._steps_for(number)}
        if call == "push":
            self._active[number] = header["steps"] / max(header["seconds"], 1e-9)
            fits = header["lineage"] == self._lineage
            return {"counts": fits, "replicas": len(self._active), "every": self._steps_for(number)}
        return {}

    def _steps_for(self, number: int) -> int:
        """Steps until this replica's next push: fewer for a slower one, so that all push equally often (DyLU of the paper)."""
        every, speed = self._config.every, self._active[number]
        if not self._config.dynamic_steps or not speed:
            return every
        return max(1, round(every * (speed / max(self._active.values()))))

    def _look_for_losses(self) -> None:
        for number, guest in self.guests.by_number.items():
            if guest.is_over:
                self._active.pop(number, None)
            if guest.gone and id(guest) not in self._told:
                self._told.add(id(guest))
                say(f"replica {number} is gone ({guest.gone}); {len(self._active)} go on")

    def _is_over(self) -> bool:
        known = self.guests.by_number
        return self._replicas is not None and all(
            number in known and known[number].is_over for number in range(self._replicas)
        )

    # -------------------------------------------------------------------------- a call

    def _take(self, turn: Turn) -> None:
        """Answer one call, if every rank has its part of it. Every rank calls it."""
        guest = self._guest(turn)
        is_here, is_gone = guest is not None and guest.is_complete, "" if guest is None else guest.gone
        problem = self._problem(guest, turn) if guest is not None and is_here and turn["call"] == "join" else ""
        everyone = collectives.all_gather_object(self._world, (is_here, is_gone, problem))
        if guest is None or not all(here for here, _, _ in everyone):
            if guest is not None and (reason := next((gone for _, gone, _ in everyone if gone), "")):
                guest.lose(reason)  # another rank had a part of its call still to come
            elif guest is not None:
                self.guests.wait_longer(guest)
            return
        problem = next((text for _, _, text in everyone if text), "")
        if problem:
            self._active.pop(guest.number, None)
            guest.answer(lambda rank: ({"error": problem}, []))
            return
        answers = getattr(self, f"_{turn['call']}")(guest, turn)
        guest.answer(answers.__getitem__)

    def _guest(self, turn: Turn) -> Guest | None:
        """The replica, after a moment for its part of the call to arrive; None if it has not come to this rank."""

        def found() -> Guest | None:
            guest = self.guests.by_number.get(turn["number"])
            return guest if guest is not None and guest.session == turn["session"] else None

        with self.guests.news:
            self.guests.news.wait_for(lambda: (guest := found()) and (guest.is_complete or guest.gone), _PART)
            return found()

    def _problem(self, guest: Guest, turn: Turn) -> str:
        """Why a replica cannot join; "" if it can. Notes where its values are."""
        boxes = {rank: header["cells"] for rank, (header, _) in guest.inbox.items()}
        wholes = {name: tuple(whole) for header, _ in guest.inbox.values() for name, whole in header["shapes"]}
        share = self._share
        if share is None or self._outer is None:
            share = self._share = _Share(wholes, self._world.rank, self._world.size)
        if wholes != share.wholes:
            name = min(name for name in {*wholes, *share.wholes} if wholes.get(name) != share.wholes.get(name))
            there, here = (str(some.get(name, "missing")) for some in (wholes, share.wholes))
            return f"{name} is {there} in replica {guest.number}, {here} here"
        cells = {rank: [share.cell(box) for box in some] for rank, some in boxes.items()}
        assert sum(cell.numel for some in cells.values() for cell in some) == share.numel, "each element has one owner"
        self._cells[turn["session"]] = cells
        return ""

    def _join(self, guest: Guest, turn: Turn) -> list[Message]:
        if turn["founds"]:
            return [({"founds": True}, [])] * guest.ranks
        return self._joined(guest, turn)

    def _found(self, guest: Guest, turn: Turn) -> list[Message]:
        """The weights that all begin with: of the replica with the most pushes in its checkpoint, or of the first."""
        if turn["founds"]:
            assert self._share is not None
            self._outer = DelayedNesterov(self._share.numel, self._config.outer_lr, self._config.outer_momentum)
            header, tensors = guest.inbox[0]
            targets = (self._outer.weights, self._outer.momentum, self._outer.partial)[: len(tensors)]
            for index, target in enumerate(targets):
                self._put(guest, turn, index, target)
            self.version, self._lineage = header["version"], self._lineage + 1
            self._outer.count, self._outer.round = header["count"], header["round"]
            if self._world.rank == 0:
                say(f"replica {guest.number} brings the weights, with {self.version} pushes in them")
        return self._joined(guest, turn)

    def _joined(self, guest: Guest, turn: Turn) -> list[Message]:
        if self._world.rank == 0:
            say(f"replica {guest.number} joins, of {guest.ranks} ranks: {turn['replicas']} train")
        self.log.append(("join", guest.number, turn["replicas"]))
        return self._current(guest, turn)

    def _push(self, guest: Guest, turn: Turn) -> list[Message]:
        assert self._outer is not None
        if turn["counts"]:
            moved = torch.empty_like(self._outer.weights)
            self._put(guest, turn, 0, moved)
            self._outer.push(moved, turn["replicas"])
            self.version += 1
            self.log.append(("push", guest.number, turn["replicas"]))
        return self._current(guest, turn)

    def _states(self, guest: Guest, turn: Turn) -> list[Message]:
        assert self._outer is not None
        parts = [self._part(turn, rank, self._outer.momentum, self._outer.partial) for rank in range(guest.ranks)]
        return [({"count": self._outer.count, "round": self._outer.round}, part) for part in parts]

    def _rest(self, guest: Guest, turn: Turn) -> list[Message]:
        self._active.pop(guest.number, None)
        return [({}, [])] * guest.ranks

    def _leave(self, guest: Guest, turn: Turn) -> list[None]:
        self._active.pop(guest.number, None)
        self._cells.pop(turn["session"], None)
        guest.left = True
        return [None] * guest.ranks

    # ------------------------------------------------------------------------ values

    def _current(self, guest: Guest, turn: Turn) -> list[Message]:
        assert self._outer is not None
        header = {"founds": False, "lineage": self._lineage, "version": self.version, "every": turn["every"]}
        header["counts"] = turn.get("counts", True)
        return [(header, self._part(turn, rank, self._outer.weights)) for rank in range(guest.ranks)]

    def _part(self, turn: Turn, rank: int, *sources: torch.Tensor) -> list[torch.Tensor]:
        """What a rank of the replica has of `sources`, one after another."""
        cells = self._cells[turn["session"]][rank]
        return [torch.cat([torch.empty(0), *(cell.view(s).reshape(-1) for cell in cells)]) for s in sources]

    def _put(self, guest: Guest, turn: Turn, index: int, target: torch.Tensor) -> None:
        """Write tensor `index` of the call's messages into its places."""
        for rank, (_, tensors) in guest.inbox.items():
            cells = self._cells[turn["session"]][rank]
            for cell, values in zip(cells, tensors[index].split([cell.numel for cell in cells]), strict=True):
                cell.view(target).copy_(values.view(cell.sizes))
