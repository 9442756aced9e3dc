"""What a simulated rank runs whose rows are shared with others: exchanges and the kernels of CUDA that a ring calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from hf_dist.dist.mesh import MeshAxis
from hf_dist.parallel.sequence.forward import SequenceAxes, SequenceMask, SplitForward
from hf_dist.parallel.sequence.layout import SequenceLayout
from tests.covering import FULL_GRID
from tests.gpu_sim.nccl import Communicators
from tests.gpu_sim.rank import GPU, simulated_rank
from tests.gpu_sim.recorder import answered
from tests.gpu_sim.trace import Launched
from tests.gpu_sim.training import SMALL, STEADY, Report, Setting, model_of, report
from tests.parallel.sequence.families import make_model

WORLD, CHECKED = 4, 1
"""CHECKED: in how many forwards the ranks compare their rows."""
LAYERS, STEPS = (3, 3) if FULL_GRID else (2, 2)


@contextmanager
def exchanges(model: Communicators) -> Iterator[None]:
    """Inside, ranks exchange in all directions, and pass on while they are given: one kernel each."""

    def all_to_all(out: Any, given: Any, received: Any, sent: Any, group: Any = None, async_op: bool = False) -> Any:
        return model._started(model.issue("all_gather", group, [given], [out]), async_op)  # a cost there is

    def op(what: Any, tensor: Any, group: Any = None, group_peer: int = 0) -> Any:
        return SimpleNamespace(op=what, tensor=tensor, group=group)

    def batch(ops: list[Any]) -> list[Any]:
        sends, receives = ([o.tensor for o in ops if (o.op == model.isend) == is_sent] for is_sent in (True, False))
        return [model.issue("send", ops[0].group, sends, receives)]

    replaced = {"all_to_all_single": all_to_all, "P2POp": op, "batch_isend_irecv": batch}
    with mock.patch.multiple(dist, **replaced):
        yield


def batch_of(rows: str) -> tuple[dict[str, torch.Tensor], list[np.ndarray]]:
    """Arguments beside the ids of rows that are "plain", "packed" or "padded", and what the host then reads in a forward of
    rank 0 of a ring, by the real code on a CPU."""
    if rows == "plain":
        return {}, []
    from hf_dist.parallel.sequence import ring_plan
    from hf_dist.parallel.sequence.inputs import _filled
    from hf_dist.tensors import host_read

    read: list[np.ndarray] = []
    places = torch.arange(SMALL.seq).expand(SMALL.rows, -1)
    begin = SMALL.seq // 3
    documents = (places >= begin).long()
    mask = places < SMALL.seq - begin
    packed = rows == "packed"
    axis = MeshAxis("cp", WORLD, 0, None)
    layout = SequenceLayout(1, WORLD, "ring")
    axes = SequenceAxes(axis, MeshAxis("ulysses", 1, 0, None), axis, layout)
    facts = (None, places, documents) if packed else (mask, places, None)
    forward = SplitForward(axes, SMALL.seq, SMALL.seq, *facts)

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (documents[b, q] == documents[b, k] if packed else mask[b, k])

    with mock.patch.object(host_read, "on_host", lambda tensor: read.append(tensor.numpy()) or read[-1]):
        _filled(None if packed else mask)
        ring_plan.plan_of(SequenceMask(forward, rule, lambda **given: None), SMALL.rows)
    positions = torch.where(documents > 0, places - begin, places)
    return ({"position_ids": positions} if packed else {"attention_mask": mask.long()}), read


def train(rank: int, meet: str, exchange: Any, dtype: str, family: str, rows: str) -> tuple[Report, Counter[str]]:
    """Some steps of one of four ranks that share every row; what it launched in the last one, by name."""
    import hf_dist
    from hf_dist.dist import batch_consistency
    from hf_dist.parallel.sequence import outputs, ring_plan, verify

    ring_plan.TILE = 8  # the rows here are short
    more, reads = batch_of(rows)
    answers = itertools.cycle(reads)
    with (
        simulated_rank(WORLD, rank) as (recorder, model),
        recorder,
        exchanges(model),
        answered(lambda tensor: next(answers)),
    ):
        setting = Setting(stage=3, world=WORLD, checkpointing="blocks", dtype=dtype)
        config = setting.config()
        config["sequence_parallel_size"] = WORLD
        config["hf_dist"]["sequence_parallel"] = exchange
        # Tensors without elements are equal to nothing, and logits that nobody reads are no class of their own.
        outputs.WholeTensor.of = lambda part, shape, gather: part  # type: ignore[method-assign]
        batch_consistency._CHECKED = CHECKED
        with mock.patch.object(verify, "verify"):
            engine = hf_dist.initialize(_model(family, setting), config=config, device=GPU)
        recorder.trace.mark("built")
        ids = torch.zeros(SMALL.rows, SMALL.seq, dtype=torch.long, device=GPU)
        more = {name: torch.zeros(x.shape, dtype=x.dtype, device=GPU) for name, x in more.items()}
        for number in range(STEPS):
            if number == STEPS - 1:
                recorder.trace.mark(STEADY)
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False, **more).loss)
            engine.step()
        steady = recorder.trace.entries[recorder.trace.marks[STEADY] :]
        return report(recorder.trace), Counter(e.what for e in steady if isinstance(e, Launched))


def _model(family: str, setting: Setting) -> Any:
    if family == "llama":
        return model_of(setting, replace(SMALL, layers=LAYERS))
    with torch.device(GPU):
        model: Any = make_model(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
