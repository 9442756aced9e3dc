"""Which HF classes train with their sequences split over two ranks as in one process: causal, masked and classifying classes.

    python -m tests.sweep sequence [--only PATTERN] [--seconds N] [--results FILE] [--write]

See `sharding.py`, whose ranks it uses; here both read the same rows, of a length that does not divide. What is off in fp32 is
compared once more with every number in fp64 (`in_double`), where rounding is a billion times smaller and a fault is as large.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.sharding.loop import adamw
from tests.sweep.sharding import STEPS, Outcome, Record, compare, fresh, loss_of, run

TABLE = Path(__file__).parent / "SEQUENCE.md"
SETTING = (
    "sequences of 10 and 12 tokens (some padded) split over two ranks at stage 3. Equal: losses, gradient norms and every "
    "weight after two steps of AdamW within 1e-5 of one process's, relative (the number is the worst). Rounding: not so in "
    "fp32, but within 1e-10 where the model, casts inside of it and the optimizer are in fp64. Refused: an error that names "
    "the reason, before training."
)
SMALL = 1e-10
"""Relative difference in fp64."""


def main(arguments: list[str]) -> None:
    """Run the sweep and print the table."""
    layout = {"sequence_parallel_size": 2}
    run(arguments, "sequence", TABLE, SETTING, layout, ("causal", "masked", "classification"), in_double)


class AllDouble(TorchFunctionMode):
    """Inside, what a model casts to fp32 stays in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func` with fp64 wherever fp32 is asked for."""
        args, kwargs = tree_map(lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {}))
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def in_double(build: Callable[[], nn.Module], batches: list[Any], mesh: Any) -> Outcome:
    """The split model against the whole one, both on this rank and in fp64, without an engine (whose masters are fp32)."""
    from hf_dist.parallel.sequence.split import split_sequence
    from hf_dist.parallel.sequence.verify import verify

    torch.set_default_dtype(torch.float64)
    try:
        with AllDouble():
            expected = _train(fresh(build).double(), batches, None)
            model = fresh(build).double()
            split = split_sequence(model, mesh, "auto")
            assert split is not None
            verify(split, model, lambda batch, function: function(model, batch))
            return compare(_train(model, batches, mesh.cp), expected, SMALL)
    finally:
        torch.set_default_dtype(torch.float32)


def _train(model: Any, batches: list[Any], axis: Any) -> Record:
    from hf_dist.dist import collectives

    optimizer = adamw(model)
    record: Record = {"losses": [], "norms": []}
    for step in range(STEPS):
        loss = loss_of(model, batches, 0, step)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for grad in grads if axis is not None else ():
            total = grad.contiguous()
            collectives.all_reduce(axis, total.view(-1), op="mean").wait()
            grad.copy_(total)
        record["losses"].append(loss.item())
        record["norms"].append(float(nn.utils.get_total_norm(grads)))
        optimizer.step()
        optimizer.zero_grad()
    return record | {"weights": {n: p.detach().clone() for n, p in model.named_parameters()}}
