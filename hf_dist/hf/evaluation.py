"""Evaluation counts every sample of the set once and yields the loss of one process, on any number of ranks.

The loader fills the last batches with samples from the start of the set, so that every rank has equally many batches.
accelerate drops the predictions for repeated samples, but the mean loss of a partly filled batch still counts them. HF also
divides the loss of a batch by the tokens of all ranks' batches. Source: transformers 5.23 `Trainer.evaluation_loop`,
`Seq2SeqTrainer.evaluate`; accelerate 1.15 `BatchSamplerShard`, `GradientState`.

[Note: rows and samples]

A loader that `data.py` knows leaves repeated samples out before they are collated. Of other loaders they are taken out of the
batch, where every value of a batch has one entry per sample: a collator may make two rows of one sample (TRL's preferences: all
chosen, then all rejected), or rows that cannot be assigned to samples (images of several sizes).
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
from accelerate.utils.operations import find_batch_size
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.groups import MeshAxis
from hf_dist.hf.data import seekable_of

_PADDING = -100
"""HF pads inputs of different lengths with it, as it pads labels."""

__all__ = [
    "CountedRows",
    "ShorterBatch",
    "compares_rows",
    "count_rows",
    "each_batch_by_itself",
    "even_rows",
    "gathers_by_itself",
    "inputs_of_all_ranks",
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


@contextmanager
def inputs_of_all_ranks(trainer: Any) -> Iterator[None]:
    """Inside, metrics that are computed batch by batch get the inputs of all ranks, as they get everyone's predictions."""
    args, compute, accelerator = trainer.args, trainer.compute_metrics, trainer.accelerator
    asks = args.batch_eval_metrics and compute is not None and "inputs" in args.include_for_metrics
    if not asks or accelerator.num_processes == 1:
        yield
        return

    def computed(prediction: Any, *more: object, **kwargs: object) -> object:
        if isinstance(prediction.inputs, Mapping):
            tensors = {key: value for key, value in prediction.inputs.items() if isinstance(value, torch.Tensor)}
            padded = accelerator.pad_across_processes(tensors, dim=1, pad_index=_PADDING)
            inputs = {**prediction.inputs, **accelerator.gather_for_metrics(padded)}
            prediction = type(prediction)(prediction.predictions, prediction.label_ids, inputs, prediction.losses)
        return compute(prediction, *more, **kwargs)

    trainer.compute_metrics = computed
    try:
        yield
    finally:
        trainer.compute_metrics = compute


class CountedRows:
    """A stream that several ranks read whole, and that counts its rows: [Note: rows and samples]."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.count = 0
        """Rows given since the start of the pass."""

    def __iter__(self) -> Iterator[object]:
        self.count = 0
        for row in self.rows:
            self.count += 1
            yield row

    def __len__(self) -> int:
        return len(self.rows)  # a stream may have a length; of others this raises what their own `len` raises

    def __getattr__(self, name: str) -> object:
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
        self._loader: Callable[[], object] | None = None

    def begin(self, loader: object) -> None:
        """Call it on every rank, whether or not its own batch is shorter."""
        self._loader = weakref.ref(loader)

    def is_here(self, state: Any) -> bool:
        """Equal on all ranks. `state`: accelerate's GradientState."""
        here = self._loader() if self._loader is not None else None
        return state.active_dataloader is not None and here is state.active_dataloader


def even_rows(axis: MeshAxis, value: object) -> object:
    """Tensors, nested or not, padded by repeating the last row up to the longest rank's number of rows. Collective.

    So are lists with an entry per row (images of several sizes), of which ranks have different numbers.
    """
    return _evened(value, collectives.all_gather_object(axis, _rows_in(value))) if axis.size > 1 else value


def _rows_in(value: object) -> object:
    """What `even_rows` compares: numbers of rows in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, Mapping):
        return {key: _rows_in(item) for key, item in value.items()}
    return [_rows_in(item) for item in value] if isinstance(value, (list, tuple)) else None


def _evened(value: object, everywhere: list[object]) -> object:
    if isinstance(value, torch.Tensor):
        missing = (
            max((rows for rows in everywhere if isinstance(rows, int)), default=0) - value.shape[0]
            if value.dim()
            else 0
        )
        return torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]) if missing > 0 else value
    if isinstance(value, Mapping):
        made: Any = type(value)
        return made(
            {
                k: _evened(item, [w[k] for w in everywhere if isinstance(w, dict) and k in w])
                for k, item in value.items()
            }
        )
    if not isinstance(value, (list, tuple)) or not value:
        return value
    lists = [where for where in everywhere if isinstance(where, list) and where]
    length = max(map(len, lists))
    items = [
        _evened(value[min(i, len(value) - 1)], [where[min(i, len(where) - 1)] for where in lists])
        for i in range(length)
    ]
    kind: Any = type(value)
    return kind(*items) if hasattr(value, "_fields") else kind(items)


def gathers_by_itself(loss: object) -> bool:
    """Whether a Trainer's `loss` (sentence-transformers: a module, or one per dataset) compares rows of all ranks.

    Such a loss gathers with torch's own calls, which need equally many rows on all ranks.
    """
    losses = loss.values() if isinstance(loss, dict) else [loss]
    modules = [module for one in losses if isinstance(one, nn.Module) for module in one.modules()]
    return any(getattr(module, "gather_across_devices", False) is True for module in modules)


def compares_rows(trainer: object) -> bool:
    """Whether a batch is more than its rows: TRL's has several rows per sample, sentence-transformers' losses compare rows.

    Their batches keep the length that they have under DDP.
    """
    packages = {cls.__module__.partition(".")[0] for cls in type(trainer).__mro__}
    return bool(packages & {"trl", "sentence_transformers"})


def on_rows_of_the_set(accelerator: Any, inputs: Any, step: Callable[[object], Any]) -> object:
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
    left_out = getattr(seekable_of(state.active_dataloader), "leaves_out_repeated", False)
    if fresh in (0, count) or left_out or not _has_a_row_per_sample(inputs, count):
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


def _last_rows(loader: object, num_processes: int, inputs: object) -> int:
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


def _has_a_row_per_sample(inputs: object, count: int) -> bool:
    """Whether all values of a batch have `count` entries, except settings (`return_loss=True`)."""
    if not isinstance(inputs, Mapping):
        return False
    rows = [value for value in inputs.values() if not _is_setting(value)]
    return bool(rows) and all(_num_rows(value) == count for value in rows)


def _is_setting(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _num_rows(value: object) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else None
    return len(value) if isinstance(value, list) else None


def _first(value: Any, count: int) -> object:
    return value if _is_setting(value) else value[:count]
