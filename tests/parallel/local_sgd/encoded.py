"""Replicas whose movements travel in a codec: on ranks, and in one process that applies the same function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_dist.tensors.codecs import codec_of
from tests.parallel.local_sgd.on_ranks import fragments_of, held
from tests.sharding.wires.reference import Batch, Case, Reference
from tests.sharding.wires.training import batches_of, config_of, model_of, optimizer_of


@dataclass(frozen=True)
class Met(Case):
    """A case of `replicas`, each on `world` ranks."""

    stage: int = 0
    world: int = 1
    replicas: int = 2
    steps: int = 6
    every: int = 2
    outer_lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0
    meetings: str | None = "int8"

    @property
    def num_ranks(self) -> int:
        """All ranks of the job."""
        return self.replicas * self.world

    @property
    def streams(self) -> bool:
        """Whether fragments meet in turn, or later."""
        return self.fragments > 1 or self.overlap > 0

    def starting(self, step: int) -> list[int]:
        """The fragments that are sent after step `step`, from 1."""
        first = [(p + 1) * self.every // self.fragments for p in range(self.fragments)]
        return [p for p in range(self.fragments) if step % self.every == first[p] % self.every]


def batches_for(case: Met, step: int) -> list[list[list[Batch]]]:
    """`[replica][rank][microbatch]`."""
    every = batches_of(replace(case, world=case.num_ranks), step)
    return [every[r * case.world : (r + 1) * case.world] for r in range(case.replicas)]


class Meeting:
    """What replicas in one process send each other."""

    def __init__(self, case: Met, parts: Sequence[Sequence[str]]) -> None:
        self.case, self.parts = case, parts
        self.replicas = [Reference(model_of(case), case, optimizer_of) for _ in range(case.replicas)]
        first = self.replicas[0]
        self.anchor = {n: first.masters[n].clone().requires_grad_() for n in first.trained}
        self.outer = torch.optim.SGD(
            self.anchor.values(), lr=case.outer_lr, momentum=case.momentum, nesterov=case.momentum > 0, foreach=False
        )
        self.rests: dict[Any, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
        self.on_the_way: list[tuple[int, dict[str, torch.Tensor]]] = []

    @torch.no_grad()
    def mean(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What every replica gets of the movements of these parameters."""
        found = {}
        for name in names:
            total = torch.zeros(self.anchor[name].numel())
            for number, replica in enumerate(self.replicas):
                moved = (self.anchor[name] - replica.masters[name]).reshape(-1)
                total += self.arrived((name, number), moved)
            found[name] = self.arrived((name, "mean"), total * (1.0 / self.case.replicas)).view(self.anchor[name].shape)
        return found

    def arrived(self, key: Any, values: torch.Tensor) -> torch.Tensor:
        """What arrives of a message, with the rest of the last one if the case says so."""
        codec = codec_of(self.case.meetings, self.case.block)
        if codec is None:
            return values
        whole = values + self.rests[key]
        arrived = codec.rounded(whole)
        if self.case.feedback:
            self.rests[key] = whole - arrived
        return arrived

    @torch.no_grad()
    def take_up(self, means: dict[str, torch.Tensor]) -> None:
        """The outer step, and what the replicas take of it."""
        for name, where in self.anchor.items():
            where.grad = means.get(name)
        self.outer.step()
        for replica in self.replicas:
            for name in means:
                own = replica.masters[name]
                own.copy_(torch.lerp(self.anchor[name], own, self.case.mix))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """What is sent after this step, and then what is taken up after it."""
        case = self.case
        if not case.streams:
            if step % case.every == 0:
                self.take_up(self.mean(list(self.anchor)))
            return
        for p in case.starting(step):
            self.on_the_way.append((step + case.overlap, self.mean(self.parts[p])))
        while self.on_the_way and self.on_the_way[0][0] <= step:
            self.take_up(self.on_the_way.pop(0)[1])

    @torch.no_grad()
    def settle(self) -> None:
        """At the end of fragments in turn: all go on from the mean of the weights, which is sent as it is."""
        while self.on_the_way:
            self.take_up(self.on_the_way.pop(0)[1])
        for name in self.anchor:
            mean = torch.stack([replica.masters[name] for replica in self.replicas]).mean(0)
            for replica in self.replicas:
                replica.masters[name].copy_(mean)


