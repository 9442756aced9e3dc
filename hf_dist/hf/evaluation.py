"""Evaluation counts every sample of the set once, and gives one process's loss, at any number of ranks.

The loader fills the last batches with samples from the start of the set, so that every rank has as many batches. accelerate
drops their predictions, but the mean loss of the batch that holds some of each still counts them; and HF divides the loss of
a batch by the tokens of all ranks' batches. Source: transformers 5.23 `Trainer.evaluation_loop`, `Seq2SeqTrainer.evaluate`;
accelerate 1.15 `BatchSamplerShard`, `GradientState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["each_batch_by_itself", "on_rows_of_the_set"]


@contextmanager
def each_batch_by_itself(args: Any) -> Iterator[None]:
    """Inside, a batch's loss is divided by its own number of tokens, not by that of all ranks' batches."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


def on_rows_of_the_set(accelerator: Any, inputs: Any, step: Callable[[Any], Any]) -> Any:
    """`step(inputs)` on the rows that are there for the first time; its results have as many rows as `inputs`. Local.

    The rows that it adds are dropped when the predictions are gathered. A batch without any new row, or with tensors that
    do not have one entry per row (images of several sizes), is computed as it is.
    """
    count = _num_rows(inputs)
    state = accelerator.gradient_state
    if count is None or not state.end_of_dataloader or state.remainder <= 0:
        return step(inputs)
    fresh = min(max(state.remainder - accelerator.process_index * count, 0), count)
    if fresh in (0, count):
        return step(inputs)

    def filled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != fresh:
            return value
        return torch.cat([value, value[-1:].expand(count - fresh, *value.shape[1:])])

    loss, *outputs = step({key: value[:fresh] for key, value in inputs.items()})
    return (loss, *tree_map(filled, outputs))


def _num_rows(inputs: Any) -> int | None:
    """Rows of a batch whose values all have one entry per row, else None."""
    if not isinstance(inputs, Mapping):
        return None
    counts = set()
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and value.dim():
            counts.add(value.shape[0])
        elif isinstance(value, list):
            counts.add(len(value))
        else:
            return None
    return counts.pop() if len(counts) == 1 else None
