"""Run on ranks: models whose parameters are slices of the stored ones, as tensor and expert parallelism hold them.

Any cut of any parameter, also those that no plan makes (`parallel/tensor/test_layouts.py` and
`parallel/experts/test_resume.py` have those an engine makes). Two ranks of the mesh's pipeline axis stand in for the two that
share a parameter: each cuts all of its parameters, and the engine's own layouts, loading and saving do the rest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .families import make_model

RULES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    (r"experts\.gate_up_proj", 0, ()),  # an interval of the experts
    (r"experts\.down_proj", 2, ()),
    (r"mlp\.gate_up_proj", 0, (24, 24)),  # fused: half of gate, half of up
    (r"qkv_proj", 0, (16, 8, 8)),
    (r"o_proj|down_proj", 1, ()),
    (r".*", 0, ()),
)
"""Pattern of the name, dimension, lengths of the segments along it (none: one)."""


def slice_for(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Any:
    """What `rank` of `ranks` keeps of a parameter; the first one a little more where it does not divide."""
    from hf_dist.tensors.tensor_slice import TensorSlice

    dim, segments = next((d, s) for pattern, d, s in RULES if re.search(pattern, name))
    ranges, begin = [], 0
    for length in segments or (shape[dim],):
        each = -(-length // ranks)
        ranges.append((begin + min(rank * each, length), begin + min((rank + 1) * each, length)))
        begin += length
    return TensorSlice.along(shape, dim, *ranges)


@dataclass
class Holder:
    """As much of an engine as checkpoints ask for."""

    sharded: Any
    fragments: Any
    model: Any
    outer: Any = None

    @property
    def mesh(self) -> Any:
        return self.sharded.mesh

    def plain_state(self) -> dict[str, Any]:
        return {"optimizer": {"type": "AdamW", "param_groups": [{}]}}

    def load_plain_state(self, state: dict[str, Any]) -> None:
        pass


def shard(model: nn.Module, stage: int, mesh: Any) -> Holder:
    """The model's weights in the engine's layouts, its lazy ones checked against their files as an engine does."""
    from hf_dist.optim.attach import FragmentedOptimizer
    from hf_dist.optim.optimizers import Optimizers
    from hf_dist.optim.stepping import Sight
    from hf_dist.sharding.consistency import agree_on_sources, check_load, check_same_model
    from hf_dist.sharding.placement import ZERO_STAGES
    from hf_dist.sharding.precision import Precision
    from hf_dist.sharding.runtime import ShardedModel

    check_same_model(model, mesh)
    sources = agree_on_sources(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = Precision(compute=next(model.parameters()).dtype)
    sharded = ShardedModel(model, placements=ZERO_STAGES[stage], mesh=mesh, precision=precision)
    check_load(model, sharded.groups, sources, mesh)
    return Holder(sharded, Optimizers([FragmentedOptimizer(sharded, optimizer, sight=Sight())]), model)


def load(family: str, folder: Path, dtype: torch.dtype, cut: Any = None) -> Any:
    """A lazy model from the folder (an ordinary one where HF cannot read it), each parameter cut by `cut(name, shape)`."""
    import hf_dist
    from hf_dist.sharding.lazy import lazy_sources
    from hf_dist.sharding.param_slice import keep_slice

    model: Any = make_model(family, dtype)
    if family != "shuffled":
        model = hf_dist.from_pretrained(type(model), folder, dtype=dtype)
        assert lazy_sources(model)
    for name, p in model.named_parameters() if cut else ():
        keep_slice(p, cut(name, tuple(p.shape)))
    return model


def wrong_weights(holder: Holder, stock: dict[str, torch.Tensor], scale: float = 1.0) -> list[str]:
    """Parameters of which this rank's masters are not the elements that the stock model has there."""
    wrong = []
    for group in holder.sharded.groups:
        for slot in group.layout.slots:
            start, stop = group.fragment(slot)
            first = group.resting[0] + start - slot.offset
            wanted = slot.held.take(stock[slot.name]).reshape(-1)[first : first + stop - start].to(group.source.dtype)
            if not torch.equal(group.source[start:stop], wanted * scale):
                wrong.append(slot.name)
    return wrong


def set_states(holder: Holder, seed: float) -> None:
    """Moments that follow from the weights, so that each element says where it belongs."""
    state = holder.fragments.optimizer.state
    for f in holder.fragments.fragments:
        values = f.group.source[f.start : f.stop].float()
        state[f.tensor] = {"step": torch.tensor(seed), "exp_avg": values * 2 + seed, "exp_avg_sq": values * values}


def wrong_states(holder: Holder, seed: float) -> list[str]:
    """Parameters whose moments are not those that `set_states` makes of their weights."""
    wrong = []
    for f in holder.fragments.fragments:
        values = f.group.source[f.start : f.stop].float()
        state = holder.fragments.optimizer.state.get(f.tensor, {})
        same = state and torch.equal(state["exp_avg"], values * 2 + seed) and state["step"] == seed
        if not same or not torch.equal(state["exp_avg_sq"], values * values):
            wrong.append(f.name)
    return wrong


