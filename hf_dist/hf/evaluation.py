"""Evaluation counts every sample of the set once and yields the loss of one process, on any number of ranks.

The loader fills the last batches with samples from the start of the set, so that every rank has equally many batches.
accelerate drops the predictions for repeated samples, but the mean loss of a partly filled batch still counts them. HF also
divides the loss of a batch by the tokens of all ranks' batches. Source: transformers 5.23 `Trainer.evaluation_loop`,
`Seq2SeqTrainer.evaluate`; accelerate 1.15 `BatchSamplerShard`, `GradientState`.

[Note: rows and samples]

A collator may make two rows of one sample (TRL's preferences: all chosen, then all rejected), or rows that cannot be assigned
to samples (images of several sizes). Repeated samples are removed only where every value of a batch has one entry per sample.
Other batches are computed unchanged and count the repeated samples in the loss, as stock HF does. Where samples are removed,
the batch of one rank is shorter than the others, so gathers would meet tensors of different lengths: `even_rows` pads them.

A stream tells nothing of its length, so nobody knows how many rows of its last batches are new. One data rank sees it by
their number; several count what they read (`CountedRows`), unless workers read for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from accelerate.utils.operations import find_batch_size, recursively_apply
from torch import nn

from hf_dist import collectives
from hf_dist.groups import MeshAxis

__all__ = [
    "CountedRows",
    "ShorterBatch",
    "count_rows",
    "each_batch_by_itself",
    "even_rows",
    "gathers_by_itself",
    "on_rows_of_the_set",
    "rows_of_a_rank",
]


@contextmanager
def each_batch_by_itself(args: Any) -> Iterator[None]:
    """Inside, a batch's loss is divided by its own number of tokens, not by the tokens of all ranks' batches."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


@contextmanager
def rows_of_a_rank(args: Any, accelerator: Any) -> Iterator[None]:
    """Inside, the evaluation batch size is that of one rank, as often as HF repeats its loss: with `split_batches` the
    argument is that of all ranks together."""
    before = args.per_device_eval_batch_size
    if accelerator.split_batches:
        args.per_device_eval_batch_size = before // accelerator.num_processes
    try:
        yield
    finally:
        args.per_device_eval_batch_size = before


class CountedRows:
    """A stream that several ranks read whole, and that counts its rows: [Note: rows and samples]."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.count = 0
        """Rows given since the start of the pass."""

    def __iter__(self) -> Iterator[Any]:
        self.count = 0
        for row in self.rows:
            self.count += 1
            yield row

    def __len__(self) -> int:
        return len(self.rows)  # a stream may have a length; of others this raises what their own `len` raises

    def __getattr__(self, name: str) -> Any:
        if name == "rows":  # not there yet in a copy that is being unpickled
            raise AttributeError(name)
        return getattr(self.rows, name)


def count_rows(loader: Any) -> None:
    """Let a prepared loader of a stream know how many rows were read. Local."""
    if isinstance(getattr(loader, "dataset", None), IterableDatasetShard):
        loader.dataset.dataset = CountedRows(loader.dataset.dataset)


class ShorterBatch:
    """Whether the ranks' batches may differ in length: true from the step of a filled batch until its loader ends."""

    def __init__(self) -> None:
        self._loader: Callable[[], Any] = lambda: None

    def begin(self, loader: Any) -> None:
        """Call it on every rank, whether or not its own batch is shorter."""
        self._loader = weakref.ref(loader)

    def is_here(self, state: Any) -> bool:
        """Equal on all ranks. `state`: accelerate's GradientState."""
        return state.active_dataloader is not None and self._loader() is state.active_dataloader


