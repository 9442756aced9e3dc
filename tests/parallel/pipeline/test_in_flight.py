"""What a stage keeps for backward: as many microbatches as the schedule says, counted in live bytes; bytes on the wire."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from hf_dist.parallel.pipeline import make_schedule, simulate
from tests.harness import run_ranks

STAGES, MICROBATCHES, ROWS, LENGTH, WIDTH = 4, 8, 2, 6, 32
SCHEDULES = ("gpipe", "1f1b", "zb_h1")


class LiveBytes:
    """Bytes of the tensors that autograd keeps: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __enter__(self) -> LiveBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> Any:
        kept = _Kept(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(kept, self._forget, nbytes)
        return kept

    def _forget(self, nbytes: int) -> None:
        self.now -= nbytes


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def measure(rank: int, world: int) -> dict[str, tuple[int, int, int, int]]:
    """Schedule -> (kept at most, kept for one microbatch, kept after the step, bytes sent per step)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_dist

    shape = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    found = {}
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **shape))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICROBATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "pipeline": {"stages": STAGES, "schedule": schedule, "partition_method": "uniform"},
        }
        engine = hf_dist.initialize(model, config=config, example_batch={"input_ids": ids, "labels": ids})
        assert engine.pipeline is not None
        batch = {"input_ids": ids, "labels": ids}
        engine.train_batch(iter([batch] * MICROBATCHES))  # shapes are announced once
        before = engine.pipeline.transport.sent_nbytes
        with LiveBytes() as live:
            engine.train_batch(iter([batch] * MICROBATCHES))
        sent = engine.pipeline.transport.sent_nbytes - before
        engine.batch = type(engine.batch)(ROWS, ROWS, 1, 1)
        with LiveBytes() as one:
            engine.train_batch(iter([batch]))
        found[schedule] = (live.most, one.most, live.now, sent)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(measure, STAGES, timeout=300)


# Not zb_h1: torch counts what hooks packed as alive at nodes that ran with retain_graph, after their memory is gone.
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_keeps_what_its_schedule_promises(schedule: str, ranks: list[Any]) -> None:
    promised = simulate(make_schedule(schedule, STAGES, MICROBATCHES)).in_flight
    for stage in range(STAGES):
        most, one, after, _ = ranks[stage][schedule]
        assert after == 0
        if schedule == "1f1b":
            assert promised[stage] == min(MICROBATCHES, STAGES - stage)
        assert most == promised[stage] * one


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_between_stages_equal_the_formula(schedule: str, ranks: list[Any]) -> None:
    hidden = ROWS * LENGTH * WIDTH * 4
    for stage in range(STAGES):
        neighbours = (stage < STAGES - 1) + (stage > 0)  # forward to the next stage, backward to the one before
        assert ranks[stage][schedule][3] == MICROBATCHES * neighbours * hidden


def without_example(rank: int, world: int) -> list[str]:
    """What a model says that has none, and one whose example cannot be made. Only rank 0 makes them."""
    import hf_dist
    from hf_dist.engine import pipeline_runner

    def broken(model: Any) -> Any:
        raise OSError("no rows")

    said = []
    for example_of in (pipeline_runner.example_of, broken):
        with mock.patch("hf_dist.engine.build.example_of", example_of):
            try:
                hf_dist.initialize(torch.nn.Linear(2, 2), config={"pipeline": {"stages": world}})
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_example_that_rank_0_cannot_make_is_told_to_all() -> None:
    first, second = run_ranks(without_example, 2, timeout=60)
    assert first[0] == second[0]
    assert first[0].startswith("ModelError: Linear cannot be cut into pipeline stages without an example")
    assert (first[1], second[1]) == ("OSError: no rows", "ModelError: rank 0: OSError('no rows')")
