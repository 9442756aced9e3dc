"""Batches that can start anywhere in an epoch: resume seeks the position without replay, and random collators draw the same.

HF and accelerate resume by drawing and discarding every batch before the position. With several ranks they also lose the
epoch's seed, and they restore random states after the first batch was collated instead of before.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch.utils.data import BatchSampler, IterableDataset

from hf_dist.checkpoint import random_state
from hf_dist.errors import ConfigError, Problem

_EPOCH = "epoch."
FETCH = "fetch."
"""Prefix of the random states before the collation of the batch that is fetched but not yet used."""
_WORKER_SECONDS = 30
"""As long as torchrun waits after SIGTERM."""


def nothing() -> None:
    """Of a name, so that a prepared loader can be pickled."""


class SeekableBatches(BatchSampler):
    """Yields what `inner` yields, from any position, and keeps the random states that a resume needs."""

    def __init__(self, inner: BatchSampler) -> None:
        self.inner = inner
        self.batch_size = getattr(inner, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(inner, "drop_last", False)
        self.split_batches = getattr(inner, "split_batches", False)
        self._skip = 0
        self._shows_skipped = True
        self._resume: Mapping[str, torch.Tensor] | None = None
        self._then: Callable[[], None] = nothing
        self._at_epoch: dict[str, object] | None = None
        self._at_fetch: dict[str, object] | None = None
        self.leaves_out_repeated = False
        """Whether the last batch is without rows that are repeated to fill it: a collator would pad the new ones to those."""
        self.restored = False
        """Whether this pass has restored the random states of a resume."""

    def __len__(self) -> int:
        return len(self.inner)

    # HF looks for its own sampler in accelerate's, and tells that one not to divide what is divided among ranks already.

    @property
    def batch_sampler(self) -> object:
        """What accelerate has divided among ranks; None in one process."""
        return getattr(self.inner, "batch_sampler", None)

    @property
    def num_processes(self) -> int:
        """Ranks among which accelerate divides."""
        return getattr(self.inner, "num_processes", 1)

    @num_processes.setter
    def num_processes(self, value: int) -> None:
        self.inner.num_processes = value  # type: ignore[attr-defined]

    @property
    def process_index(self) -> int:
        """Of this rank among them."""
        return getattr(self.inner, "process_index", 0)

    @process_index.setter
    def process_index(self, value: int) -> None:
        self.inner.process_index = value  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler that shuffles, however deeply it is wrapped."""
        layer: object = self.inner
        while layer is not None:
            if hasattr(layer, "set_epoch"):
                layer.set_epoch(epoch)
            layer = getattr(layer, "batch_sampler", None) or getattr(layer, "sampler", None)

    def seek(
        self,
        num_batches: int,
        state: Mapping[str, torch.Tensor] | None,
        then: Callable[[], None] = nothing,
        *,
        shows_skipped: bool = True,
    ) -> None:
        """Start the next pass after `num_batches` batches of this rank, with the random states that `states()` returned.

        `then` is called once the states are restored, after the first batch was collated.
        `shows_skipped`: the first `num_batches` items of that pass are empty placeholders, which accelerate's
        `SkipBatchSampler` drops.
        """
        self._skip = num_batches
        self._shows_skipped = shows_skipped
        self._resume = state
        self._then = then

    def states(self) -> dict[str, object]:
        """Random states at the start of the epoch, and before the collation of the batch that is fetched but not yet used.

        Raw, for `as_tensors`; takes microseconds.
        """
        return {p: raw for p, raw in ((_EPOCH, self._at_epoch), (FETCH, self._at_fetch)) if raw is not None}

    def __iter__(self) -> Iterator[list[int]]:
        skip, self._skip = self._skip, 0
        resume, self._resume = self._resume, None
        self.restored = False
        if resume is not None:
            restore(resume, _EPOCH)
        self._at_epoch = random_state.raw()
        for _ in range(skip if self._shows_skipped else 0):
            yield []
        for count, batch in enumerate(_batches_from(self.inner, skip)):
            if resume is not None and count == 0:
                restore(resume, FETCH)
            if resume is not None and count == 1:
                # The previous batch is collated, so the generators continue where training left them.
                restore(resume, "")
                self.restored = True
                self._then()
            self._at_fetch = random_state.raw()
            is_last = self.leaves_out_repeated and skip + count + 1 == len(self)
            yield batch[: self.new_in_last or None] if is_last else batch
        self._at_fetch = None

    @property
    def new_in_last(self) -> int:
        """Rows of this rank's last batch that are not repeated; 0 if all are, or if nobody knows."""
        shard = self.inner
        if (
            not isinstance(shard, BatchSamplerShard)
            or not shard.batch_size
            or not hasattr(shard.batch_sampler, "sampler")
        ):
            return 0
        own = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
        rest = len(shard.batch_sampler.sampler) % (own * shard.num_processes) or own * shard.num_processes
        return min(max(rest - own * shard.process_index, 0), own)


