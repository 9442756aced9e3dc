"""The same steps in one process with plain torch, and on ranks with the engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tests.attempts import attempts
from tests.parity.families import ROWS, make_batches, make_model, summed_loss
from tests.parity.optimizers import PLAIN, SECTIONS, adamw
from tests.references import shared

STEPS = 3
CLIP = 1.0


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    family: str = "llama"
    stage: int = 0
    accumulation: int = 1
    world: int = 1
    """Ranks. A GPU's cases run on what there is, and leave this alone."""
    tied: bool = False
    checkpointing: bool = False
    lora: bool = False
    shard_size: int | None = None
    once: bool = False
    """`hf_dist.reduce_once_per_window`."""
    over: bool = False
    """`hf_dist.optimizer_over` "all": the optimizer's part of a shard is cut among its copies."""
    ep: int = 1
    """Ranks that hold different experts."""
    tp: int = 1
    """`tensor_parallel.autotp_size`."""
    sequence: bool = False
    """`hf_dist.sequence_regions`, where matrices are cut."""
    optimizer: str = "adamw"
    """Of `tests/parity/optimizers.py`."""

    def __str__(self) -> str:
        flags = [name for name in ("tied", "checkpointing", "lora", "once", "over", "sequence") if getattr(self, name)]
        hsdp = [f"shard{self.shard_size}"] if self.shard_size else []
        spread = [f"ep{self.ep}"] if self.ep > 1 else []
        cut = [f"tp{self.tp}"] if self.tp > 1 else []
        shape = [self.family, f"z{self.stage}", f"acc{self.accumulation}"]
        by = [self.optimizer] if self.optimizer != "adamw" else []
        return "-".join([*shape, *flags, *hsdp, *spread, *cut, *by, f"w{self.world}"])

    @property
    def model(self) -> tuple[str, bool, bool, bool]:
        """Arguments of `make_model`."""
        return self.family, self.tied, self.lora, self.checkpointing


def window_rows(case: Case, step: int) -> int:
    """Rows of a step: with accumulation the last window has two microbatches instead of three."""
    return ROWS * 2 // 3 if case.accumulation == 3 and step == STEPS - 1 else ROWS


def reference(case: Case) -> dict[str, Any]:
    """Losses, norms and weights of one process on the joined batches; `case.stage` must be 0 (it plays no part)."""
    return shared(("parity", case), lambda: _reference(case))


def _reference(case: Case) -> dict[str, Any]:
    model = make_model(*case.model)
    optimizer = PLAIN[case.optimizer](model)
    losses, norms = [], []
    for step, batch in enumerate(make_batches(case.family, STEPS)):
        rows = window_rows(case, step)
        total, items = summed_loss(model, {k: v[:rows] for k, v in batch.items()})
        loss = total / items
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def train_on_rank(rank: int, world: int, case: Case, device: str = "cpu") -> dict[str, Any]:
    """The same through `hf_dist.initialize`; weights come back on rank 0, checksums of them on every rank."""
    import hf_dist
    from hf_dist.dist import collectives
    from hf_dist.hf.state_dict import full_state_dict
    from hf_dist.sharding.param_slice import held_slice
    from hf_dist.tensors.checksum import checksum

    model = make_model(*case.model)
    shapes = {n: (tuple(p.shape), id(p)) for n, p in model.named_parameters()}
    data, rank = world // case.tp, rank // case.tp
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case.stage, **({"mics_shard_size": case.shard_size} if case.shard_size else {})},
    }
    if case.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": case.ep}
    if case.once:
        config["hf_dist"] = {"reduce_once_per_window": True}
    if case.over:
        config.setdefault("hf_dist", {})["optimizer_over"] = "all"
    if case.tp > 1:
        config["tensor_parallel"] = {"autotp_size": case.tp}
        config.setdefault("hf_dist", {})["sequence_regions"] = "auto" if case.sequence else False
    if case.optimizer in SECTIONS:
        config["optimizer"] = SECTIONS[case.optimizer]
    optimizer = None if case.optimizer in SECTIONS else adamw(model, foreach=True)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device=device)
    micro = ROWS // (data * case.accumulation)
    losses, norms = [], []
    for step, batch in enumerate(make_batches(case.family, STEPS)):
        count = window_rows(case, step) // (data * micro)
        parts = [{k: v[(i * data + rank) * micro :][:micro].to(device) for k, v in batch.items()} for i in range(count)]
        joined = batch["labels"][: window_rows(case, step)]
        causal = case.family not in ("vit", "t5")
        items = int(((joined[:, 1:] if causal else joined) != -100).sum())
        window = torch.zeros((), device=device)
        for i, part in enumerate(parts):
            engine.set_gradient_accumulation_boundary(i == count - 1)
            total, _ = summed_loss(model, part)
            engine.backward(total * (data / items), scale_wrt_gas=False)
            engine.step()
            window += total.detach() / items
        collectives.all_reduce(engine.mesh.dp, window, op="sum").wait()
        losses.append(window.item())
        norms.append(engine.get_global_grad_norm())
    now = {n: (held_slice(p).whole, id(p)) for n, p in model.named_parameters()}
    assert shapes == now, "object, name or shape changed"
    if case.ep > 1:
        whole = full_state_dict(engine.sharded, keep=rank == 0)
        return {"losses": losses, "norms": norms, "weights": {n: whole[n] for n in shapes if n in whole}, "bits": {}}
    with hf_dist.gathered(model):
        now = {n: (tuple(p.shape), id(p)) for n, p in model.named_parameters()}
        assert shapes == now, "object, name or shape changed"
        bits = {n: int(checksum(p.detach())) for n, p in model.named_parameters()}
        weights = {n: p.detach().cpu().clone() for n, p in model.named_parameters()} if rank == 0 else {}
    return {"losses": losses, "norms": norms, "weights": weights, "bits": bits}


def run_cases(rank: int, world: int, cases: list[Case], device: str = "cpu") -> list[Any]:
    """Every case on this rank; a case that raises gives its traceback, so that the others still run."""
    return attempts(rank, world, (functools.partial(train_on_rank, rank, world, case, device) for case in cases))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))
