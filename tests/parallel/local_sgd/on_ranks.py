"""The same work on ranks, with the engine: any layout of a replica."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hf_dist.memory.offload.resting import Tier
from hf_dist.planning.comm_volume import state_traffic
from hf_dist.planning.optimizer_states import OptimizerStates
from hf_dist.planning.state_bytes import States
from tests.attempts import attempts
from tests.parallel.local_sgd.emulation import CLIP, Work, count_items, inner_for, model_for, rows_of
from tests.parity.families import ROWS, make_batches, summed_loss


@dataclass(frozen=True)
class Layout:
    """How each replica is laid out."""

    stage: int = 0
    shard: int = 1
    """Ranks of a replica."""
    offload: str = "none"
    clip: bool = True
    pp: int = 1
    """Pipeline stages of a replica, each on `shard` ranks."""
    cp: int = 1
    """Ranks of a replica that share rows."""
    copies: int = 1
    """Of the states, inside of a sequence of `shard` ranks."""

    def __str__(self) -> str:
        flags = [self.offload] if self.offload != "none" else []
        flags += [f"{name}{getattr(self, name)}" for name in ("pp", "cp", "copies") if getattr(self, name) > 1]
        return "-".join([f"z{self.stage}", f"s{self.shard}", *flags])


def config_for(work: Work, layout: Layout, data: int) -> dict[str, Any]:
    """The JSON."""
    zero: dict[str, Any] = {"stage": layout.stage, "mics_shard_size": layout.shard // layout.copies}
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": layout.offload}
    return {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS * layout.cp // data,
        "gradient_clipping": CLIP if layout.clip else 0.0,
        "zero_optimization": zero,
        "local_sgd": work.section,
        "pipeline": {"stages": layout.pp},
        "sequence_parallel_size": layout.cp,
    }


def train(
    rank: int,
    world: int,
    work: Work,
    layout: Layout,
    *,
    steps: tuple[int, int] = (1, 0),
    load: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Losses and norms of this rank's replica, bytes by operation and axis of each step, weights at the end.

    `steps`: the first and the last (0: of the work); `load`, `save`: checkpoints before and after.
    """
    import hf_dist
    from hf_dist.dist import comm_counter, mesh

    model = model_for(work)
    engine = hf_dist.initialize(
        model, config=config_for(work, layout, world // layout.pp), optimizer=inner_for(work, model), device="cpu"
    )
    if load is not None:
        engine.load_checkpoint(load)
    data = world // layout.pp
    replica, at = divmod(rank % data, layout.shard)
    readers = layout.shard // layout.cp
    first, last = steps[0], steps[1] or work.steps
    losses, norms, sent, foreign = [], [], [], []
    for step, batch in enumerate(make_batches(work.family, last), 1):
        if step < first:
            continue
        of_replica = rows_of(batch, replica, data // layout.shard)
        items = count_items(of_replica)
        before = mesh.sequence_number()

        def one(model: Any, rows: Any, items: int = items) -> Any:
            total, _ = summed_loss(model, rows)
            return engine.backward(total * (readers / items), scale_wrt_gas=False)

        with comm_counter.record() as log:
            loss = engine.run_window([rows_of(of_replica, at // layout.cp, readers)], one)
            engine.step()
        if step == work.steps:
            engine.synchronize_replicas()
        foreign.append(mesh.sequence_number() - before)
        found: dict[tuple[str, str], int] = {}
        for entry in log.entries:
            found[entry.op, entry.axis] = found.get((entry.op, entry.axis), 0) + entry.nbytes
        sent.append(found)
        losses.append(float(loss.detach()) / layout.shard)
        norms.append(engine.get_global_grad_norm())
    if save is not None:
        engine.save_checkpoint(save)
    with hf_dist.gathered(model):
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {
        "losses": losses,
        "norms": norms,
        "sent": sent,
        "foreign": foreign,
        "weights": weights,
        "held": held(engine),
        "planned": state_traffic(
            States.of_engine(engine.sharded, engine.config, OptimizerStates.of_config(engine.config)), engine.mesh.axes
        ).get("dp_replicate", {}),
        "fragments": fragments_of(engine, work),
        "numel": sum(g.resting[1] - g.resting[0] for g in engine.sharded.trainable_groups),
    }


def fragments_of(engine: Any, work: Work) -> list[tuple[list[str], int]]:
    """(names of parameters, elements on this rank) of each fragment: every P-th unit."""
    found: list[tuple[list[str], int]] = [([], 0) for _ in range(work.fragments)]
    for index, unit in enumerate(engine.sharded.units):
        for group in unit.groups:
            if group.trainable:
                names, numel = found[index % work.fragments]
                names.extend(slot.name for slot in group.layout.slots)
                found[index % work.fragments] = names, numel + group.resting[1] - group.resting[0]
    return found


def parts_of(ranks: list[dict[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """The parameters of each fragment, on whatever stage they are."""
    every = [[names for names, _ in rank["fragments"]] for rank in ranks]
    return tuple(tuple(sorted({n for names in of for n in names})) for of in zip(*every, strict=True))


def held(engine: Any) -> list[tuple[int, int]]:
    """(bytes at rest of weights, masters and states, the plan's) of device and host."""
    states = States.of_engine(engine.sharded, engine.config, OptimizerStates.of(engine.optimizer))
    found = engine.resident_nbytes()
    return [(found[tier.value], states.nbytes.resident(tier)) for tier in (Tier.DEVICE, Tier.HOST)]


def run_parts(rank: int, world: int, parts: list[tuple[Work, Layout, dict[str, Any]]]) -> list[Any]:
    """`train` with these arguments, of every part."""
    return attempts(
        rank, world, (functools.partial(train, rank, world, work, layout, **how) for work, layout, how in parts)
    )


def run_cases(rank: int, world: int, cases: list[tuple[Work, Layout]]) -> list[Any]:
    """Every case on this rank; a case that raises gives its traceback."""
    return run_parts(rank, world, [(work, layout, {}) for work, layout in cases])
