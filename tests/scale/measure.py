"""What one rank of a large job does and holds, engine by engine, beside what the plan says."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

from hf_dist.sharding import consistency
from tests.scale.engines import LLAMA_3, Case, config_of, make_fsdp2, make_ours
from tests.scale.world import FakeRank, Traffic, fake_world, forget_launcher

_STEPS = 3
"""The first makes the optimizer's states and agrees on orders, the others are measured."""
PLAIN_LOSS = "hf_dist, HF's loss"
Counts = dict[str, tuple[int, int]]


def measure(
    engine: str, case: Case, size: int, config: dict[str, Any] | None = None, rank: int = 0, steps: int = _STEPS
) -> dict[str, Any]:
    """One rank of `size` under `engine` ("hf_dist", "fsdp2", "fsdp2 ends"), with `config` for the first; `PLAIN_LOSS` is
    the first with the loss as HF computes it. Keys:

    traffic: (number, bytes sent) of a step by kind · rest, peak: bytes of all tensors between steps and at most ·
    resident: of weights, masters and optimizer states · set_up, first, step: host CPU seconds, operators not counted.
    With hf_dist also counted (as `hf_dist.dist.comm_counter` counts), planned_traffic, planned_resident, planned_peak.
    """
    config = config or config_of(3)
    with fake_world(size, rank):
        start = time.thread_time()
        mesh = init_device_mesh("cpu", (size,)) if engine.startswith("fsdp2") else None
        made = time.thread_time() - start
        # A large job streams its weights and sums none of them; a sum walks through all of them in small parts.
        with FakeRank() as tensors, tensors.live, mock.patch.object(consistency, "checksum", lambda tensor: 0):
            model = case.llama()
            num_buffers = sum(b.numel() * b.element_size() for b in model.buffers())
            start, inside = time.thread_time(), tensors.operator_seconds
            if mesh is None:
                held, micro_step = make_ours(model, config)
            else:
                held, micro_step = make_fsdp2(model, mesh, ends=engine.endswith("ends"))
            set_up = made + time.thread_time() - start - (tensors.operator_seconds - inside)
            batch = case.batch()
            window = [batch] * config.get("gradient_accumulation_steps", 1)
            found, seconds = _run(tensors, micro_step, window, steps, mesh is None)
            more = num_buffers + sum(t.numel() * t.element_size() for t in (batch["input_ids"],))
            found |= {"set_up": set_up, "first": seconds[0], "step": min(seconds[1:])}
            found["resident"] = tensors.live.nbytes - more
            if mesh is None:
                found |= _beside_plan(held, case, size, config, rank)
    return found


def _run(
    tensors: FakeRank,
    micro_step: Callable[[dict[str, torch.Tensor]], None],
    window: list[dict[str, torch.Tensor]],
    steps: int,
    counts: bool,
) -> tuple[dict[str, Any], list[float]]:
    from hf_dist.dist import comm_counter

    live, seconds = tensors.live, []
    for _ in range(steps):
        tensors.traffic, live.peak = Traffic(), live.nbytes
        start, inside = time.thread_time(), tensors.operator_seconds
        with comm_counter.record() as log:
            for batch in window:
                micro_step(batch)
        seconds.append(time.thread_time() - start - (tensors.operator_seconds - inside))
    gc.collect()
    found: dict[str, Any] = {"traffic": tensors.traffic.by_kind, "rest": live.nbytes, "peak": live.peak}
    if counts:
        kinds = dict.fromkeys(e.op for e in log.entries)
        found["counted"] = {op: (log.count(op), log.nbytes(op)) for op in kinds}
    return found, seconds


def _beside_plan(engine: Any, case: Case, size: int, config: dict[str, Any], rank: int) -> dict[str, Any]:
    from hf_dist.config import load_config, resolve_without_trainer
    from hf_dist.dist.axes import RANKS_PER_MACHINE
    from hf_dist.engine.report import start_up_report
    from hf_dist.memory.offload.resting import Tier
    from hf_dist.planning.comm_volume import step_traffic
    from hf_dist.planning.planner import Planner, Workload
    from hf_dist.planning.state_bytes import States
    from hf_dist.sharding.group_axes import pieces_of

    resolved = resolve_without_trainer(load_config(config), data_ranks=size, hidden_size=case.width)
    shards = engine.mesh.shard.size
    with torch.device("meta"):
        meta = case.llama()
    pieces = pieces_of(engine.mesh.axes, engine.sharded.placements.copies)
    states = States.of_model(meta, resolved, num_shards=shards, rank=rank % shards, pieces=pieces)
    states = states.on_machines(engine.mesh.axes, RANKS_PER_MACHINE)
    plan = Planner(meta, size, Workload(case.rows, case.seq, case.checkpointing)).plan(resolved)
    accumulation = config.get("gradient_accumulation_steps", 1)
    return {
        "report": start_up_report(engine).splitlines(),
        "resident_said": engine.resident_nbytes()["device"],
        "planned_resident": states.nbytes.resident(Tier.DEVICE),
        "planned_peak": plan.device_peak,
        "planned_traffic": step_traffic(states, accumulation=accumulation, replicas=size // shards),
    }


def measure_case(rank: int, world: int, engine: str, model: str, size: int, stage: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    forget_launcher()
    more = {"hf_dist": {"stall_report_seconds": 0, "tiled_loss": False}} if engine == PLAIN_LOSS else {}
    return measure(engine, LLAMA_3[model], size, config_of(stage, **more))
