"""Replicas that meet a server, in loops of their own: what a rank does; and the same in one process, in the server's order."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist import DistAccelerator
from hf_dist.parallel.local_sgd.server import ReplicaServer
from tests.parallel.local_sgd.emulation import Work, _step, count_items, inner_for, model_for, rows_of
from tests.parity.families import make_batches, summed_loss

CLIP = 1.0


@dataclass(frozen=True)
class Served:
    """A start: its replicas, the server's ranks, and each replica's layout."""

    work: Work
    ranks: int = 1
    """Of each replica."""
    servers: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    pauses: tuple[float, ...] = ()
    """Seconds that each replica waits before its first step, and between its steps."""
    job: str = ""
    """Where the server is, if it and each replica are jobs of their own."""

    @property
    def world(self) -> int:
        """Processes of the start."""
        return self.servers + self.work.replicas * self.ranks

    @property
    def config(self) -> dict[str, Any]:
        """The JSON."""
        replicas = {"ranks": "rest", "replicas": self.work.replicas}
        server: dict[str, Any] = {"job": self.job} if self.job else {"ranks": self.servers}
        roles = {"server": {**server, "averages": True}, "trainer": replicas}
        section = {**self.work.section, "mode": "server", "dynamic_steps": False}
        return {
            "train_micro_batch_size_per_gpu": "auto",
            "hf_dist": {"roles": roles},
            "local_sgd": section,
            **self.layout,
        }


def train(rank: int, world: int, served: Served, act: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """What a replica has at the end, or the server's log. `act(replica, step)` runs before each step."""
    servers: list[ReplicaServer] = []
    run = ReplicaServer.run
    ReplicaServer.run = lambda self: servers.append(self) or run(self)  # type: ignore[func-returns-value, method-assign]
    torch.manual_seed(0)
    try:
        accelerator = DistAccelerator(dist_config=served.config)
    except SystemExit as end:
        assert not end.code, end
        outer = servers[0]._outer
        assert outer is not None
        return {"log": servers[0].log, "nbytes": outer.nbytes, "weights": outer.weights.clone()}
    work, (number, replicas) = served.work, accelerator.replica
    model: Any = model_for(work)
    model, optimizer = accelerator.prepare(model, inner_for(work, model))
    pause = served.pauses[number] if served.pauses else 0.0
    losses = []
    for step, batch in enumerate(make_batches(work.family, work.steps), 1):
        time.sleep(pause)
        if act is not None:
            act(number, step)
        rows = rows_of(batch, number, replicas)
        items = count_items(rows)
        total, _ = summed_loss(model, rows_of(rows, accelerator.process_index, accelerator.num_processes))
        accelerator.backward(total / items * accelerator.num_processes)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total.detach(), "sum")) / items)
    outer = accelerator.engine_of(model).outer
    accelerator.engine_of(model).synchronize_replicas()
    state = accelerator.get_state_dict(model)
    weights = {name: t.float().clone() for name, t in (state or {}).items()}
    sent = (outer.pushed_nbytes, outer.pulled_nbytes)
    outer.rest()
    outer.leave()
    return {"replica": number, "weights": weights, "losses": losses, "sent": sent}


class Emulation:
    """Algorithm 4 (delayed Nesterov) of arXiv 2401.09135 with plain torch: the replicas of a log, in its order."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.weights = {n: p.detach().clone() for n, p in model_for(work).named_parameters()}
        self.momentum = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.sums = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.count, self.round = 0, 1
        self.models: dict[int, nn.Module] = {}
        self.inner: dict[int, torch.optim.Optimizer] = {}
        self.steps: dict[int, int] = {}
        self.losses: dict[int, list[float]] = {}
        self.batches = make_batches(work.family, work.steps)
        self.after: dict[int, dict[str, torch.Tensor]] = {}
        """What each replica has after its last push."""

    def run(self, log: list[tuple[str, int, int]]) -> Emulation:
        """All joins and pushes."""
        for call, number, replicas in log:
            if call == "join" and number not in self.models:
                self.models[number] = model_for(self.work)
                self.inner[number] = inner_for(self.work, self.models[number])
                self.steps[number], self.losses[number] = 0, []
            if call == "push":
                self._train(number)
                self._push(number, replicas)
            self._take(number)
        return self

    def _train(self, number: int) -> None:
        first = self.steps[number]
        self.steps[number] = min(first + self.work.every, self.work.steps)
        for batch in self.batches[first : self.steps[number]]:
            rows = rows_of(copy.copy(batch), number, self.work.replicas)
            loss, _ = _step(self.models[number], self.inner[number], rows)
            self.losses[number].append(loss)

    @torch.no_grad()
    def _push(self, number: int, replicas: int) -> None:
        rate, factor = self.work.outer_lr, self.work.momentum
        if self.count == 0:
            self.round = replicas
        self.count += 1
        for name, p in self.models[number].named_parameters():
            moved = self.anchors[number][name] - p
            self.sums[name] += moved
            self.weights[name] -= rate * moved / self.round
            if self.count == self.round:
                self.momentum[name] = factor * self.momentum[name] + self.sums[name] / self.round
                self.weights[name] -= rate * factor * self.momentum[name]
                self.sums[name].zero_()
        self.count %= self.round

    @torch.no_grad()
    def _take(self, number: int) -> None:
        self.anchors = getattr(self, "anchors", {})
        self.anchors[number] = {n: w.clone() for n, w in self.weights.items()}
        for name, p in self.models[number].named_parameters():
            p.copy_(self.weights[name])
        self.after[number] = self.anchors[number]
