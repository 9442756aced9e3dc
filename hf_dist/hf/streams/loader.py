"""`StreamLoader`: accelerate's loader over a dataset without an index, that knows at which row it is and can begin at any."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from hf_dist.checkpoint import random_state
from hf_dist.hf.data import FETCH, nothing, restore, stay_a_while
from hf_dist.hf.streams.feed import Feed, LaneBlocks, Start, local_feed, say_skipped, worker_feed
from hf_dist.hf.streams.lane_reader import BEGINNING, Mark, has_state
from hf_dist.hf.streams.lanes import Lanes, Place
from hf_dist.hf.streams.own_division import divided_again, divides_rows, state_behind
from hf_dist.hf.streams.plan import Plan, plan_of
from hf_dist.hf.streams.shuffle_buffer import as_loaded, as_saved
from hf_dist.hf.streams.windows import next_window
from hf_dist.log import warn_once

__all__ = ["Position", "StreamBatches", "StreamLoader", "stream_of"]

_LABELS, _IGNORED = "labels", -100


@dataclass(frozen=True)
class Position:
    """Where a run stands in a stream: the same on all ranks, except for `starts`."""

    epoch: int
    place: Place
    starts: Mapping[int, Start] = field(default_factory=dict)
    """Of the lanes that this rank reads, or is to read."""
    collator: Any = None
    """State of this rank's collator, if that has one: a packing collator keeps a rest of the rows before."""

    @property
    def is_beginning(self) -> bool:
        """Whether a pass from there is one without a position."""
        known = any(start.mark.state is not None for start in self.starts.values())
        return not (self.place.sum or known or self.collator is not None)