class SeekableShard(DataLoaderShard):
    """accelerate's loader over `SeekableBatches`, with a position that can be saved and loaded on any number of ranks.

    accelerate's own (`use_stateful_dataloader`) forgets the number of the epoch, and with worker processes the order of rows.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._given = 0
        self._position: tuple[int, Mapping[str, torch.Tensor]] | None = None

    @property
    def _rows(self) -> int:
        """Of one batch of all ranks."""
        return int(self.total_batch_size)

    def state_dict(self) -> dict[str, object]:
        """The position after the batch that the loop was given last. Local."""
        done = self._given >= len(self)  # the loop has not asked for more yet
        position = {"epoch": self.iteration + done, "rows": 0 if done else self._given * self._rows}
        return {**position, **as_tensors(self.batch_sampler.states())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass where `state_dict()` was taken. Local. Raises `ConfigError` for rows that are no whole batch."""
        batches, rest = divmod(state_dict["rows"], self._rows)
        if rest:
            raise ConfigError(
                Problem(
                    "batch_size",
                    str(self._rows),
                    f"rows over all ranks do not divide the {state_dict['rows']} rows that the saved epoch had had",
                    "Take a batch size and a number of ranks whose product does.",
                )
            )
        self.iteration, self._given = state_dict["epoch"], batches
        self._position = batches, {k: v for k, v in state_dict.items() if isinstance(v, torch.Tensor)}

    def __iter__(self) -> Iterator[object]:
        position, self._position = self._position, None
        self._given = 0
        if position is not None and position[0]:
            self._given = position[0]
            now = as_tensors({"": random_state.raw()})
            self.batch_sampler.seek(position[0], {**position[1], **now}, shows_skipped=False)
        for batch in super().__iter__():
            self._given += 1
            yield batch
        self._given = 0

    def __reduce__(self) -> Any:
        return (SeekableShard, *super().__reduce__()[1:])


def as_tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Raw random states as tensors, named by prefix, for a checkpoint."""
    return {prefix + key: v for prefix, raw in states.items() for key, v in random_state.as_tensors(raw).items()}


def restore(state: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Restore the random states whose names begin with `prefix`, if there are any. Local."""
    chosen = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if "torch" in chosen:
        random_state.restore(chosen)


def note_dropping(loader: object) -> None:
    """Have a prepared loader know that its sampler of batches leaves the last short ones out. Local.

    accelerate asks the DataLoader, which says no wherever it was given such a sampler (sentence-transformers gives one).
    It then takes the last whole batch for one that was filled up, and drops rows of it.
    """
    if getattr(getattr(loader, "batch_sampler", None), "drop_last", False) and hasattr(loader, "_drop_last"):
        loader._drop_last = True


@contextmanager
def loaders_left(state: Any) -> Iterator[None]:
    """After it, no loader that was begun inside counts as under way. `state`: accelerate's GradientState, one per process.

    The Trainer stops without asking its loader for the batch after the last, which would end it. As long as that loader
    lives, every microbatch of a loop of one's own in the same process would be the last of its window.
    """
    before = state.dataloader_references
    try:
        yield
    finally:
        state.dataloader_references = before


