"""Saving: takes a snapshot, writes everything under a working name, checks, seals and renames; in the background on request.

begin -> small files -> [copy to the host] -> weights and training state -> seal -> publish -> rotate
         main thread     training stops here   the same code, in the caller's thread or in a background thread
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch

from hf_dist.checkpoint import dcp, folder, lock, unwritable
from hf_dist.checkpoint.file_sums import FileSums
from hf_dist.checkpoint.finite import first_not_finite, trained_parameters
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.checkpoint.model_files import PLAN, ModelFiles
from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.checkpoint.publish import publish
from hf_dist.checkpoint.training_state import (
    Stateful,
    check_states,
    owned_parts,
    saved_state,
    whole_parts,
    write_common,
)
from hf_dist.dist import collectives, excepthook
from hf_dist.dist.collective_guard import REMEDY, passes_user_code
from hf_dist.dist.mesh import DEFAULT_TIMEOUT, MeshAxis, ParallelMesh, job_store, use_in_thread
from hf_dist.dist.raise_on_all_ranks import together, uninterrupted
from hf_dist.errors import CheckpointError
from hf_dist.format_bytes import size_text
from hf_dist.log import say
from hf_dist.memory.offload.host import host_empty
from hf_dist.version import __version__

_LARGE_NBYTES = 1 << 20
"""From this size on, host memory comes from the system instead of torch's allocator."""
_SLOW = 1.0
"""Seconds. After the first save, one that takes less than twice this is not reported."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The parts of one checkpoint besides the engine's state."""

    final: Path
    """The folder's final name, such as `out/checkpoint-100`."""
    files: ModelFiles
    write_more_files: Callable[[Path], None] = lambda _: None
    """Writes the trainer state and similar files. Called on rank 0 with the working folder."""
    on_every_rank: Callable[[Path], None] = lambda _: None
    """Called on all ranks with the working folder, before the weights are written."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Entries for the manifest: step, layout, arguments."""
    own_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of this rank alone, such as random states."""
    training_state: bool = True
    """False writes only the weights; the checkpoint cannot be resumed from."""
    after: Callable[[Path], None] = lambda _: None
    """Called on rank 0 once the folder has its final name: rotation, upload."""


@dataclass
class _Snapshot:
    parts: list[OwnedPart]
    state: dict[str, FlatSlice | torch.Tensor]
    common: dict[str, object]
    trained: frozenset[str]


class CheckpointWriter:
    """Writes the checkpoints of one job, one at a time. Every rank has one and makes the same calls."""

    _last: ClassVar[weakref.ref[CheckpointWriter] | None] = None
    """The last writer that wrote: writers of a process share the background axis and take turns. Weak, because a writer holds
    the mesh and host copies of all states; a writing thread holds its own writer."""

    def __init__(self, mesh: ParallelMesh, *, in_background: bool = False) -> None:
        """`in_background`: training stops only while states are copied to the host (`checkpoint.async_save`)."""
        self.mesh = mesh
        self.in_background = in_background
        self.stall_seconds = 0.0
        """How long training stopped for the last save."""
        self.total_seconds = 0.0
        """Time from start to end of the last completed save."""
        self._told_seconds = 0.0
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._host: dict[str, torch.Tensor] = {}

    def save(self, engine: Stateful, request: SaveRequest) -> None:
        """Write one checkpoint. Collective: every rank. Waits for the previous save and raises its error, if any.

        Raises `CheckpointError` on every rank if the checkpoint cannot be written; older checkpoints stay unchanged.
        """
        with uninterrupted():
            self._save(engine, request)

    def _save(self, engine: Stateful, request: SaveRequest) -> None:
        self.wait()
        started = time.perf_counter()
        request = replace(request, final=Path(os.path.abspath(request.final)))  # "." has no name and no parent
        axis = self.mesh.background
        working = folder.working_folder(request.final)
        if request.training_state and engine.fragments is not None:
            with together(axis, str, CheckpointError):
                for member in engine.fragments.members:
                    check_states(member)
        with request.files.with_weights(), _removed_if_failed(axis, working):
            with _all_or_none(axis, request.final):
                if axis.rank == 0:
                    lock.claim(lock.writing_of(request.final))
                    folder.begin(request.final)
                    request.files.write_small_files(working)
                    request.files.write_plan(working)
                    request.write_more_files(working)
            with _all_or_none(axis, request.final):
                # Resume would find a folder that only this machine has to be empty.
                if not working.is_dir():
                    raise CheckpointError(
                        f"{working} was created by rank 0 but does not exist here: the folder is not shared between machines"
                    )
                request.on_every_rank(working)
                for each in engine.beside:
                    each.save(working)
        snapshot = self._snapshot(engine, request)
        self.stall_seconds = time.perf_counter() - started
        if not self.in_background:
            self._write(working, snapshot, request, started)
            self.stall_seconds = time.perf_counter() - started
            self.raise_failure()
            return
        self._thread = threading.Thread(
            target=self._write_beside, args=(working, snapshot, request, started), name="hf_dist checkpoint"
        )
        excepthook.finish_first(_join_last)
        self._thread.start()

    def save_model(self, engine: Stateful, target: Path, files: ModelFiles) -> None:
        """Write the model into `target`, which may hold other files. Collective; returns once the files are complete.

        Raises `CheckpointError` on every rank. Files in `target` stay unchanged until all new files are written and checked.
        """
        with uninterrupted():
            self._save_model(engine, target, files)

    def _save_model(self, engine: Stateful, target: Path, files: ModelFiles) -> None:
        self.wait()
        axis = self.mesh.background
        working = folder.working_folder(target / "model")
        with _removed_if_failed(axis, working):
            with files.with_weights(), _all_or_none(axis, target):
                if axis.rank == 0:
                    lock.claim(lock.writing_of(target / "model"))
                    folder.begin(target / "model")
                    files.write_small_files(working)
                    files.write_plan(working)
            parts = [part for _, part in owned_parts(engine.sharded, lambda _, value: value.detach())]
            with _all_or_none(axis, target):
                files.write(working, parts, axis)
            with _all_or_none(axis, target):
                if axis.rank == 0:
                    files.check(working)
        with _all_or_none(axis, target):  # what is moved only in part is not removed: it is nowhere else
            if axis.rank == 0:
                folder.move_files(working, target, last=PLAN)
                lock.release(lock.writing_of(target / "model"))

    def save_model_here(self, engine: Stateful, target: Path, files: Callable[[], ModelFiles]) -> None:
        """`save_model` for weights that rank 0 holds whole: it writes alone, as under DDP, and waits for nobody.

        Other ranks that call it return when the folder is complete. Raises `CheckpointError` on every calling rank.
        """
        self.wait()
        if self.mesh.world.rank:
            problem = _words.wait_for(engine)
            if problem:
                raise CheckpointError(problem)
            return
        problem = f"{target}: rank 0 was interrupted while it wrote"
        working, alone = folder.working_folder(target / "model"), MeshAxis("alone", 1, 0, None)
        try:
            with _removed_if_failed(alone, working), _all_or_none(alone, target):
                lock.claim(lock.writing_of(target / "model"))
                folder.begin(target / "model")
                made = files()
                with made.with_weights():
                    made.write_small_files(working)
                made.write_plan(working)
                made.write(working, list(whole_parts(engine.sharded)), alone)
                made.check(working)
            with _all_or_none(alone, target):
                folder.move_files(working, target, last=PLAN)
                lock.release(lock.writing_of(target / "model"))
            problem = ""
        except CheckpointError as error:
            problem = str(error)
            raise
        finally:
            _words.tell(engine, problem)

    def join(self, timeout: float | None = None) -> None:
        """Wait until nothing is being written. Local."""
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None

    def wait(self) -> None:
        """Wait for a running save, if any, and raise its error."""
        _join_last()
        CheckpointWriter._last = weakref.ref(self)
        self.join()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise, once, an error from the background since the last call. Local; cheap enough for every step."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    # ------------------------------------------------------------------ snapshot

    def _snapshot(self, engine: Stateful, request: SaveRequest) -> _Snapshot:
        """The tensors to write; with a background thread, host copies that the next step does not touch."""
        pairs = list(owned_parts(engine.sharded, self._take))
        state: dict[str, FlatSlice | torch.Tensor] = {}
        common: dict[str, object] = {}
        if request.training_state:
            state = saved_state(engine, pairs, self._take)
            rank = self.mesh.world.rank
            state |= {f"rank.{rank}.{key}": value for key, value in request.own_values.items()}
            common = engine.plain_state()
        if self.in_background and self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return _Snapshot([part for _, part in pairs], state, common, trained_parameters(engine.sharded))

    def _take(self, name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.detach()
        if not self.in_background:
            return value
        copy = self._host.get(name)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            self._host[name] = copy = _host_like(value)
        return copy.copy_(value, non_blocking=value.is_cuda)

    # --------------------------------------------------------------------- write

    def _write_beside(self, working: Path, snapshot: _Snapshot, request: SaveRequest, started: float) -> None:
        """Runs in the thread. Sets its current GPU, because DCP uses the current stream of the current GPU."""
        use_in_thread(self.mesh.device)
        self._write(working, snapshot, request, started)

    def _write(self, working: Path, snapshot: _Snapshot, request: SaveRequest, started: float) -> None:
        """The slow part. Collective over the background axis; keeps its error for `raise_failure`."""
        weights, states = FileSums(), FileSums()
        try:
            self._write_and_seal(working, snapshot, request, weights, states)
            self.total_seconds = time.perf_counter() - started
            self._report(request.final)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # nobody would see an exception of the thread
            self._error = CheckpointError(f"{request.final} could not be written ({type(error).__name__}: {error})")
            self._error.__cause__ = error
        finally:
            weights.close()
            states.close()

    def _write_and_seal(
        self, working: Path, snapshot: _Snapshot, request: SaveRequest, weights: FileSums, states: FileSums
    ) -> None:
        axis = self.mesh.background
        with _removed_if_failed(axis, working):
            with _all_or_none(axis, request.final):
                request.files.write(working, snapshot.parts, axis, weights)
            with _all_or_none(axis, request.final):
                if request.training_state:
                    dcp.write_state(working / folder.STATE, snapshot.state, axis, states)
                    if axis.rank == 0:
                        write_common(working / folder.STATE, snapshot.common)
                own = states.digests(), first_not_finite(snapshot.parts, snapshot.trained)
            digests, bad = weights.digests(), None
            for rank, name in collectives.all_gather_object(axis, own):
                digests |= {f"{folder.STATE}/{file}": digest for file, digest in rank.items()}
                bad = bad or name
            with _all_or_none(axis, request.final):
                if axis.rank == 0:
                    request.files.check(working)
                    facts = {folder.NOT_FINITE: bad} if bad else {}
                    folder.seal(working, {"hf_dist": __version__, **request.facts, **facts}, digests)
                    if bad:
                        say(f"{request.final}: its weights are not finite, first {bad}")
                    publish(working, request.final)
                    lock.release(lock.writing_of(request.final))
                    request.after(request.final)

    def _report(self, final: Path) -> None:
        """Report the first save, and one that takes twice as long as any reported before: a run may save hundreds of times."""
        if self.mesh.world.rank != 0 or self.total_seconds < 2 * self._told_seconds:
            return
        self._told_seconds = max(self.total_seconds, _SLOW)
        nbytes = sum(p.stat().st_size for p in final.rglob("*") if p.is_file())
        stall = f", training stopped for {self.stall_seconds:.2f} s" if self.in_background else ""
        say(
            f"{final}: {size_text(nbytes)} written in {self.total_seconds:.1f} s{stall}; later saves are reported if slower"
        )


class _Words:
    """Rank 0's messages about its own saves, in the job's store; one object per process."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()

    def _key(self, engine: Stateful) -> str:
        # By engine and step: a rank that missed some of rank 0's calls is in step with it again at the next optimizer step.
        place = (engine.number, engine.global_steps)
        self._counts[place] += 1
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"hf_dist/saved/{restart}/{place[0]}/{place[1]}/{self._counts[place]}"

    def tell(self, engine: Stateful, problem: str) -> None:
        key, store = self._key(engine), job_store()
        if store is not None:
            store.set(key, problem)

    def wait_for(self, engine: Stateful) -> str:
        """Rank 0's problem, or "" for none."""
        key, store = self._key(engine), job_store()
        if store is None:
            return ""
        try:
            store.wait([key], DEFAULT_TIMEOUT)
        except RuntimeError as error:
            return f"rank 0 has not saved the model, but this rank was asked to ({type(error).__name__}). {REMEDY}"
        return store.get(key).decode()