def forget(holder: Holder) -> None:
    """Other weights and no states, so that a load that does nothing is seen."""
    for group in holder.sharded.groups:
        group.source.fill_(-7)
        group.masters_changed()
    holder.fragments.optimizer.state.clear()


def save(holder: Holder, whole: nn.Module, folder: Path, mode: str | None, dtype: torch.dtype) -> None:
    """Weights, their plan and the training state, as a checkpoint has them. Collective over world."""
    from hf_dist.checkpoint import dcp, training_state
    from hf_dist.checkpoint.folder import STATE
    from hf_dist.checkpoint.model_files import PLAN
    from hf_dist.checkpoint.weight_write import write_weights
    from hf_dist.dist import collectives
    from hf_dist.hf.naming import weight_plan_for

    axis = holder.mesh.world
    if axis.rank == 0:
        (folder / STATE).mkdir(parents=True)
    collectives.barrier(axis)
    # From the cut model itself: files have whole parameters whatever it holds.
    plan = weight_plan_for(holder.sharded.model, {n: dtype for n, _ in whole.named_parameters()})
    parts = list(training_state.owned_parts(holder.sharded, lambda _, value: value.detach()))
    write_weights(folder, plan, [part for _, part in parts], axis, mode)
    dcp.write_state(
        folder / STATE, training_state.saved_state(holder, parts, lambda _, value: value.detach().clone()), axis
    )
    if axis.rank == 0:
        training_state.write_common(folder / STATE, holder.plain_state())
        (folder / PLAN).write_text(json.dumps(plan.to_json()), encoding="utf-8")
    collectives.barrier(axis)


def round_trip(family: str, dtype: torch.dtype, stage: int, stock: Path, root: Path, meshes: Any) -> list[str]:
    """Problems: cut and uncut layouts load the stock folder, save, and read what the other has saved."""
    from hf_dist.checkpoint.folder import STATE
    from hf_dist.checkpoint.model_files import read_plan, read_weights
    from hf_dist.checkpoint.safetensors_source import bytes_read
    from hf_dist.checkpoint.training_state import load_state
    from hf_dist.dist import comm_counter

    whole: Any = make_model(family, dtype)
    wanted = {n: p.detach() for n, p in whole.named_parameters()}
    pair = meshes["cut"].pp
    cuts = {"whole": None, "cut": lambda name, shape: slice_for(name, shape, pair.rank, pair.size)}
    problems, holders, folders = [], {}, {}
    for kind, cut in cuts.items():
        before = bytes_read()
        holders[kind] = shard(load(family, stock, dtype, cut), stage, meshes[kind])
        read = bytes_read() - before
        if family != "shuffled" and cut and read > 0.7 * sum(f.stat().st_size for f in stock.glob("*.safetensors")):
            problems.append(f"{kind}: {read} bytes read")
        problems += [f"{kind}, loaded: {name}" for name in wrong_weights(holders[kind], wanted)]
        set_states(holders[kind], 3.0)
        for mode in ("in order", None):
            folders[kind] = root / f"{kind}-{mode}"
            with comm_counter.record() as log:
                save(holders[kind], whole, folders[kind], mode, dtype)
            if family != "shuffled" and log.count("transfer") >= meshes[kind].world.size:
                problems.append(f"{kind}, {mode}: a message for each run of bytes, not for each rank")
    for kind, folder in folders.items():
        for reader, holder in holders.items():
            forget(holder)
            load_state(holder, folder / STATE)
            problems += [f"{kind} resumed {reader}: {name}" for name in wrong_weights(holder, wanted)]
            problems += [f"{kind} resumed {reader}, state: {name}" for name in wrong_states(holder, 3.0)]
            forget(holder)
            plan = read_plan(folder)
            assert plan is not None
            if missing := read_weights(folder, plan, holder.sharded):
                problems.append(f"{kind} read by {reader}: {missing} missing")
            problems += [f"{kind} read by {reader}: {name}" for name in wrong_weights(holder, wanted)]
    return problems + [f"imported: {name}" for name in wrong_import(holders["cut"], wanted)]


def wrong_import(holder: Holder, stock: dict[str, torch.Tensor]) -> list[str]:
    """A stock state dict, mapped, filled into slices as an import of another program's checkpoint does."""
    from hf_dist.checkpoint.foreign_sources import MappedSource
    from hf_dist.checkpoint.training_state import fill_weights

    forget(holder)
    source = MappedSource({f"weights.{name}": p for name, p in stock.items()})
    fill_weights(holder.sharded.groups, source.stored, source.read)
    return wrong_weights(holder, stock)


def round_trips(rank: int, world: int, cases: list[tuple[str, str, int]], stocks: dict[tuple[str, str], Path]) -> Any:
    """Problems by case; the folders stay beside the stock ones."""
    from hf_dist.dist.axes import Axes
    from hf_dist.dist.mesh import build_mesh

    meshes = {"whole": build_mesh(device="cpu"), "cut": build_mesh(device="cpu", axes=partial(Axes.of, pp=2))}
    found = {}
    for family, dtype, stage in cases:
        stock = stocks[family, dtype]
        root = stock.parent / f"{family}-{dtype}-{stage}"
        found[family, dtype, stage] = round_trip(family, getattr(torch, dtype), stage, stock, root, meshes)
    return found
