"""The start-up report: layout, units, dtypes and memory of the run, and the source of each config value."""

from __future__ import annotations

import textwrap
from collections import Counter

import torch

from hf_dist.config import BatchSizes, DistConfig, format_table
from hf_dist.config.report import brief_lines
from hf_dist.config.roles import jobs_of
from hf_dist.config.training_sections import LocalSgdConfig
from hf_dist.dist import roles
from hf_dist.dist.network import describe
from hf_dist.engine.engine import Engine
from hf_dist.float8.choice import Choice
from hf_dist.format_bytes import scaled, size_text
from hf_dist.memory.activation import describe_checkpointing
from hf_dist.memory.offload.storage import MASTER_NBYTES
from hf_dist.optim.resume_hyperparams import kind_of
from hf_dist.parallel.experts.spread import exchanges
from hf_dist.parallel.local_sgd.outer import has_anchor
from hf_dist.parallel.tensor_on_shards import TensorSplit
from hf_dist.planning.comm_volume import state_traffic
from hf_dist.planning.draw_mesh import mesh_lines
from hf_dist.planning.forms import form_lines
from hf_dist.planning.optimizer_states import OptimizerStates
from hf_dist.planning.overhead import measured
from hf_dist.planning.state_bytes import States
from hf_dist.planning.temporary import Temporary
from hf_dist.sharding.placement import Placement
from hf_dist.sharding.precision import is_emulated
from hf_dist.sharding.runtime import ShardedModel

_COLUMNS = 80
MAX_UNIT_KINDS = 6
"""Number of unit kinds listed, largest first; further kinds are only counted, so that the report fits a screen."""
_RESTS = {
    Placement.SHARD: "sharded",
    Placement.REPLICATE: "replicated",
    Placement.PARTIAL: "replicated (reduced once per step)",
}


def report_of(engine: Engine, tensors: TensorSplit | None = None, eights: Choice | None = None) -> str:
    """The report that `dump_state` asks for, as plain text. Local; rank 0 prints it once."""
    make = start_up_report if engine.config.dump_state else brief_report
    return make(engine, tensors, eights)


def brief_report(engine: Engine, tensors: TensorSplit | None = None, eights: Choice | None = None) -> str:
    """What a plain job is, in ten lines of 80 columns; parts that not every job has get their lines, too."""
    sharded, config, pipeline, split = engine.sharded, engine.config, engine.pipeline, engine.split_sequence
    optimizer = OptimizerStates.of_attached(engine.fragments, config)
    states = States.of_engine(sharded, config, optimizer)
    parts = {
        "roles": roles.described(jobs_of(config.hf_dist.roles)),
        "layout": [
            sharded.mesh.describe(),
            _resting(sharded),
            *_second_copy(sharded),
            *_pieces(sharded, config),
            *_experts(sharded),
            *_replicas(sharded, config),
            *_forms(sharded, states),
        ],
        "network": _network(sharded),
        "pipeline": pipeline.describe() if pipeline else [],
        "sequence": [split.describe()] if split else [],
        "tensor": tensors.describe() if tensors else [],
        "float8": eights.rows() if eights else [],
        "batch": [_batch(engine.batch)],
        "precision": _brief_precision(sharded),
        "memory": _brief_memory(engine, states, optimizer),
        "recompute": describe_checkpointing(sharded.model),
        "config": brief_lines(config),
    }
    return _printed('hf_dist start-up report (whole with "dump_state": true)', parts, _COLUMNS)


def start_up_report(engine: Engine, tensors: TensorSplit | None = None, eights: Choice | None = None) -> str:
    """The whole report as plain text. Local."""
    sharded, config, pipeline, split = engine.sharded, engine.config, engine.pipeline, engine.split_sequence
    optimizer = OptimizerStates.of_attached(engine.fragments, config)
    states = States.of_engine(sharded, config, optimizer)
    parts = {
        "roles": roles.described(jobs_of(config.hf_dist.roles)),
        "layout": [
            sharded.mesh.describe(),
            _resting(sharded),
            *_mesh(sharded, states),
            *_second_copy(sharded),
            *_pieces(sharded, config),
            *_experts(sharded),
            *_replicas(sharded, config),
            *_forms(sharded, states),
        ],
        **({"network": network} if (network := _network(sharded)) else {}),
        **({"pipeline": pipeline.describe()} if pipeline else {}),
        **({"sequence": [split.describe()]} if split else {}),
        **({"tensor": tensors.describe()} if tensors else {}),
        **({"float8": eights.rows()} if eights else {}),
        "batch": [_batch(engine.batch)],
        "precision": _precision(sharded),
        "units": _units(sharded),
        "memory": _memory(engine, states, optimizer),
        "recompute": describe_checkpointing(sharded.model),
        "config": format_table(config).splitlines(),
    }
    return _printed("hf_dist start-up report", parts)


def _printed(title: str, parts: dict[str, list[str]], columns: int = 0) -> str:
    lines = [title]
    for name, rows in parts.items():
        if columns:
            rows = [line for row in rows for line in textwrap.wrap(row, columns - 13, break_on_hyphens=False)]
        lines += [f"  {name if i == 0 else '':<9}  {row}" for i, row in enumerate(rows)]
    return "\n".join(lines)


