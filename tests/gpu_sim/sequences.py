"""What a simulated rank runs whose rows are shared with others: exchanges and the kernels of CUDA that a ring calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.covering import FULL_GRID
from tests.gpu_sim.nccl import Communicators
from tests.gpu_sim.rank import GPU, simulated_rank
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


def train(rank: int, meet: str, exchange: Any, dtype: str, family: str) -> tuple[Report, Counter[str]]:
    """Some steps of one of four ranks that share every row; what it launched in the last one, by name."""
    import hf_dist
    from hf_dist.dist import batch_consistency
    from hf_dist.parallel.sequence import outputs, verify

    with simulated_rank(WORLD, rank) as (recorder, model), recorder, exchanges(model):
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
        for number in range(STEPS):
            if number == STEPS - 1:
                recorder.trace.mark(STEADY)
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
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