class StreamBatches(DataLoader[Any]):
    """The batches of this rank, collated in this process: their rows come from lanes of several workers."""

    def __init__(self, plan: Plan, dataset: Any, **options: Any) -> None:
        """`options`: those of a torch `DataLoader`."""
        super().__init__(dataset, **options)
        self.plan = plan
        self.epoch = 0
        self.start: Position | None = None
        """Of the next pass."""
        self.feed: Feed | None = None
        """Of the current pass."""
        self.collated: deque[Place] = deque()
        """Behind each batch that was collated and not yet given to the loop."""
        self.restored = False
        """Whether this pass has restored the random states of a resume."""
        self.collator_state: Any = None
        """Of the collator, before the batch that is collated but not yet used."""
        self._at_fetch: dict[str, object] | None = None
        self._random: tuple[Mapping[str, torch.Tensor], Callable[[], None]] | None = None
        self._persistent: DataLoader[bytes] | None = None

    def __len__(self) -> int:
        """Batches of one rank, where the dataset has a length."""
        shape = self.plan.shape
        whole = shape.rows * self.plan.ranks.size
        whole = shape.rows if divides_rows(self.dataset) else whole  # its length is that of this rank's part
        rows: int = len(self.dataset)  # type: ignore[arg-type]
        return rows // whole if shape.drops else -(-rows // whole)

    def replan(self, lanes: Lanes) -> None:
        """Read in so many lanes from the next pass on."""
        plan = self.plan
        self.plan = plan_of(lanes, self.dataset, plan.shape, plan.ranks, by_first=plan.by_first)
        self._persistent = None

    @property
    def _collator(self) -> Any:
        """That of the user: HF wraps it to remove columns."""
        return getattr(self.collate_fn, "data_collator", self.collate_fn)

    def begin_at(self, position: Position) -> None:
        """Have the next pass begin there."""
        self.start, self.epoch = position, position.epoch
        if position.collator is not None and has_state(self._collator):
            self._collator.load_state_dict(position.collator)
        self._persistent = None  # its workers know no other beginning than that of an epoch

    def restore_random(self, states: Mapping[str, torch.Tensor], then: Callable[[], None] = nothing) -> None:
        """Have the next pass draw as the one in which `states()` was taken; `then` is called when the states are restored."""
        self._random = states, then

    def states(self) -> dict[str, object]:
        """Random states before the batch that is collated but not yet used. Raw, for `as_tensors`; takes microseconds."""
        return {} if self._at_fetch is None else {FETCH: self._at_fetch}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start, self.start = self.start, None
        random, self._random = self._random, None
        self.restored = False
        if start is None or start.epoch != self.epoch:
            start = Position(self.epoch, Place.start(self.plan.lanes))
        self.feed = feed = self._feed(start)
        self.collated.clear()
        for count, batch in enumerate(self._batches(start.place, feed, random)):
            if count == 0:
                say_skipped(feed, self.dataset)
            yield batch
            if random is not None and count == 0:
                # The previous batch is collated, so the generators continue where training left them.
                restore(random[0], "")
                self.restored = True
                random[1]()
        self._at_fetch = None

    def _batches(self, place: Place, feed: Feed, random: Any) -> Iterator[Any]:
        plan = self.plan
        if random is not None:
            restore(random[0], FETCH)
        while True:
            # Of the rows as well, because a dataset may draw. Between two steps the first batch of a window waits.
            self._at_fetch = random_state.raw()
            if has_state(self._collator):
                self.collator_state = copy.deepcopy(self._collator.state_dict())
            window = next_window(place, feed, plan.ranks, plan.reads, plan.shape)
            if not window.batches:
                return
            for index, rows in enumerate(window.batches):
                self.collated.append(window.places[index])
                yield self._collated(rows, window.is_spare[index])
            place = window.places[-1]

    def _collated(self, rows: list[Any], is_spare: bool) -> Any:
        batch: Any = self.collate_fn(rows)
        if is_spare:
            batch = _without_weight(batch)
        return pin_memory(batch) if self.pin_memory and torch.cuda.is_available() else batch

    def _feed(self, start: Position) -> Feed:
        plan, lanes = self.plan, self.plan.read_here
        if divides_rows(self.dataset) and (known := [each.mark.state for each in start.starts.values()]):
            self.dataset.load_state_dict(known[0])  # type: ignore[attr-defined]
        workers = min(self.num_workers, len(lanes))
        if workers == 0:
            return local_feed(self.dataset, lanes, plan.lanes.number, start.epoch, start.starts)
        loader = self._persistent
        if loader is None:
            rows = max(plan.shape.rows // len(lanes), 1)
            blocks = LaneBlocks(self.dataset, lanes, plan.lanes.number, start.starts, rows)
            loader = DataLoader(
                blocks,
                batch_size=None,
                num_workers=workers,
                collate_fn=_as_it_is,
                timeout=self.timeout,
                worker_init_fn=partial(stay_a_while, self.worker_init_fn),
                multiprocessing_context=self.multiprocessing_context,
                generator=self.generator,
                prefetch_factor=self.prefetch_factor,
                persistent_workers=self.persistent_workers,
            )
            self._persistent = loader if self.persistent_workers else None
        loader.dataset.epoch.fill_(start.epoch)  # type: ignore[attr-defined]
        return worker_feed(loader, start.starts)


class StreamLoader(DataLoaderShard):
    """accelerate's loader over `StreamBatches`. `position()` is that of the batch which the loop was given last."""

    def __init__(self, plan: Plan, dataset: Any, device: Any, non_blocking: bool, options: Mapping[str, Any]) -> None:
        """`options`: those of a torch `DataLoader`."""
        # accelerate makes a plain loader, which is replaced at once.
        super().__init__(dataset, device=device, _drop_last=plan.shape.drops, _non_blocking=non_blocking)
        self.base_dataloader = StreamBatches(plan, dataset, **options)
        self.use_stateful_dataloader = False
        self._place: Place | None = None

    @property
    def batches(self) -> StreamBatches:
        """What it loads."""
        found: StreamBatches = self.base_dataloader
        return found

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch of all data ranks."""
        plan = self.batches.plan
        return plan.shape.rows * plan.ranks.size

    def position(self) -> Position:
        """Behind the last batch that the loop was given; before the first one, where this pass began. Local; takes
        microseconds per lane that this rank reads.
        """
        batches = self.batches
        collator = batches.collator_state
        if self.end_of_dataloader and self._place is not None:  # then the next batch is of the next epoch
            return self._beginning(self.iteration + 1)
        if self._place is None or batches.feed is None:
            return batches.start or self._beginning(self.iteration)
        rows = self._place.rows
        if divides_rows(batches.dataset):
            starts = self._starts(self._place, state_behind(batches.dataset, self._place.sum, in_pass=True))
            return Position(self.iteration, self._place, starts, collator)
        starts = {lane: Start(batches.feed.mark(lane, rows[lane]), rows[lane]) for lane in batches.feed.lanes}
        return Position(self.iteration, self._place, starts, collator)

    def _beginning(self, epoch: int) -> Position:
        batches = self.batches
        place = Place.start(batches.plan.lanes)
        divides = divides_rows(batches.dataset)
        starts = self._starts(place, state_behind(batches.dataset, 0, in_pass=False)) if divides else {}
        return Position(epoch, place, starts, batches.collator_state)

    def _starts(self, place: Place, state: Any) -> dict[int, Start]:
        return {lane: Start(Mark(place.rows[lane], state), place.rows[lane]) for lane in self.batches.plan.read_here}

    def position_behind(self, epoch: int, place: Place, state: Any, collator: Any) -> Position:
        """A saved position, for a dataset that divides its rows itself. Local. Raises `CheckpointError` if it cannot go on.

        `place`: of any number of data ranks. `state`: that of the dataset there.
        """
        place = divided_again(place, self.batches.plan.ranks.size)
        return Position(epoch, place, self._starts(place, state), collator)

    @property
    def place(self) -> Place | None:
        """Behind the last batch that the loop was given; None outside of a pass. Equal on all ranks."""
        return self._place

    def follow(self, lanes: Lanes) -> None:
        """Read in so many lanes from the next pass on. Local. Raises `ConfigError` if the data ranks cannot share them."""
        plan = self.batches.plan
        if lanes != plan.lanes:
            self.batches.replan(lanes)

    def begin_at(self, position: Position) -> None:
        """Have the next pass begin there. Local."""
        self.iteration = position.epoch
        self._place = None
        self.batches.begin_at(position)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of the lanes that this rank reads, of plain values. Local."""
        at = self.position()
        states = {lane: {"row": s.mark.row, "state": as_saved(s.mark.state)} for lane, s in at.starts.items()}
        place = {"rows": list(at.place.rows), "lengths": list(at.place.lengths)}
        return {"epoch": at.epoch, **place, "states": states, "collator": at.collator}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass where `state_dict()` was taken, whatever rank had a lane. Local.

        `states` may hold lanes of all ranks. Raises `ConfigError` if the data ranks cannot share the lanes.
        """
        rows, states = tuple(state_dict["rows"]), state_dict["states"]
        epoch, place, collator = (
            state_dict["epoch"],
            Place(rows, tuple(state_dict["lengths"])),
            state_dict.get("collator"),
        )
        if divides_rows(self.batches.dataset):
            state = next(iter(states.values()))["state"]  # the same on all ranks
            self.begin_at(self.position_behind(epoch, place, state, collator))
            return
        self.follow(Lanes(len(rows)))
        starts = {}
        for lane in self.batches.plan.read_here:
            known = states.get(lane)
            mark = BEGINNING if known is None else Mark(known["row"], as_loaded(known["state"]))
            starts[lane] = Start(mark, rows[lane])
        self.begin_at(Position(epoch, place, starts, collator))

    def set_epoch(self, epoch: int) -> None:
        """Of the next pass, for datasets that shuffle by it."""
        self.iteration = self.batches.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._place = None if self.batches.start is None else self.batches.start.place
        epoch = self.iteration
        for batch in super().__iter__():
            self._place = self.batches.collated.popleft()
            yield batch
        self._place = None
        # accelerate does not count a pass without a batch: a loop that was stopped behind the last one would make it twice.
        self.iteration = max(self.iteration, epoch + 1)

    def __reduce__(self) -> Any:
        return (StreamLoader, *super().__reduce__()[1:])


def stream_of(loader: Any) -> StreamLoader | None:
    """`loader` if it is one."""
    return loader if type(loader) is StreamLoader else None


def _as_it_is(block: Any) -> Any:
    return block


def _without_weight(batch: Any) -> Any:
    """A batch for a rank that has no row left, with labels that a loss over labels leaves out."""
    labels = batch.get(_LABELS) if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
        batch[_LABELS] = torch.full_like(labels, _IGNORED)
    else:
        warn_once("the last rows of the stream are fewer than the microbatches of a step: some count more than once")
    return batch