def _resting(sharded: ShardedModel) -> str:
    place = sharded.placements
    weights, grads, optim = (_RESTS[p] for p in (place.params, place.grads, place.optim))
    if weights == grads == optim:
        return f"weights, gradients and optimizer state {weights}"
    return f"weights {weights}, gradients {grads}, optimizer state {optim}"


def _mesh(sharded: ShardedModel, states: States) -> list[str]:
    """Which ranks hold which part, and the bytes of weights and gradients that a rank sends; empty for one rank."""
    mesh = sharded.mesh
    if mesh.axes.world == 1:
        return []
    numbers = {host: number for number, host in enumerate(dict.fromkeys(mesh.hosts))}
    traffic = state_traffic(states, mesh.axes)
    traffic.pop("dp", None)  # a few numbers: losses and norms
    axes = states.in_blocks(mesh.axes)
    lines = mesh_lines(axes, [numbers[host] for host in mesh.hosts] or [0] * mesh.axes.world, traffic)
    activations = [axis for axis in ("pp", "cp", "tp", "ep") if mesh.axes.size(axis) > 1]
    if activations:
        lines.append(
            f"and activations along {', '.join(activations)}: `hf-dist mesh --model ... --seq ...` counts them"
        )
    return lines


def _forms(sharded: ShardedModel, states: States) -> list[str]:
    """Which messages are encoded."""
    return [f"encoded: {line}" for line in form_lines(states, sharded.mesh.axes)]


def _network(sharded: ShardedModel) -> list[str]:
    """Machines and GPUs, traffic between them, and GPU memory in use outside of tensors."""
    mesh, precision = sharded.mesh, sharded.precision
    lines = describe(mesh)
    if len(set(mesh.hosts)) > 1 and precision.reduce == torch.float32 != precision.compute:
        lines.append(
            'gradients travel in float32; "communication_data_type": "bf16" halves what crosses between machines'
        )
    beside = measured(mesh.device)
    if beside is not None:
        lines.append(
            f"{size_text(beside)} of the GPU are used outside of tensors (context, communicators, other programs)"
        )
    return lines


def _second_copy(sharded: ShardedModel) -> list[str]:
    """The ranks that share a second copy of the weights, and its size."""
    nbytes = sum(g.rest.second.nbytes for g in sharded.groups if g.rest.second is not None)
    if not nbytes:
        return []
    size = sharded.placements.second
    return [
        f"second copy of the weights among {size} neighbours: {size_text(nbytes)} per rank; all gathers except the first use it"
    ]


def _pieces(sharded: ShardedModel, config: DistConfig) -> list[str]:
    """Whether the optimizer is sharded over copies of the shards, too."""
    if config.hf_dist.optimizer_over != "all":
        return []
    pieces = max((group.layout.pieces for group in sharded.trainable_groups), default=1)
    if pieces == 1:
        return ["one copy of the shards, so hf_dist.optimizer_over changes nothing"]
    return [
        f"masters and optimizer state of a shard are cut among its {pieces} copies, which exchange pieces once in a step"
    ]


def _replicas(sharded: ShardedModel, config: DistConfig) -> list[str]:
    """Replicas that train alone: when they synchronise, and the bytes that this sends."""
    section, axis = config.local_sgd, sharded.mesh.replicas
    if section.is_served:
        return _served(sharded, section)
    if axis is None:
        return ["one replica, so no meetings of replicas"] if section.enabled else []
    numel = sum(g.resting[1] - g.resting[0] for g in sharded.trainable_groups)
    nbytes = 2 * (axis.size - 1) * MASTER_NBYTES * numel // axis.size
    kind = "Nesterov momentum" if section.nesterov else "momentum"
    momentum = f", {kind} {section.outer_momentum:g}" if section.outer_momentum else ""
    outer = (
        f"outer rate {section.outer_lr:g}{momentum}"
        if has_anchor(section, encoded=False)
        else "the mean of their weights"
    )
    alone = f"{axis.size} replicas train alone and meet every {section.every} steps"
    sent = f"{size_text(nbytes)} per rank and meeting, {size_text(nbytes // section.every)} per step"
    if section.streams:
        return [
            f"{alone}, in {section.fragments} fragments in turn ({outer}): {sent}; a mean is taken up {section.overlap} steps "
            f"after it was sent, and {section.mix:g} of a replica's own weights stay"
        ]
    return [f"{alone} ({outer}): {sent}; between meetings they send each other nothing"]


def _served(sharded: ShardedModel, section: LocalSgdConfig) -> list[str]:
    """A replica that meets a server: when, and the bytes that this sends."""
    groups = [group for group in sharded.trainable_groups if group.axes.owns]
    nbytes = MASTER_NBYTES * sum(group.owned[1] - group.owned[0] for group in groups)
    momentum = f", delayed Nesterov momentum {section.outer_momentum:g}" if section.outer_momentum else ""
    when = f"after at most {section.every} steps" if section.dynamic_steps else f"every {section.every} steps"
    return [
        f"a replica that meets a server {when} (outer rate {section.outer_lr:g}{momentum}): at most {size_text(nbytes)} per "
        f"rank there, and as much back"
    ]


