"""What a rank does in the tests of optimizers that must see whole tensors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.checkpoint.grid import digests
from tests.checkpoint.grid import train as train_rows
from tests.covering import FULL_GRID, some_of
from tests.parity.families import make_batches, make_model, summed_loss
from tests.parity.optimizers import SECTIONS

STEPS, ROUND_NUMEL = 3 if FULL_GRID else 2, 3000
BEFORE, AFTER = (3, 3) if FULL_GRID else (2, 1)
"""Steps before and after a save."""


def is_matrix(name: str, p: nn.Parameter) -> bool:
    return p.dim() == 2 and "embed" not in name and "lm_head" not in name


def torch_muon(model: nn.Module) -> torch.optim.Muon:
    """torch's own class over the matrices; the rest is not trained."""
    return torch.optim.Muon([p for n, p in model.named_parameters() if is_matrix(n, p)], lr=0.02)


def same_rows(engine: Any, model: nn.Module, steps: int = STEPS) -> None:
    """Steps on the same two rows on every rank, so that the mean over ranks has the bits of one."""
    for batch in make_batches("llama", steps):
        total, items = summed_loss(model, {k: v[:2] for k, v in batch.items()})
        loss = total / items
        loss.backward() if engine is None else engine.backward(loss)
        if engine is not None:
            engine.step()


def full(engine: Any) -> dict[str, torch.Tensor]:
    import hf_dist

    with hf_dist.gathered(engine.model):
        return {n: p.detach().clone() for n, p in engine.model.named_parameters()}


def made(section: dict[str, Any] | None, stage: int, optimizer: Any = None, **more: Any) -> Any:
    import hf_dist

    model = make_model("llama")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **more}
    if section:
        config["optimizer"] = section
    return hf_dist.initialize(model, config=config, optimizer=optimizer(model) if optimizer else None)


def on_two_ranks(rank: int, world: int, stages: tuple[int, ...], root: str) -> dict[str, Any]:
    """What two ranks do, in one spawn; `bits` exchanges in small rounds from there on."""
    parts = {"odd": odd(rank, world), "planned": planned(rank, world), "saved": saved(rank, world, root, 3)}
    return {**parts, "bits": bits(rank, world, stages)}


def bits(rank: int, world: int, stages: tuple[int, ...]) -> list[tuple[dict[str, torch.Tensor], int, int, int, int]]:
    """By stage: weights after torch's Muon, bytes and number of exchanges on this rank, the formula's bytes, rounds."""
    from hf_dist.dist import comm_counter
    from hf_dist.optim import owners

    owners.BUCKET_NUMEL = ROUND_NUMEL
    results = []
    for stage in stages:
        engine = made(None, stage, torch_muon)
        with comm_counter.record() as log:
            same_rows(engine, engine.model)
        items = engine.fragments.members[0]._muon._owners.items
        rounds = len(engine.fragments.members[0]._muon._owners.buckets(lambda o: True))
        expected = 0
        for o in items:
            if stage == 0:
                expected += o.is_mine * (world - 1) * o.numel * 2
            else:
                held = o.length(rank)
                expected += (o.numel - held) * 2 if o.is_mine else held * 2
        results.append((full(engine), log.nbytes("all_to_all"), log.count("all_to_all"), expected * STEPS, rounds))
    return results


class Basis:
    """A state that is an object, as projectors are."""

    def __init__(self, rank: int) -> None:
        self.rank, self.kind, self.vectors, self.age = rank, "left", None, 0