def alone(case: Met, parts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """One process. `parts`: the parameters of each fragment."""
    meeting = Meeting(case, parts)
    for step in range(case.steps):
        for replica, batches in zip(meeting.replicas, batches_for(case, step), strict=True):
            replica.step(batches)
        meeting.after_step(step + 1)
    if case.streams:
        meeting.settle()
    return {
        "losses": [replica.losses for replica in meeting.replicas],
        "norms": [replica.norms for replica in meeting.replicas],
        "weights": meeting.replicas[0].masters,
    }


def engine_of(case: Met) -> Any:
    """The engine of a case on this rank."""
    import hf_dist

    config = config_of(case)
    config["zero_optimization"]["mics_shard_size"] = case.world
    config["hf_dist"]["wires"] |= {"meetings": case.meetings} if case.meetings else {}
    config["local_sgd"] = {
        "every": case.every,
        "outer_lr": case.outer_lr,
        "outer_momentum": case.momentum,
        "nesterov": case.momentum > 0,
        "fragments": case.fragments,
        "overlap": case.overlap,
        "mix": case.mix,
    }
    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    return hf_dist.initialize(model, config=config, optimizer=optimizer_of(trained))


def steps(engine: Any, case: Met, rank: int, first: int, last: int) -> dict[str, Any]:
    """Losses, norms, and bytes to other replicas of each step."""
    from hf_dist.dist import comm_counter

    losses, norms, sent = [], [], []
    for step in range(first, last):
        mine = []
        with comm_counter.record() as log:
            for batch in batches_for(case, step)[rank // case.world][rank % case.world]:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                mine.append(float(loss.detach()))
        losses.append(sum(mine) / len(mine))
        norms.append(float(engine.get_global_grad_norm()))
        sent.append(sum(e.nbytes for e in log.entries if e.axis == "dp_replicate"))
    return {"losses": losses, "norms": norms, "sent": sent}


def on_ranks(rank: int, world: int, cases: Sequence[Met]) -> list[dict[str, Any]]:
    """Every case on this rank."""
    from hf_dist.hf.state_dict import full_state_dict

    results = []
    for case in cases:
        engine = engine_of(case)
        found = steps(engine, case, rank, 0, case.steps)
        engine.synchronize_replicas()
        fragments = fragments_of(engine, case)  # type: ignore[arg-type]
        numels: list[list[int]] = [[] for _ in range(case.fragments)]
        for index, unit in enumerate(engine.sharded.units):
            numels[index % case.fragments] += [g.resting[1] - g.resting[0] for g in unit.groups if g.trainable]
        found |= {
            "weights": full_state_dict(engine.sharded),
            "parts": [names for names, _ in fragments],
            "numels": numels,
        }
        results.append(found | {"held": held(engine)})
    return results


def two_ranks(rank: int, world: int, cases: Sequence[Met], case: Met, folder: str) -> dict[str, Any]:
    """All that two ranks do, after one start; `case`: is resumed."""
    return {"cases": on_ranks(rank, world, cases), "resumed": resumed(rank, world, case, folder)}


def resumed(rank: int, world: int, case: Met, folder: str) -> dict[str, Any]:
    """Steps after a save; the same in a new engine that resumes."""
    from hf_dist.hf.state_dict import full_state_dict

    Path(folder).mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    at = case.every * (case.steps // case.every // 2)
    engine = engine_of(case)
    steps(engine, case, rank, 0, at)
    engine.save_checkpoint(folder)
    for name in ("straight", "resumed"):
        if name == "resumed":
            engine = engine_of(case)
            engine.load_checkpoint(folder)
        losses = steps(engine, case, rank, at, case.steps)["losses"]
        found[name] = (losses, {n: v.clone() for n, v in full_state_dict(engine.sharded).items()})
    return found