_words = _Words()


def _host_like(value: torch.Tensor) -> torch.Tensor:
    """Host memory for a copy of `value`, page-locked if `value` is on a GPU.

    Large tensors bypass torch's allocator, which rounds each up to a power of two and could double the memory of all states.
    """
    nbytes = value.numel() * value.element_size()
    if nbytes < _LARGE_NBYTES or not value.is_cuda:
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return host_empty(nbytes, pin=True).view(value.dtype).view(value.shape)


def _join_last(timeout: float | None = None) -> None:
    """Wait until no writer of this process is writing. Local."""
    last = CheckpointWriter._last() if CheckpointWriter._last is not None else None
    if last is not None:
        last.join(timeout)


@contextmanager
def _removed_if_failed(axis: MeshAxis, working: Path) -> Iterator[None]:
    """A half-written folder of a full disk is removed at once, by rank 0: all ranks have left it when they raise together.

    One that another job writes is left to that job.
    """
    try:
        yield
    except CheckpointError:
        writing = lock.writing_of(folder.final_of(working))
        if axis.rank == 0 and lock.holds(writing):
            shutil.rmtree(working, ignore_errors=True)
            lock.release(writing)
        raise


def _all_or_none(axis: MeshAxis, final: Path) -> together:
    """A block of a save: if it fails on one rank, every rank raises `CheckpointError`."""

    def explain(error: Exception) -> str:
        users = passes_user_code(error)
        # Not an error of the disk: a bug, or one in code of the user's that a save calls. Show where.
        if not isinstance(error, (CheckpointError, OSError)) or users:
            excepthook.print_traceback(error)
        told = str(error).strip().splitlines()[:1]  # safetensors begins with an empty line
        if isinstance(error, CheckpointError):
            return " ".join(told)
        text, of_disk = ": ".join([type(error).__name__, *told]), None if users else _of_disk(error)
        if of_disk is None:
            return text
        why = unwritable.cause(of_disk, Path(of_disk.filename or final))
        return f"{text}; {why}. {unwritable.remedy(of_disk).rstrip('.')}"

    def failed(text: str) -> CheckpointError:
        return CheckpointError(
            f"{final} could not be written ({text}). Existing files are unchanged; start again with "
            "resume_from_checkpoint once the cause is gone."
        )

    return together(axis, explain, failed)


def _of_disk(error: BaseException | None) -> OSError | None:
    """What the system has said about the folder, if that is the cause."""
    if error is None or (isinstance(error, OSError) and error.errno is not None):
        return error
    return _of_disk(error.__cause__ or error.__context__)
