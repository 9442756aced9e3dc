"""Bytes of mixed layouts: what rests on a rank, and what it sends along each axis, equal the plan."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from hf_dist.format_bytes import size_text
from tests import needs
from tests.covering import some_of
from tests.harness import run_ranks
from tests.parallel.tensor.on_ranks import LENGTH, ROWS, llama, mixture

WORLD, MICROBATCHES = 4, 2
CASES: dict[str, dict[str, Any]] = {
    "tp2-dp2-z3": {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}},
    "tp2-dp2-z1-recomputed": {
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
        "activation_checkpointing": {"every_n_layers": 1},
    },
    "tp4-plain-recomputed": {
        "tensor_parallel": {"autotp_size": 4},
        "activation_checkpointing": {"every_n_layers": 1},
        "hf_dist": {"sequence_regions": False},
    },
    "cp2-tp2-z2-recomputed": {
        "sequence_parallel_size": 2,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 2},
        "activation_checkpointing": {"every_n_layers": 1},
    },
    "cp2-ring-copies": {
        "sequence_parallel_size": 2,
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "hf_dist": {"sequence_parallel": "ring"},
    },
    "cp4-copies": {"sequence_parallel_size": 4, "zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    "cp4-copies-over": {
        "sequence_parallel_size": 4,
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "hf_dist": {"optimizer_over": "all"},
    },
    "ep2-copies-over": {
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 2, "mics_shard_size": 2},
        "hf_dist": {"optimizer_over": "all"},
    },
    "tp2-copies-over": {
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1, "mics_shard_size": 1},
        "hf_dist": {"optimizer_over": "all"},
    },
    "pp2-copies-over": {
        "pipeline": {"partition_method": "uniform", "stages": 2},
        "zero_optimization": {"stage": 3, "mics_shard_size": 1},
        "hf_dist": {"optimizer_over": "all"},
    },
    "tp2-ep2-z3": {
        "tensor_parallel": {"autotp_size": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"every_n_layers": 1},
    },
    "tp2-ep2-z1-plain": {
        "tensor_parallel": {"autotp_size": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 1},
        "hf_dist": {"sequence_regions": False},
    },
    "pp2-tp2-z1-recomputed": {
        "pipeline": {"partition_method": "uniform", "stages": 2},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
        "activation_checkpointing": {"every_n_layers": 1},
    },
    "pp2-tp2-z3-interleaved-early": {
        "pipeline": {"partition_method": "uniform", "stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
        "tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True},
        "zero_optimization": {"stage": 3},
    },
    "pp2-z3-every-microbatch": {
        "pipeline": {"partition_method": "uniform", "stages": 2, "reshard_per_microbatch": True},
        "zero_optimization": {"stage": 3},
    },
    "pp2-tp2-zero-bubble-early": {
        "pipeline": {"partition_method": "uniform", "stages": 2, "schedule": "zb_h1"},
        "tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True},
    },
    "pp2-tp2-plain": {
        "pipeline": {"partition_method": "uniform", "stages": 2},
        "tensor_parallel": {"autotp_size": 2},
        "hf_dist": {"sequence_regions": False},
    },
}
ALL: dict[str, Any] = {"weights": "int8", "gradients": "int4", "copies": "fp8_e4m3", "block": 64}
HOPS: dict[str, Any] = {"weights": "int8", "gradients": "int8", "machine": 2, "error_feedback": True, "block": 128}
ENCODED: dict[str, dict[str, Any]] = {
    "z0-hops-encoded": {"zero_optimization": {"stage": 0}, "hf_dist": {"wires": HOPS}},
    "z2-hops-encoded": {"zero_optimization": {"stage": 2}, "hf_dist": {"wires": HOPS}},
    "hpz-hops-encoded": {
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
        "hf_dist": {"wires": HOPS},
    },
    "hpz-whole-encoded": {
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
        "hf_dist": {"wires": {**ALL, "second_copy": "whole"}},
    },
    "copies-encoded": {
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "hf_dist": {"wires": {**ALL, "error_feedback": True}},
    },
    "copies-over-encoded": {
        "zero_optimization": {"stage": 1, "mics_shard_size": 2},
        "hf_dist": {"wires": {**ALL, "error_feedback": True}, "optimizer_over": "all"},
    },
    "ep2-copies-over-encoded": {
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 2, "mics_shard_size": 2},
        "hf_dist": {"optimizer_over": "all", "wires": ALL},
    },
    "tp2-ep2-z3-encoded": {
        "tensor_parallel": {"autotp_size": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 3},
        "hf_dist": {"wires": {**ALL, "error_feedback": True}},
    },
    "ep2-z3-hops-encoded": {
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 3},
        "hf_dist": {"wires": HOPS},
    },
    "cp2-hops-encoded": {
        "sequence_parallel_size": 2,
        "zero_optimization": {"stage": 3},
        "hf_dist": {"sequence_parallel": "ring", "wires": HOPS},
    },
    "cp4-copies-over-encoded": {
        "sequence_parallel_size": 4,
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "hf_dist": {"optimizer_over": "all", "wires": ALL},
    },
    "pp2-z3-every-microbatch-encoded": {
        "pipeline": {"partition_method": "uniform", "stages": 2, "reshard_per_microbatch": True},
        "zero_optimization": {"stage": 3},
        "hf_dist": {"wires": {**ALL, "error_feedback": True, "stages": "int8"}},
    },
    "z0-signs": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}},
    "z0-factors": {"hf_dist": {"wires": {"gradients": "powersgd", "powersgd": {"rank": 1, "start_step": 0}}}},
    "replicas-encoded": {
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "local_sgd": {"every": 1, "outer_lr": 0.7},
        "hf_dist": {"wires": {"meetings": "int8", "error_feedback": True, "block": 64}},
    },
}
"""Every kind of message in a codec, alone and beside the other axes."""
CASES = some_of(CASES, "cp2-ring-copies", "ep2-copies-over", "tp2-ep2-z3", "pp2-tp2-z3-interleaved-early")
"""By default every axis: copies, spread experts, and stages that split their sequences."""
CASES |= some_of(
    ENCODED,
    *("z0-hops-encoded", "hpz-hops-encoded", "copies-encoded", "copies-over-encoded", "tp2-ep2-z3-encoded"),
    *("pp2-z3-every-microbatch-encoded", "z0-signs", "z0-factors", "replicas-encoded"),
)
FP8: dict[str, Any] = {"fp8": {"enabled": True, "emulate": True}}
FLOAT8: dict[str, dict[str, Any]] = {
    "z3-fp8": {"zero_optimization": {"stage": 3}, "hf_dist": FP8},
    "hpz-fp8": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "hf_dist": FP8},
    "copies-over-fp8": {
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "hf_dist": {"optimizer_over": "all", **FP8},
    },
    "tp2-ep2-z3-fp8": {
        "tensor_parallel": {"autotp_size": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 3},
        "hf_dist": FP8,
    },
    "pp2-z3-every-microbatch-fp8": {
        "pipeline": {"partition_method": "uniform", "stages": 2, "reshard_per_microbatch": True},
        "zero_optimization": {"stage": 3},
        "hf_dist": FP8,
    },
}
"""Gathers that carry what products in float8 round to."""
CASES |= some_of(FLOAT8, "hpz-fp8", "pp2-z3-every-microbatch-fp8") if needs.has("torchao") else {}
SEQ = LENGTH + 1
OF_WEIGHTS = ("shard", "edp", "dp_replicate", "cp_replicate", "neighbours", "machine on shard", "machines on shard")
AXES = (*OF_WEIGHTS, "tp", "cp", "pp")


def config_of(case: str) -> dict[str, Any]:
    """Two microbatches, nothing in the background."""
    own = dict(CASES[case])
    regions = {"sequence_regions": True} if "tensor_parallel" in own else {}
    ours = {"stall_report_seconds": 0, "tiled_loss": "auto", **regions, **own.pop("hf_dist", {})}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **own,
        "hf_dist": ours,
    }


def model_of(case: str) -> Any:
    """With experts where they are spread; stages are equally long."""
    return mixture() if "ep2" in case else llama(num_hidden_layers=4) if is_staged(case) else llama()


def is_staged(case: str) -> bool:
    """Whether it has a pipeline."""
    return case.startswith("pp")


def measure(rank: int, world: int) -> dict[str, tuple[int, dict[str, dict[str, int]], str]]:
    """Case -> bytes at rest; bytes sent by axis and operation in a step; the start-up report."""
    import hf_dist
    from hf_dist.dist import comm_counter
    from hf_dist.engine.report import start_up_report

    found = {}
    ids = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 100 + 1
    for case in CASES:
        engine = hf_dist.initialize(model_of(case), config=config_of(case), device="cpu")
        sent: dict[str, dict[str, int]] = {}
        for _ in range(2):  # in the first one the ranks agree on orders
            before = 0 if engine.pipeline is None else engine.pipeline.transport.sent_nbytes
            with comm_counter.record() as log:
                if engine.pipeline is not None:
                    engine.train_batch(iter([{"input_ids": ids, "labels": ids, "use_cache": False}] * MICROBATCHES))
                    sent["pp"] = {"send": engine.pipeline.transport.sent_nbytes - before}
                    continue
                for _ in range(MICROBATCHES):
                    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                    engine.step()
        for entry in log.entries:
            if entry.axis == "pp":
                continue  # loss and norm; what stages send is counted by their transport
            own = sent.setdefault("tp" if entry.axis.endswith(" on tp") else entry.axis, {})
            own[entry.op] = own.get(entry.op, 0) + entry.nbytes
        # The plan is of the first shard: small tensors leave gaps of other sizes in the others.
        first = engine.mesh.shard.rank == engine.mesh.views["dp_replicate"].rank == 0
        at_rest = engine.resident_nbytes()["device"] if first else 0
        found[case] = (at_rest, sent, start_up_report(engine))
    return found


@functools.cache
def measured() -> list[Any]:
    return run_ranks(measure, WORLD)


@functools.cache
def planned(case: str) -> list[tuple[int, dict[str, dict[str, int]]]]:
    """The same of the plan, without a rank; stage by stage."""
    from hf_dist.config import axes_of, load_config, resolve_without_trainer
    from hf_dist.memory.offload.resting import Tier
    from hf_dist.planning.planner import Planner, Workload

    config = load_config(config_of(case))
    config = resolve_without_trainer(config, data_ranks=axes_of(config, WORLD).size("data"), hidden_size=32)
    with torch.device("meta"):
        model = model_of(case)
    planner = Planner(model, WORLD, Workload(ROWS, SEQ))
    found = []
    for stage in range(config.pipeline.stages):
        plan = planner.plan_rank(config, stage)
        traffic = planner.traffic(config, plan)
        sent = {axis: {op: nbytes for op, (_, nbytes) in own.items()} for axis, own in traffic.items()}
        found.append((plan.states.nbytes.resident(Tier.DEVICE), sent))
    return found


def added(parts: list[dict[str, int]]) -> dict[str, int]:
    """Bytes by operation of several stages."""
    return {op: sum(part.get(op, 0) for part in parts) for part in parts for op in part}


@pytest.mark.parametrize("case", CASES)
def test_bytes_at_rest_equal_the_plan(case: str) -> None:
    assert max(found[case][0] for found in measured()) == max(nbytes for nbytes, _ in planned(case))


@pytest.mark.parametrize("case", CASES)
def test_the_start_up_report_says_which_links_carry_the_bytes(case: str) -> None:
    for found in measured():
        _, sent, report = found[case]
        for axis in OF_WEIGHTS:  # and gradients alone
            line = re.search(rf"sent along {axis}, per rank and step: (.*) inside a machine", report)
            assert (line and line[1]) == (size_text(sum(sent[axis].values())) if axis in sent else None)
        crossed = [axis for axis in ("pp", "cp", "tp", "ep") if f"{axis}2" in case or f"{axis}4" in case]
        assert (f"and activations along {', '.join(crossed)}: " in report) == bool(crossed)
        forms = [line.split("encoded: ")[1] for line in report.splitlines() if "encoded: " in line]
        assert bool(forms) == (case in {**ENCODED, **FLOAT8})
        if "over-encoded" in case and "dp_replicate" in sent:  # copies along cp are sent as they are
            assert "gradients and weights along dp_replicate: fp8_e4m3 in blocks of 64" in forms
        if "hops" in case:
            assert any("in two hops: 2 ranks of a machine, then machines" in line for line in forms)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axis", AXES)
def test_bytes_sent_along_an_axis_equal_the_plan(case: str, axis: str) -> None:
    plans = [dict(sent.get(axis, {})) for _, sent in planned(case)]
    of_stage = []  # the plan is of the fullest rank: a vocabulary need not divide
    for stage in range(len(plans)):
        most: dict[str, int] = {}
        ranks = WORLD // len(plans)
        for found in measured()[stage * ranks :][:ranks]:
            by_axis = found[case][1]
            most |= {op: max(nbytes, most.get(op, 0)) for op, nbytes in by_axis.get(axis, {}).items()}
        of_stage.append(most)
    if axis == "pp":
        assert all(plan.pop("all_reduce") == 8 for plan in plans if len(plans) > 1)  # the norm
    if axis == "cp":
        assert of_stage[0].pop("all_reduce", 0) <= 64 * MICROBATCHES  # the loss itself
    assert added(of_stage) == added(plans)  # stages are planned with equal shares, and the last one has the loss
