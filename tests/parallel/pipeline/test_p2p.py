"""The same runs over gloo, one process per pipeline rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from hf_dist.dist.excepthook import lost_peer
from hf_dist.dist.groups import GroupLease, GroupMaker
from hf_dist.parallel.pipeline import (
    Hooks,
    P2PTransport,
    ScheduleRun,
    StagedModel,
    add_communication,
    forward_only,
    make_channels,
    make_plan,
    make_schedule,
    partition,
    probe,
)
from hf_dist.parallel.pipeline.actions import Schedule
from hf_dist.parallel.pipeline.communication import Channel
from hf_dist.parallel.pipeline.p2p import ChannelEnds
from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parallel.pipeline.zoo import SEQ2SEQ, make_microbatches, make_model

CASES = [
    ("Llama", "1f1b", 1, 5), ("Llama", "zb_h1", 1, 4), ("Llama", "gpipe", 1, 1), ("Bert", "1f1b", 1, 4),
    ("T5", "1f1b", 1, 4), ("Mixtral", "1f1b", 1, 4),
]  # fmt: skip
INTERLEAVED = [("Llama", "interleaved_1f1b", 2, 5), ("T5", "interleaved_1f1b", 2, 3)]
BY_WORLD = {2: [*CASES, *INTERLEAVED], 3: CASES, 4: CASES}
if not FULL_GRID:  # three ranks: a stage between others, past which the encoder's states go
    BY_WORLD = {2: [*CASES[:3], CASES[5], INTERLEAVED[0]], 3: [CASES[1], CASES[4]]}


class Order(Hooks):
    """Which backwards were announced, and which of them as the last."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool]] = []

    def before_backward(self, stage: int, microbatch: int, is_last: bool) -> None:
        self.seen.append((stage, microbatch, is_last))


def connect(rank: int, world: int, *, ring: bool, seconds: int) -> dict[Channel, ChannelEnds]:
    """One pipeline of all ranks."""
    maker = GroupMaker(rank, "gloo", timedelta(seconds=seconds), GroupLease("none"), torch.device("cpu"))
    return make_channels([list(range(world))], ring=ring, rank=rank, group_of=maker.one_of)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def step(
    staged: StagedModel, schedule: Schedule, rank: int, transport: P2PTransport, batches: list[Any], fn: Any
) -> Any:
    order = Order()
    run = ScheduleRun(staged, add_communication(schedule), rank, transport, order)
    return run.run(batches, fn), order.seen


def worker(rank: int, world: int, cases: list[tuple[str, str, int, int]]) -> list[Any]:
    """Per case: losses of two steps, gradients after them, evaluation logits, bytes sent in each step, order seen."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    channels = connect(rank, world, ring=True, seconds=60)
    results = []
    for family, name, virtual, count in cases:
        model, batches = make_model(family), make_microbatches(family, count)
        found = probe(model, batches[0])
        plan = make_plan(found, partition(found.costs(), world * virtual, "uniform").bounds)
        schedule = make_schedule(name, world, count, virtual)
        staged = StagedModel(model, plan, schedule.stages_of(rank))
        transport = P2PTransport(channels, torch.device("cpu"))
        losses, sent = [], []
        for _ in range(2):
            before = transport.sent_nbytes
            values, seen = step(staged, schedule, rank, transport, batches, loss_of)
            losses += [None if v is None else v.item() for v in values]
            sent.append(transport.sent_nbytes - before)
        gradients = {n: p.grad for n, p in staged.model.named_parameters() if p.grad is not None}
        evaluation = forward_only(world, count, virtual)
        staged.model.eval()
        logits, _ = step(staged, evaluation, rank, transport, batches, lambda m, b: m(**b).logits)
        results.append((losses, gradients, logits, sent, seen))
    return results


def expected(family: str, count: int) -> tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor]]:
    model, batches = make_model(family), make_microbatches(family, count)
    losses = []
    for _ in range(2):
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        logits = [model.eval()(**batch).logits for batch in batches]
    return losses, gradients, logits


@pytest.mark.parametrize("world", BY_WORLD)
def test_processes_equal_the_plain_model(world: int) -> None:
    cases = BY_WORLD[world]
    by_rank = run_ranks(worker, world, (cases,))
    for index, (family, name, virtual, count) in enumerate(cases):
        losses, gradients, logits = expected(family, count)
        here = [rank[index] for rank in by_rank]
        assert here[-1][0] == pytest.approx(losses, rel=1e-6), (family, name)
        total: dict[str, torch.Tensor] = {}
        for _, own, *_ in here:
            for key, gradient in own.items():
                total[key] = total[key] + gradient if key in total else gradient
        for key, gradient in gradients.items():
            difference = (total[key] - gradient).abs().max().item()
            assert difference <= 2e-6 * gradient.abs().max().item() + 1e-12, (family, name, key)
        for got, wanted in zip(here[-1][2], logits, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
        parts = 2 if name == "zb_h1" else 1  # I and W
        for rank, (*_, sent, seen) in enumerate(here):
            # each (virtual) stage has every microbatch once in each part, and one last backward
            stages = range(rank, world * virtual, world)
            assert sorted(s[:2] for s in seen) == [(s, m) for s in stages for m in range(count) for _ in range(parts)]
            assert sorted(s[:2] for s in seen if s[2]) == [(s, count - 1) for s in stages]
            assert sent[1] <= sent[0], "shapes travel in the first step only"
        if family == "Llama" and virtual == 1:
            numel = sum(b["input_ids"].numel() for b in make_microbatches(family, count)) * 32
            assert [s[1] for *_, s, _ in here] == [4 * numel * ((r > 0) + (r < world - 1)) for r in range(world)]
        assert family in SEQ2SEQ or len(seen) == count * virtual * parts


def failing(rank: int, world: int) -> tuple[str, str]:
    """(what this rank logged, the error it ended with)"""
    import logging

    import torch.distributed as dist

    dist.init_process_group("gloo")
    channels = connect(rank, world, ring=False, seconds=20)
    model, batches = make_model("Llama"), make_microbatches("Llama", 3)
    found = probe(model, batches[0])
    staged = StagedModel(model, make_plan(found, (0, 2, 4)), (rank,))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_dist").addHandler(handler)

    def function(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if rank == 0 and batch is batches[2]:
            raise RuntimeError("no such sample")
        return loss_of(model, batch)

    try:
        step(staged, make_schedule("1f1b", 2, 3), rank, P2PTransport(channels, torch.device("cpu")), batches, function)
    except RuntimeError as error:
        if rank == 0:
            assert str(error) == "no such sample"
            dist.destroy_process_group()  # as the end of the process would
        return "\n".join(records), ("lost peer" if lost_peer(error) else str(error))
    return "", "no error"


def test_a_failing_microbatch_is_shown_in_the_grid_and_ends_the_others() -> None:
    (logged, _), (nothing, second) = run_ranks(failing, 2, timeout=60)
    assert "1f1b: rank 0 failed at 0F2 (stage 0, forward, microbatch 2)" in logged and ">>> 0F2 <<<" in logged
    assert second == "lost peer" and not nothing, "who ended first says where"