class Projected(torch.optim.Optimizer):
    """Momentum in a space of few dimensions, found anew every second step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                grad, state = p.grad.reshape(p.shape[0], -1), self.state[p]
                basis = state.setdefault("basis", Basis(2))
                if basis.age % 2 == 0:
                    basis.vectors = [torch.linalg.svd(grad, full_matrices=False)[0][:, : basis.rank].contiguous()]
                basis.age += 1
                small = basis.vectors[0].T @ grad
                momentum = state.setdefault("momentum", torch.zeros_like(small))
                momentum.mul_(0.9).add_(small)
                p.sub_((basis.vectors[0] @ momentum).view(p.shape), alpha=group["lr"])


def projected(model: nn.Module) -> Projected:
    ps = list(model.parameters())
    return Projected([{"params": ps[::2], "lr": 0.02}, {"params": ps[1::2]}])


RESUMED = {"muon": (SECTIONS["muon"], None), "adafactor": (SECTIONS["adafactor"], None), "projected": (None, projected)}
RESUMED = some_of(RESUMED, "muon", "projected")


def start(kind: str, stage: int, seed: int = 0) -> Any:
    import hf_dist

    section, optimizer = RESUMED[kind]
    model = make_model("llama")
    if seed:
        for p in model.parameters():
            p.data.add_(0.1)
    config: dict[str, Any] = {"train_batch_size": 36, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    if section:
        config["optimizer"] = section
    return hf_dist.initialize(model, config=config, optimizer=optimizer(model) if optimizer else None)


def saved(rank: int, world: int, root: str, stage: int) -> dict[str, Any]:
    """By kind: hashes of all states at the save, and losses after it."""
    results = {}
    for kind in RESUMED:
        engine = start(kind, stage)
        train_rows(engine, 0, BEFORE)
        engine.save_checkpoint(Path(root) / kind)
        results[kind] = (digests(engine), train_rows(engine, BEFORE, AFTER))
    return results


def resumed(rank: int, world: int, root: str, stage: int) -> dict[str, Any]:
    """The same after a load."""
    results = {}
    for kind in RESUMED:
        engine = start(kind, stage, seed=1)
        engine.load_checkpoint(Path(root) / kind)
        results[kind] = (digests(engine), train_rows(engine, BEFORE, AFTER))
    return results


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Asking(Projected):
    """Has memory read by code that is not torch's, which tensors without elements do not have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(p.grad.numpy().ndim == p.dim() for g in self.param_groups for p in g["params"] if p.grad is not None)
        super().step(closure)


def asking(model: nn.Module) -> Asking:
    return Asking(model.parameters())


OBJECTS = {"projected": projected, "adafactor": adafactor, "sgd": sgd, "muon": torch_muon, "asking": asking}


PLANNED = [("projected", 0), ("sgd", 3), ("muon", 3), ("asking", 3)]
PLANNED = list(itertools.product(OBJECTS, (0, 1, 3))) if FULL_GRID else PLANNED
"""Of whole tensors, or of shards."""


def planned(rank: int, world: int) -> dict[str, Any]:
    """By optimizer object and stage: planned bytes at rest, what is there after two steps, whether the plan is known."""
    from hf_dist.memory.offload.resting import Tier
    from hf_dist.planning.optimizer_states import OptimizerStates
    from hf_dist.planning.state_bytes import States

    found = {}
    for kind, stage in PLANNED:
        engine = made(None, stage, OBJECTS[kind])
        kept = OptimizerStates.of_attached(engine.fragments, engine.config)
        plan = States.of_engine(engine.sharded, engine.config, kept).nbytes.resident(Tier.DEVICE)
        same_rows(engine, engine.model, 2)
        found[f"{kind}-{stage}"] = (plan, engine.resident_nbytes()["device"], kept.known)
    return found


class Towers(nn.Module):
    """One of two is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(48, 64), nn.Linear(48, 64)

    def forward(self, x: torch.Tensor, idle: bool) -> torch.Tensor:
        return (self.idle(x) if idle else self.used(x)).square().mean()


def odd(rank: int, world: int) -> dict[str, Any]:
    """Steps that are skipped, parameters without a gradient, states on the host."""
    import hf_dist

    found: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        engine = made(section, 2, fp16={"enabled": True, "initial_scale_power": 4})
        same_rows(engine, engine.model, 1)
        before = (digests(engine), full(engine))
        total, items = summed_loss(engine.model, {k: v[:2] for k, v in make_batches("llama", 1)[0].items()})
        engine.backward(total / items * float("inf"))
        engine.step()
        after = (digests(engine), full(engine))
        unmoved = all(torch.equal(before[1][k], v) for k, v in after[1].items())
        found[f"{name}-overflow"] = (engine.skipped_steps, before[0] == after[0], unmoved)

        model = Towers()
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": section}
        engine = hf_dist.initialize(model, config=config)
        start = full(engine)
        for everywhere in (False, True):  # then the other tower on one rank alone
            engine.backward(model(torch.ones(3, 48), everywhere and rank == 1))
            engine.step()
            found[f"{name}-unused-{everywhere}"] = {k: torch.equal(start[k], v) for k, v in full(engine).items()}
    whole = []
    for more in ({}, {"offload_optimizer": {"device": "cpu"}}):
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2, **more}}
        model = make_model("llama")
        engine = hf_dist.initialize(model, config={**config, "bf16": {"enabled": True}}, optimizer=torch_muon(model))
        same_rows(engine, model)
        whole.append(full(engine))
    found["offload"] = all(torch.equal(v, whole[1][k]) for k, v in whole[0].items())
    return found