def make_seekable(loader: Any) -> object:
    """The loader with `SeekableBatches` if it reads a map-style dataset by batches of indices, otherwise `loader` unchanged."""
    sampler = getattr(loader, "batch_sampler", None)
    known = type(sampler) in (BatchSampler, BatchSamplerShard)
    if type(loader) is not DataLoaderShard or not known or isinstance(loader.dataset, IterableDataset):
        return loader
    kept = "num_workers collate_fn pin_memory timeout multiprocessing_context generator prefetch_factor"
    kept += " persistent_workers pin_memory_device in_order"
    # From page-locked memory a batch is copied beside the computation. accelerate's default waits for the copy, which comes
    # after all earlier work of the GPU.
    locked = loader.pin_memory and getattr(loader.device, "type", "") == "cuda"
    seekable = SeekableShard(
        loader.dataset,
        device=loader.device,
        rng_types=loader.rng_types,
        synchronized_generator=loader.synchronized_generator,
        _drop_last=loader._drop_last,
        _non_blocking=loader._non_blocking or locked,
        batch_sampler=SeekableBatches(loader.batch_sampler),
        worker_init_fn=partial(stay_a_while, loader.worker_init_fn),
        **{name: getattr(loader, name) for name in kept.split() if hasattr(loader, name)},
    )
    seekable.use_stateful_dataloader = loader.use_stateful_dataloader
    seekable.iteration = loader.iteration  # not a constructor argument before accelerate 1.12
    return seekable


def stay_a_while(init: Callable[[int], None] | None, worker_id: int) -> None:
    """Keep a worker alive after SIGTERM, which schedulers send to every process: an orderly stop still needs its batches."""
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_WORKER_SECONDS))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if init is not None:
        init(worker_id)


def seekable_of(loader: object) -> SeekableBatches | None:
    """The `SeekableBatches` of a loader, also below accelerate's `SkipBatchSampler`."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, SeekableBatches):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


@contextmanager
def without_repeated_rows(loader: object) -> Iterator[None]:
    """Inside, the last batch of a rank has only rows of the set that no batch had before, if it has any. Local."""
    found = seekable_of(loader)
    if found is not None:
        found.leaves_out_repeated = True
    try:
        yield
    finally:
        if found is not None:
            found.leaves_out_repeated = False


def _batches_from(sampler: Any, start: int) -> Iterator[list[int]]:
    """`islice(sampler, start, None)`, skipping samples in C instead of building the batches before `start`."""
    shard = isinstance(sampler, BatchSamplerShard)
    inner = sampler.batch_sampler if shard else sampler
    ways, own = (sampler.num_processes, sampler.process_index) if shard else (1, 0)
    plain = type(inner) is BatchSampler and not (shard and (sampler.split_batches or not sampler.even_batches))
    if start == 0 or not plain:
        yield from islice(sampler, start, None)
        return
    size, round_size = inner.batch_size, inner.batch_size * ways
    samples = iter(inner.sampler)
    head = list(islice(samples, round_size))  # an incomplete last round is filled from the start of the set
    rest: Iterator[int] = islice(samples, (start - 1) * round_size, None)
    while batch := list(islice(rest, round_size)):
        if len(batch) < round_size:
            if inner.drop_last:
                return
            if not shard:  # a single process keeps a short last batch
                yield batch
                return
            batch += islice(_cycle(head), round_size - len(batch))
        yield batch[own * size : (own + 1) * size]


def _cycle(items: list[int]) -> Iterator[int]:
    while True:
        yield from items


def read_everywhere(accelerator: Accelerator, loader: Any) -> None:
    """Let every process read its data itself, as pipeline ranks (same batches) and local_sgd replicas need."""
    if accelerator.dispatch_batches:
        raise ConfigError(
            Problem(
                "dispatch_batches",
                "True",
                "one process would send batches to all others, but several processes share a batch (the model or its "
                "sequences are split), or replicas train alone (local_sgd)",
                "Remove it; every process then reads the data itself.",
            )
        )
    accelerator.dataloader_config.dispatch_batches = False
    init = getattr(loader, "worker_init_fn", None)
    if isinstance(init, partial) and "rank" in init.keywords:  # HF's worker seeds
        loader.worker_init_fn = partial(init.func, *init.args, **{**init.keywords, "rank": accelerator.process_index})


__all__ = [
    "FETCH",
    "SeekableBatches",
    "as_tensors",
    "loaders_left",
    "make_seekable",
    "note_dropping",
    "nothing",
    "read_everywhere",
    "restore",
    "seekable_of",
    "stay_a_while",
    "without_repeated_rows",
]