def _experts(sharded: ShardedModel) -> list[str]:
    """Experts spread over ranks."""
    spread = exchanges(sharded.model)
    if not spread:
        return []
    size, counts = sharded.mesh.axes.size("ep"), sorted({exchange.num_local for exchange in spread.values()})
    kind = type(sharded.model.get_submodule(next(iter(spread)))).__name__
    held = sum(slot.numel for g in sharded.groups if g.axes.parts is not None for slot in g.layout.slots)
    here, whole = " or ".join(map(str, counts)), " or ".join(str(count * size) for count in counts)
    return [
        f"{here} of {whole} experts of {len(spread)} layers ({kind}) on each of {size} ranks, {scaled(held)} elements: tokens "
        "travel to them, dropless"
    ]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(what) for what, _ in rows)
    return [f"{what:<{width}}  {value}" for what, value in rows]


def _precision(sharded: ShardedModel) -> list[str]:
    rows = _aligned(sharded.precision.rows())
    compute = sharded.precision.compute
    if is_emulated(compute, sharded.mesh.device):
        short = "bf16" if compute == torch.bfloat16 else "fp16"
        rows.append(f"this CPU has no {short} instructions: training in float32 is many times faster")
    return rows


def _brief_precision(sharded: ShardedModel) -> list[str]:
    """The dtypes in one line, with what they hold; the warning of a slow one after it."""
    rows = sharded.precision.rows()
    held: dict[str, list[str]] = {}
    for what, dtype in rows:
        held.setdefault(dtype, []).append(what)
    slow = _precision(sharded)[len(rows) :]
    if len(held) == 1:
        return [next(iter(held)), *slow]
    return ["; ".join(f"{dtype}: {', '.join(what)}" for dtype, what in held.items()), *slow]


def _batch(batch: BatchSizes) -> str:
    ranks = f"{batch.data_ranks} data rank{'s' if batch.data_ranks > 1 else ''}"
    if batch.micro is None:
        return f"{batch.accumulation} microbatches per step on {ranks}, microbatch size of the loader"
    micro = f"{batch.micro} per rank and microbatch"
    if batch.accumulation == 1:
        return f"{batch.train} samples per step = {micro} x {ranks}"
    return f"{batch.train} samples per step = {micro} x {batch.accumulation} microbatches x {ranks}"


def _units(sharded: ShardedModel) -> list[str]:
    """Kinds of units, those with most elements first."""
    kinds = Counter(
        (type(u.modules[0]).__name__ if u.name else "rest of the model", u.numel) for u in sharded.units if u.numel
    )
    order = sorted(kinds.items(), key=lambda item: -item[0][1] * item[1])
    rows = [
        (f"{count} x {kind}" if count > 1 else kind, f"{scaled(numel)} elements{' each' if count > 1 else ''}")
        for (kind, numel), count in order
    ]
    more = [f"and {len(rows) - MAX_UNIT_KINDS} more kinds"] if len(rows) > MAX_UNIT_KINDS else []
    return (_aligned(rows[:MAX_UNIT_KINDS]) if rows else ["none"]) + more


def _memory(engine: Engine, states: States, optimizer: OptimizerStates) -> list[str]:
    """Bytes of model states per rank, counted as in `hf-dist plan`."""
    sharded, config = engine.sharded, engine.config
    assumed = config.optimizer is None and engine.optimizer is None  # as in an evaluation before training
    if_used = "AdamW's, if that is used"
    rows = [
        (what, f"{size_text(nbytes)}  {if_used if assumed and what.startswith('optimizer') else kind}")
        for what, nbytes, kind in (*states.rows(), *Temporary(states).rows())
    ]
    return [*_parameters(sharded), *(_aligned(rows) if rows else []), *_unknown_memory(engine, optimizer)]


def _brief_memory(engine: Engine, states: States, optimizer: OptimizerStates) -> list[str]:
    rows = [f"{what} {size_text(nbytes)}" for what, nbytes, _ in (*states.rows(), *Temporary(states).rows())]
    return [*_parameters(engine.sharded), *([", ".join(rows)] if rows else []), *_unknown_memory(engine, optimizer)]


def _parameters(sharded: ShardedModel) -> list[str]:
    total = sum(g.layout.num_params for g in sharded.groups)
    learning = sum(g.layout.num_params for g in sharded.trainable_groups)
    here = " in this rank's part of the model" if sharded.mesh.model.size > 1 else ""
    return [f"{scaled(total)} parameters{here}, {scaled(learning)} of them trained; per rank:"]


def _unknown_memory(engine: Engine, optimizer: OptimizerStates) -> list[str]:
    return [
        *([] if optimizer.known else [f"optimizer state: not counted, of {kind_of(engine.optimizer)}"]),
        *(
            ["hf_dist.memory_budget: units that stay gathered are chosen at the first batch"]
            if engine.memory_budget is not None and engine.memory_budget.is_pending
            else []
        ),
    ]
