"""Gradients that travel in two thin factors: one process that sends itself what ranks would send, and the ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_dist.tensors.codecs import Codec
from tests.sharding.wires.reference import Case, Reference
from tests.sharding.wires.training import batches_of, config_of, model_of, optimizer_of


@dataclass(frozen=True)
class Factors(Case):
    """A case of stage 0."""

    stage: int = 0
    rank: int = 2
    start: int = 1
    rest: bool = True
    """Whether what a step left out is added to the next one."""
    warm: bool = True
    least: float = 2.0
    wire: str | None = None
    """`communication_data_type`: None or "bf16"."""

    def is_sent_in_factors(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape is."""
        if len(shape) < 2:
            return False
        rows, columns = sides(shape)
        return self.columns_of(shape) * (rows + columns) * self.least < rows * columns

    def columns_of(self, shape: Sequence[int]) -> int:
        """Of the two factors."""
        return min(self.rank, *sides(shape))


def sides(shape: Sequence[int]) -> tuple[int, int]:
    """Of the matrix that a parameter is."""
    return shape[0], torch.Size(shape[1:]).numel()


class FactorReference(Reference):
    """As `Reference`, with P, Q and what they leave out of each parameter."""

    case: Factors

    def reduced(self, name: str, parts: Sequence[torch.Tensor], kind: str, codec: Codec | None) -> torch.Tensor:
        """The mean of the ranks' flat gradients, as all of them get it."""
        case, shape = self.case, self.masters[name].shape
        number = len(self.losses)
        parts = [self.cast(part) for part in parts]
        if kind != "gradients" or number < case.start or not case.is_sent_in_factors(shape):
            return self.mean(parts)
        rows, columns = sides(shape)
        given = [part.view(rows, columns) + self.rests[name, r] for r, part in enumerate(parts)]
        if (case.warm and (name, "q") not in self.rests) or not case.warm:
            seed = zlib.crc32(f"{name} {0 if case.warm else number}".encode())
            generator = torch.Generator().manual_seed(seed)
            self.rests[name, "q"] = torch.randn(columns, case.columns_of(shape), generator=generator)
        q = orthonormal(self.rests[name, "q"])
        p = orthonormal(self.mean([self.cast(m @ q) for m in given]))
        back = [m.T @ p for m in given]
        if case.rest:
            for r, (m, b) in enumerate(zip(given, back, strict=True)):
                self.rests[name, r] = m - p @ b.T
        self.rests[name, "q"] = self.mean([self.cast(b) for b in back])
        return self.cast(p @ self.rests[name, "q"].T).reshape(-1)

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        """What is left of values that travel in `case.wire`."""
        return values if self.case.wire is None else values.bfloat16().float()

    def mean(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of two ranks, added in the dtype that travels."""
        return self.cast(torch.stack(list(parts)).sum(0)) / len(parts)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Directions that are (nearly) not there come out small: V (V^T V + slack)^(-1/2), by a Cholesky factor."""
    columns = columns / columns.abs().max().clamp(min=1e-37)
    gram = columns.T @ columns
    slack = 1e-5 * gram.trace() / len(gram)
    lower = torch.linalg.cholesky(gram + (slack + 1e-37) * torch.eye(len(gram)))
    return torch.linalg.solve_triangular(lower, columns.T, upper=False).T


def alone(case: Factors) -> dict[str, Any]:
    """One process."""
    one = FactorReference(model_of(case), case, optimizer_of)
    for step in range(case.steps):
        one.step(batches_of(case, step))
    return {"losses": one.losses, "norms": one.norms, "weights": one.masters}


def engine_of(case: Factors, **more: Any) -> Any:
    """The engine of a case on this rank."""
    import hf_dist

    config = config_of(case)
    config["hf_dist"]["wires"] |= {
        "gradients": "powersgd",
        "powersgd": {
            "rank": case.rank,
            "start_step": case.start,
            "error_feedback": case.rest,
            "warm_start": case.warm,
            "min_compression_rate": case.least,
        },
    }
    if case.wire is not None:
        config["communication_data_type"] = case.wire
    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    return hf_dist.initialize(model, config={**config, **more}, optimizer=optimizer_of(trained))


def steps(engine: Any, case: Factors, rank: int, first: int, last: int) -> dict[str, Any]:
    """Losses, norms and bytes of reductions of each step."""
    from hf_dist.dist import comm_counter

    losses, norms, sent = [], [], []
    for step in range(first, last):
        mine = []
        with comm_counter.record() as log:
            for batch in batches_of(case, step)[rank]:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                mine.append(float(loss.detach()))
        losses.append(sum(mine) / len(mine))
        norms.append(float(engine.get_global_grad_norm()))
        sent.append(sorted(e.nbytes for e in log.entries if e.op == "all_reduce" and e.axis == "shard"))
    return {"losses": losses, "norms": norms, "sent": sent}


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """All of them at full precision."""
    from hf_dist.hf.state_dict import full_state_dict

    return {n: v.clone() for n, v in full_state_dict(engine.sharded).items()}


def on_ranks(rank: int, world: int, cases: Sequence[Factors]) -> list[dict[str, Any]]:
    """Every case on this rank."""
    results = []
    for case in cases:
        engine = engine_of(case)
        found = steps(engine, case, rank, 0, case.steps)
        groups = [[(s.name, s.shape) for s in g.layout.slots] for g in engine.sharded.trainable_groups]
        whole = [g.layout.numel for g in engine.sharded.trainable_groups]
        results.append(found | {"weights": weights_of(engine), "groups": groups, "whole": whole})
    return results


def two_ranks(rank: int, world: int, cases: Sequence[Factors], folder: str) -> dict[str, Any]:
    """All that two ranks do, after one start."""
    return {
        "cases": on_ranks(rank, world, cases),
        "resumed": resumed(rank, world, Factors(start=1), f"{folder}/saved"),
        "inf": not_finite(rank, world, Factors(start=0)),
    }


def resumed(rank: int, world: int, case: Factors, folder: str) -> dict[str, Any]:
    """Steps after a save; the same in a new engine that resumes."""
    Path(folder).mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    engine = engine_of(case)
    steps(engine, case, rank, 0, 3)
    engine.save_checkpoint(folder)
    found["straight"] = steps(engine, case, rank, 3, 6)["losses"], weights_of(engine)
    engine = engine_of(case)
    engine.load_checkpoint(folder)
    found["resumed"] = steps(engine, case, rank, 3, 6)["losses"], weights_of(engine)
    return found


def not_finite(rank: int, world: int, case: Factors) -> dict[str, Any]:
    """A gradient with inf on one rank makes fp16 skip the step; what was kept stays as it was."""
    engine = engine_of(case, fp16={"enabled": True, "loss_scale": 128.0})
    steps(engine, case, rank, 0, 3)
    wires = [g.messages["gradients"] for g in engine.sharded.trainable_groups]

    def kept() -> list[torch.Tensor]:
        names = itertools.product(wires, ("rest", "directions"))
        return [w.residuals[n].values.clone() for w, n in names if n in w.residuals]

    before, weights = kept(), weights_of(engine)
    loss = engine(**batches_of(case, 3)[rank][0]).loss
    engine.backward(loss * (torch.inf if rank == 1 else 1.0))
    engine.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, kept(), strict=True)]
    after = weights_of(engine)
    same = all(torch.equal(weights[n], after[n]) for n in weights)
    return {"changed": changed, "same": same, "losses": steps(engine, case, rank, 4, 6)["losses"]}
