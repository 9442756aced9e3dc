"""A stream's position in a checkpoint: the place in the manifest, the state of each lane in the training state.

The place is the same for all ranks. The state of a lane is written by a rank that reads it, under the lane's number; whichever
rank reads the lane next reads it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.trainer

from hf_dist.checkpoint import dcp, folder
from hf_dist.errors import CheckpointError
from hf_dist.hf.streams.feed import Start
from hf_dist.hf.streams.lane_reader import BEGINNING, Mark
from hf_dist.hf.streams.lanes import Lanes, Place
from hf_dist.hf.streams.loader import Position, StreamLoader, stream_of
from hf_dist.hf.streams.own_division import divides_rows
from hf_dist.hf.streams.shuffle_buffer import as_loaded, as_saved
from hf_dist.hf.streams.windows import Reads
from hf_dist.log import say_once

__all__ = [
    "LANES",
    "ROWS_FILE",
    "log_rows",
    "nothing_skipped",
    "place_facts",
    "read_position",
    "states_of_lanes",
]

LANES = "lanes"
"""The key of the manifest's position."""
ROWS_FILE = "hf_dist_rows.jsonl"
_COLLATOR, _COLLATORS = "collator", "collators"
_NAME = re.compile(r"^rank\.\d+\.lane\.(\d+)$")


def place_facts(position: Position, ranks: int) -> dict[str, Any]:
    """The place, for the manifest; `ranks`: data ranks. Local, equal on all ranks."""
    place = position.place
    rests = {} if position.collator is None else {_COLLATORS: ranks}
    return {**rests, "number": len(place.rows), "rows": list(place.rows), "lengths": list(place.lengths)}


def states_of_lanes(stream: StreamLoader, position: Position) -> dict[str, torch.Tensor]:
    """The states of the lanes that this data rank answers for, as bytes, for one of the ranks that share its rows. Local."""
    plan = stream.batches.plan
    found = {}
    if position.collator is not None:
        found[_COLLATOR] = _bytes_of({"state": position.collator}, "the data collator")
    if plan.reads is not Reads.OWNERS and plan.ranks.rank > 0:
        return found
    for lane, start in position.starts.items():
        if start.row or start.mark.state is not None:
            found[f"lane.{lane}"] = _bytes_of(
                {"row": start.mark.row, "state": as_saved(start.mark.state)}, f"the dataset, lane {lane},"
            )
    return found


def _bytes_of(value: object, whose: str) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        _of_bytes(buffer.getvalue())
    except Exception:  # the unpickler of weights raises its own types
        say_once(
            f"the state of {whose} holds other things than tensors, numbers, strings, lists and dicts, and is not saved: a "
            "resume reads the rows before the checkpoint again and drops them; what a collator has kept of them is lost"
        )
        buffer = io.BytesIO()
        torch.save({"row": 0, "state": None}, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _of_bytes(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)


def read_position(directory: Path, stream: StreamLoader, own: Mapping[str, torch.Tensor]) -> Position:
    """The position of a checkpoint, for the lanes that this rank reads; the stream follows its number of lanes. Local.

    `own`: what the checkpoint has of this rank, or of the rank whose rows it reads.

    A checkpoint without lanes (of a stream, by an older version) counts its rows in one lane. Raises `CheckpointError` for a
    manifest that cannot be used, `ConfigError` for data ranks that cannot share the lanes.
    """
    manifest = folder.read_manifest(directory) or {}
    saved: Mapping[str, Any] = manifest.get("position", {})
    facts = saved.get(LANES)
    if facts is None:
        facts = {"number": 1, "rows": [saved.get("samples", 0)], "lengths": [None]}
    try:
        place = Place(tuple(map(int, facts["rows"])), tuple(facts["lengths"]))
        number, epoch = int(facts["number"]), int(saved.get("epoch", 0))
        assert len(place.rows) == len(place.lengths) == number > 0
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / folder.MANIFEST} cannot be read: its position has lanes {facts!r}. With ignore_data_skip=True the "
            "data start anew."
        ) from error
    divides = divides_rows(stream.batches.dataset)
    if not divides:
        stream.follow(Lanes(number))
    ranks = stream.batches.plan.ranks.size
    if facts.get(_COLLATORS, ranks) != ranks:
        raise CheckpointError(
            f"{directory}: the data collator kept rows for later (state_dict) on each of {facts[_COLLATORS]} data ranks, and "
            f"there are {ranks} now. Resume on {facts[_COLLATORS]}, or pack rows in the dataset."
        )
    rest = _of_bytes(own[_COLLATOR].numpy().tobytes())["state"] if _COLLATOR in own else None
    if divides:
        state = _with_states(directory / folder.STATE, {0: Start()})[0].mark.state  # the same on all ranks
        if state is None:
            raise CheckpointError(
                f"{directory} has no state of the dataset. With ignore_data_skip=True the data start anew."
            )
        return stream.position_behind(epoch, place, state, rest)
    wanted = {lane: Start(BEGINNING, place.rows[lane]) for lane in stream.batches.plan.read_here}
    return Position(epoch, place, _with_states(directory / folder.STATE, wanted), rest)


def _with_states(state: Path, wanted: dict[int, Start]) -> dict[int, Start]:
    if not state.is_dir():
        return wanted
    names = {}
    for name, (shape, dtype) in dcp.stored_tensors(state).items():
        match = _NAME.match(name)
        if match and int(match[1]) in wanted:
            names[name] = torch.empty(shape, dtype=dtype)
    if names:
        dcp.read_state(state, names)
    found = dict(wanted)
    for name, value in names.items():
        lane = int(name.rpartition(".")[2])
        loaded = _of_bytes(value.numpy().tobytes())
        found[lane] = Start(Mark(loaded["row"], as_loaded(loaded["state"])), wanted[lane].row)
    return found


@contextmanager
def nothing_skipped() -> Iterator[None]:
    """Inside, HF's loop takes a stream as it is: it begins at the right row and has no batch to skip."""
    stock = transformers.trainer.skip_first_batches

    def skip(loader: Any, num_batches: int = 0) -> Any:
        return loader if stream_of(loader) is not None else stock(loader, num_batches)

    transformers.trainer.skip_first_batches = skip
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = stock


def log_rows(file: Path, step: int, before: Position, after: Position) -> None:
    """Append the rows of a step: of each lane the first, and the one behind the last. One rank calls it.

    A step that is made again after a resume has a second line, with the same rows.
    """
    first = before.place.rows if before.epoch == after.epoch else (0,) * len(after.place.rows)
    lanes = {lane: [a, b] for lane, (a, b) in enumerate(zip(first, after.place.rows, strict=True)) if b > a}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": step, "epoch": after.epoch, "lanes": lanes}) + "\n")
