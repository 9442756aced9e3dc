"""Writes weights from the shards of all ranks into one folder, in parallel and without gathering.

Every rank writes the byte ranges of its own elements, cast to the dtype on disk. If the folder does not support that (probed
with a small file, or it is on another machine's disk), the bytes are sent to rank 0 in file order, a few MB at a time.
A tensor whose elements are scattered over its parameter (a transposed one) is assembled on one rank, one tensor at a time.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_dist.checkpoint import weight_file
from hf_dist.checkpoint.file_sums import FileSums
from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.checkpoint.weight_file import OpenFiles
from hf_dist.checkpoint.weight_plan import Extent, StoredTensor, WeightPlan
from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.dist.raise_on_all_ranks import agree, together
from hf_dist.errors import CheckpointError
from hf_dist.tensors.tensor_slice import TensorSlice, strides_of

__all__ = ["IN_ORDER", "NOT_SHARED", "PARALLEL", "probe", "write_weights"]

PARALLEL, IN_ORDER, NOT_SHARED = "parallel", "in order", "not shared"
CHUNK = 8 * 2**20
"""Bytes that are cast, sent and written at once."""
_PROBE = ".write-probe"

Interval = tuple[str, int, int, TensorSlice]
"""Parameter name, and [start, stop) in the elements of the slice that a rank holds."""


@dataclass(frozen=True)
class _Write:
    """Contiguous elements of one part with their place on disk."""

    file: int
    offset: int
    """Byte in the file."""
    dtype: torch.dtype
    owner: int
    part: int
    start: int
    """Element within the part."""
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def probe(folder: Path, axis: MeshAxis) -> str:
    """Whether all ranks can write to one file of `folder` at once: PARALLEL, IN_ORDER or NOT_SHARED.

    Collective over `axis`. Raises `CheckpointError` on every rank if rank 0 cannot write there at all.
    """
    path = folder / _PROBE
    if axis.rank == 0:
        _together(axis, folder, lambda: path.write_bytes(bytes(8 * axis.size)))
    else:
        _together(axis, folder, None)
    outcome = PARALLEL
    if axis.rank:
        try:
            with OpenFiles(folder) as files:
                files.write(_PROBE, 8 * axis.rank, torch.full((8,), axis.rank % 251 + 1, dtype=torch.uint8))
        except FileNotFoundError:
            outcome = NOT_SHARED
        except OSError:
            outcome = IN_ORDER
    outcomes = collectives.all_gather_object(axis, outcome)
    seen = PARALLEL
    if axis.rank == 0:
        expected = bytes(8) + b"".join(bytes([rank % 251 + 1]) * 8 for rank in range(1, axis.size))
        seen = PARALLEL if path.read_bytes() == expected else IN_ORDER
        path.unlink()
    seen = collectives.all_gather_object(axis, seen)[0]
    return next((o for o in (NOT_SHARED, IN_ORDER) if o in [seen, *outcomes]), PARALLEL)


@torch.no_grad()
def write_weights(
    folder: str | os.PathLike[str],
    plan: WeightPlan,
    parts: Sequence[OwnedPart],
    axis: MeshAxis,
    mode: str | None = None,
    sums: FileSums | None = None,
) -> str:
    """Write the files of `plan` below an existing `folder` and read their headers back. Returns the mode used.

    Collective over `axis`: every rank calls it with the same plan and its own `parts`, which over all ranks hold each element
    of the plan once (parts of other parameters are skipped). May run in a background thread if `axis` has its own group.
    `mode`: an earlier result of `probe` for this file system; None probes again. `sums`: gets the sums of the whole files, on
    every rank. Host memory: 16 MB, and for scattered tensors one parameter and one stored tensor. Raises `CheckpointError` on
    every rank, naming path and reason. Existing files of the same names are lost, so write into a fresh folder.
    """
    folder = Path(folder)
    mode = mode or probe(folder, axis)

    def prepare() -> None:
        weight_file.remove_stale(folder, plan)
        for file in plan.files:
            weight_file.create(folder, file)
            if sums is not None:
                sums.add(file.name, 0, file.header)

    if sums is not None:
        for file in plan.files:
            sums.open(file.name, file.nbytes)

    _together(axis, folder, prepare if axis.rank == 0 else None)
    writer = _Writer(folder, plan, parts, axis, mode, sums)
    writer.write()
    writer.check_complete()
    if sums is not None:
        sums.reduce(axis)
    _together(axis, folder, (lambda: _finish(folder, plan)) if axis.rank == 0 else None)
    return mode


def _finish(folder: Path, plan: WeightPlan) -> None:
    for file in plan.files:
        problem = weight_file.difference(folder, file)
        if problem is not None:
            raise CheckpointError(problem)
    for name, content in plan.indexes.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _together(axis: MeshAxis, folder: Path, act: Callable[[], object] | None) -> None:
    """Run `act` on this rank, and raise on every rank if it failed on any. Collective."""

    def explain(error: Exception) -> str:
        if isinstance(error, OSError):
            return weight_file.explain(error, folder)
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

    with together(axis, explain, CheckpointError):
        if act is not None:
            act()


class _Writer:
    """One call of `write_weights` on one rank."""

    def __init__(
        self,
        folder: Path,
        plan: WeightPlan,
        parts: Sequence[OwnedPart],
        axis: MeshAxis,
        mode: str,
        sums: FileSums | None,
    ) -> None:
        self.folder = folder
        self.sums = sums
        self.plan = plan
        self.parts = [part for part in parts if part.name in plan.by_param]
        self.axis = axis
        self.mode = mode
        self.numbers = {file.name: number for number, file in enumerate(plan.files)}
        self.scattered = [p for f in plan.files for p in f.extents if any(piece.scattered for piece in p.tensor.pieces)]
        self._scattered_names = {(p.file, p.tensor.name) for p in self.scattered}
        self.staging = torch.empty(CHUNK + 8, dtype=torch.uint8)
        self.written: Counter[str] = Counter()
        """Bytes of each file that this rank wrote, or sent to another rank."""
        self.problem: str | None = None

    def write(self) -> None:
        """Write this rank's elements (parallel), or on rank 0 those of all ranks. Raises on every rank together."""
        with OpenFiles(self.folder, self.sums) as files:
            if self.mode == PARALLEL:
                for segment in _segments(self._writes(self._intervals(), self.axis.rank)):
                    self._put(files, segment, self._fill(segment))
            else:
                self._write_in_order(files)
            self._write_scattered(files)
            self._try(files.close)
        agree(self.axis, self.problem, CheckpointError, names_rank=True)

    def check_complete(self) -> None:
        """Raise `CheckpointError` unless exactly one rank wrote each byte of each file. Collective."""
        total: Counter[str] = Counter()
        for written in collectives.all_gather_object(self.axis, dict(self.written)):
            total.update(written)
        for file in self.plan.files:
            if total[file.name] != file.data_nbytes:
                raise CheckpointError(
                    f"{self.folder / file.name}: {total[file.name]} bytes of weights were written, the model has "
                    f"{file.data_nbytes}; {self._first_gap(file.name)}. This is a bug of hf_dist, please report it."
                )

    def _first_gap(self, file: str) -> str:
        held: Counter[str] = Counter()
        for intervals in collectives.all_gather_object(self.axis, self._intervals()):
            for name, start, stop, _ in intervals:
                held[name] += stop - start
        for extent in next(f for f in self.plan.files if f.name == file).extents:
            for piece in extent.tensor.pieces:
                needed = max(p.stop for _, p in self.plan.by_param[piece.param])
                if held[piece.param] < needed:
                    return f"of {piece.param} the ranks hold {held[piece.param]} elements, {needed} are stored"
        return "some were written twice"

    def _intervals(self) -> list[Interval]:
        return [(part.name, part.start, part.stop, part.held) for part in self.parts]

    def _writes(self, intervals: Iterable[Interval], owner: int) -> list[_Write]:
        found = []
        for number, (name, start, stop, held) in enumerate(intervals):
            for extent, piece in self.plan.by_param[name]:
                if (extent.file, extent.tensor.name) in self._scattered_names:
                    continue
                dtype = extent.tensor.dtype
                for run in piece.runs(start, stop, held):
                    position = extent.offset + run.target * dtype.itemsize
                    first = run.source - start
                    found.append(_Write(self.numbers[extent.file], position, dtype, owner, number, first, run.numel))
        return sorted(found, key=lambda w: (w.file, w.offset))

    def _write_in_order(self, files: OpenFiles) -> None:
        everyone = collectives.all_gather_object(self.axis, self._intervals())
        writes = [w for rank, intervals in enumerate(everyone) for w in self._writes(intervals, rank)]
        writes.sort(key=lambda w: (w.file, w.offset))
        file = 0
        for segment in _segments(writes):
            if segment[0].file != file:  # often enough to stop soon after a failure, without one message per segment
                agree(self.axis, self.problem, CheckpointError, names_rank=True)
                file = segment[0].file
            owners = list(dict.fromkeys(write.owner for write in segment))
            data = self._bring(segment, owners[0]) if len(owners) == 1 else self._bring_in_turns(segment, owners)
            if self.axis.rank == 0:
                self._put(files, segment, data)

    def _bring(self, writes: list[_Write], owner: int) -> torch.Tensor:
        """The bytes of writes of one owner, one behind the other, on rank 0; valid until the next call."""
        if self.axis.rank not in (0, owner):
            return self.staging[:0]
        data = self._fill(writes) if self.axis.rank == owner else self.staging[: sum(w.nbytes for w in writes)]
        collectives.transfer(self.axis, data, owner, 0)
        return data

    def _bring_in_turns(self, segment: list[_Write], owners: list[int]) -> torch.Tensor:
        """The bytes of a segment of several owners, on rank 0: one message from each of them, not one for each write.

        Rows of which each rank has some columns would be as many messages as rows.
        """
        base = segment[0].offset
        whole = torch.empty(sum(w.nbytes for w in segment) if self.axis.rank == 0 else 0, dtype=torch.uint8)
        for owner in owners:
            writes = sorted((w for w in segment if w.owner == owner), key=lambda w: -w.dtype.itemsize)
            data = self._bring(writes, owner)
            if self.axis.rank == 0:
                for write, part in zip(writes, data.split([w.nbytes for w in writes]), strict=True):
                    whole[write.offset - base :][: write.nbytes] = part
        return whole

    def _fill(self, segment: list[_Write]) -> torch.Tensor:
        """The bytes of a segment, 1-D uint8 on the CPU; valid until the next call."""
        first = segment[0]
        values = self.parts[first.part].values
        if (
            len(segment) == 1
            and values.device.type == "cpu"
            and values.dtype == first.dtype
            and not first.dtype.is_complex
        ):
            return values[first.start : first.start + first.numel].view(torch.uint8)
        # Aligns the following bytes for their dtype, as in the file; or the widest come first.
        lead = first.offset % 8
        end = lead
        for write in segment:
            into = self.staging[end : end + write.nbytes].view(write.dtype)
            into.copy_(self.parts[write.part].values[write.start : write.start + write.numel])
            end += write.nbytes
        return self.staging[lead:end]

    def _put(self, files: OpenFiles, segment: list[_Write], data: torch.Tensor) -> None:
        name = self.plan.files[segment[0].file].name
        self._write_bytes(files, name, segment[0].offset, data)

    def _write_bytes(self, files: OpenFiles, name: str, offset: int, data: torch.Tensor) -> None:
        if self.problem is None:
            self._try(lambda: files.write(name, offset, data))
            self.written[name] += data.numel()

    def _try(self, act: Callable[[], None]) -> None:
        """Run `act`. A failed rank keeps taking part in the exchange, so nobody hangs and all ranks raise together."""
        try:
            act()
        except OSError as error:
            self.problem = self.problem or weight_file.explain(error, self.folder)

    # ---- tensors whose elements are scattered over the parameter

    def _write_scattered(self, files: OpenFiles) -> None:
        groups = _groups(self.scattered)
        if not groups:
            return
        names = {param for params, _ in groups for param in params}
        own = [interval for interval in self._intervals() if interval[0] in names]
        everyone = collectives.all_gather_object(self.axis, own)
        for number, (params, extents) in enumerate(groups):
            target = number % self.axis.size if self.mode == PARALLEL else 0
            dtype = extents[0].tensor.dtype
            full = {name: self._collect(name, everyone, target, dtype) for name in params}
            if self.axis.rank != target:
                continue
            for extent in extents:
                data = _assemble(extent.tensor, full)
                if data is not None:
                    self._write_bytes(files, extent.file, extent.offset, data)

    def _collect(
        self, name: str, everyone: list[list[Interval]], target: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The whole parameter on rank `target` in the dtype on disk; None elsewhere, or if elements are missing."""
        rows = [(rank, *row[1:]) for rank, intervals in enumerate(everyone) for row in intervals if row[0] == name]
        numel = max((held.whole_numel for *_, held in rows), default=0)
        complete = sum(stop - start for _, start, stop, _ in rows) == numel
        full = torch.empty(numel if self.axis.rank == target else 0, dtype=dtype)
        own = {part.start: part.values for part in self.parts if part.name == name}
        step = CHUNK // dtype.itemsize
        for rank, start, stop, held in rows:
            if self.axis.rank not in (rank, target):
                continue
            for first in range(start, stop, step):
                last = min(first + step, stop)
                if self.axis.rank == rank:
                    data = own[start][first - start : last - start].to("cpu", dtype)
                else:
                    data = torch.empty(last - first, dtype=dtype)
                collectives.transfer(self.axis, data, rank, target)
                if self.axis.rank == target:
                    _put_back(data, first, held, full)
        return full if self.axis.rank == target and complete else None


def _put_back(values: torch.Tensor, start: int, held: TensorSlice, full: torch.Tensor) -> None:
    """Copy elements of a slice, from `start` on, to their places in the flattened whole parameter."""
    strides = strides_of(held.whole)
    for box in held.boxes(start, start + values.numel()):
        first = sum(index * stride for index, stride in zip(box.offsets, strides, strict=True))
        into = full.as_strided(box.sizes, strides, first)
        into.copy_(values[box.start - start :][: box.span].as_strided(box.sizes, box.strides))


def _segments(writes: Iterable[_Write]) -> Iterator[list[_Write]]:
    """Contiguous writes, joined up to CHUNK bytes; longer ones are cut."""
    current: list[_Write] = []
    end = size = 0
    for long in writes:
        for write in _cut(long):
            joins = current and (write.file, write.offset) == (current[0].file, end)
            if current and not (joins and size + write.nbytes <= CHUNK):
                yield current
                current, size = [], 0
            current.append(write)
            size += write.nbytes
            end = write.offset + write.nbytes
    if current:
        yield current


def _cut(write: _Write) -> Iterator[_Write]:
    step = CHUNK // write.dtype.itemsize
    for first in range(0, write.numel, step):
        numel, offset = min(step, write.numel - first), write.offset + first * write.dtype.itemsize
        yield _Write(write.file, offset, write.dtype, write.owner, write.part, write.start + first, numel)


def _groups(extents: Iterable[Extent]) -> list[tuple[list[str], list[Extent]]]:
    """Extents that need the same parameters, grouped so that each parameter is collected once."""
    groups: list[tuple[list[str], list[Extent]]] = []
    for extent in extents:
        params = {piece.param for piece in extent.tensor.pieces}
        touching = [group for group in groups if params.intersection(group[0])]
        merged = sorted(params.union(*(group[0] for group in touching)))
        groups = [group for group in groups if group not in touching]
        groups.append((merged, [p for group in touching for p in group[1]] + [extent]))
    return groups


def _assemble(tensor: StoredTensor, params: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    out = torch.empty(tensor.numel, dtype=tensor.dtype)
    for piece in tensor.pieces:
        source = params[piece.param]
        if source is None:
            return None
        box = out.as_strided(piece.sizes, piece.target_strides, piece.target_offset)
        box.copy_(source.as_strided(piece.sizes, piece.strides, piece.offset))
    return out.view(torch.uint8)