def even_rows(axis: MeshAxis, value: Any) -> Any:
    """Tensors, nested or not, padded by repeating the last row up to the longest rank's number of rows. Collective."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        missing = max(collectives.all_gather_object(axis, tensor.shape[0])) - tensor.shape[0]
        return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing else tensor

    return recursively_apply(one, value) if axis.size > 1 else value


def gathers_by_itself(loss: Any) -> bool:
    """Whether a Trainer's `loss` (sentence-transformers: a module, or one per dataset) compares rows of all ranks.

    Such a loss gathers with torch's own calls, which need equally many rows on all ranks.
    """
    losses = loss.values() if isinstance(loss, dict) else [loss]
    modules = [module for one in losses if isinstance(one, nn.Module) for module in one.modules()]
    return any(getattr(module, "gather_across_devices", False) is True for module in modules)


def on_rows_of_the_set(accelerator: Any, inputs: Any, step: Callable[[Any], Any]) -> Any:
    """`step(inputs)` on those samples of the batch that were not evaluated before: [Note: rows and samples].

    The results may have fewer rows than `inputs`. The accelerator's gathers pad them; `gather_for_metrics` drops the padding.
    A batch without any new sample is computed unchanged.
    """
    state = accelerator.gradient_state
    if state.end_of_dataloader and state.remainder < 0:
        state.active_dataloader.remainder = _last_rows(state.active_dataloader, accelerator.num_processes, inputs)
    if not state.end_of_dataloader or state.remainder <= 0:
        return step(inputs)
    accelerator.shorter_batch.begin(state.active_dataloader)
    count = _samples(state, accelerator.num_processes)
    fresh = min(max(state.remainder - accelerator.process_index * count, 0), count)
    if fresh in (0, count) or not _has_a_row_per_sample(inputs, count):
        result = step(inputs)
    else:
        result = step(type(inputs)({key: _first(value, fresh) for key, value in inputs.items()}))
    if not isinstance(state.active_dataloader, DataLoaderDispatcher):
        return result
    loss, *rest = result
    return (None if loss is None else _over_ranks(accelerator, loss, fresh), *rest)


def _over_ranks(accelerator: Any, loss: torch.Tensor, rows: int) -> torch.Tensor:
    """The mean loss over the `rows` of each data rank, on all of them. Collective.

    Where one process deals out the rows, each rank has fewer of the last ones than HF takes it to have: HF repeats the loss of
    the rank for a whole batch, and the first ranks' would be all that counts.
    """
    mine = loss.detach().float().mean() * rows if rows else torch.zeros((), device=loss.device)
    both = accelerator.reduce(torch.stack([mine, torch.full_like(mine, rows)]), "sum")
    return (both[0] / both[1]).to(loss.dtype)


def _last_rows(loader: Any, num_processes: int, inputs: Any) -> int:
    """New rows in the last batches of a stream, over all data ranks; -1 where they are unknown."""
    shard = getattr(loader, "dataset", None)
    if num_processes == 1:
        return find_batch_size(inputs) or -1
    if not isinstance(shard, IterableDatasetShard) or not getattr(shard.dataset, "count", 0):
        return -1
    whole = shard.batch_size * (1 if shard.split_batches else num_processes)
    return shard.dataset.count % whole or whole


def _samples(state: Any, num_processes: int) -> int:
    """Samples in this rank's last batch, including repeated ones; 0 where the loader does not tell."""
    shard = getattr(state.active_dataloader, "dataset", None)
    if isinstance(shard, IterableDatasetShard):
        return int(shard.batch_size) // (num_processes if shard.split_batches else 1)
    if isinstance(state.active_dataloader, DataLoaderDispatcher):  # one batch for all ranks, split evenly
        return -(-int(state.remainder) // num_processes)
    return int(getattr(state.active_dataloader, "total_batch_size", 0)) // num_processes


def _has_a_row_per_sample(inputs: Any, count: int) -> bool:
    """Whether all values of a batch have `count` entries, except settings (`return_loss=True`)."""
    if not isinstance(inputs, Mapping):
        return False
    rows = [value for value in inputs.values() if not _is_setting(value)]
    return bool(rows) and all(_num_rows(value) == count for value in rows)


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _num_rows(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else None
    return len(value) if isinstance(value, list) else None


def _first(value: Any, count: int) -> Any:
    return value if _is_setting(value) else value[:count]
