"""Explains an out-of-memory error: the plan, the measured memory, and the settings that save most."""

from __future__ import annotations

import dis
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from hf_dist.dist import comm_counter
from hf_dist.dist.excepthook import print_traceback, words_of
from hf_dist.format_bytes import size_text
from hf_dist.planning.advice import try_each
from hf_dist.planning.describe import plan_table, settings
from hf_dist.planning.memory_plan import Limits
from hf_dist.planning.overhead import measured
from hf_dist.planning.running import Running, planned_config, planner_alone

NUM_SETTINGS = 3
SECONDS = 2.0
"""For the plan. The other ranks wait for this one."""
_OF_THE_HOST = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
DEFAULT_SEQ = 2048
"""Tokens per sample if unknown."""


@contextmanager
def explained(find: Callable[[], Running | None], shape: Callable[[], Sequence[int] | None]) -> Iterator[None]:
    """Re-raise an out-of-memory error of the block in the same class, with a message that says what to change. Local.

    The error itself is printed first, in case that this rank does not come to the end. In a job the explanation is this rank's
    alone: no collective, no hook of the live model, two seconds at most.
    `find`: the engine, or None if it does not exist yet. `shape`: (samples, tokens) of the last `input_ids`, or None.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        engine = find() if _is_out_of_memory(error) else None
        if engine is None:
            raise
        if engine.mesh.world.size > 1:
            print_traceback(error)
        raise type(error)(_message(error, engine, shape())) from error


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host ran out of memory. On the host, torch's allocator and C++ raise a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and _is_native(error) and any(text in str(error) for text in _OF_THE_HOST)


def _is_native(error: BaseException) -> bool:
    """Whether an error comes from native code: the innermost line of Python calls it, and has no `raise`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"


def shape_of(batch: object) -> Sequence[int] | None:
    """The shape of a batch's `input_ids`, if it has any."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return tuple(ids.shape) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def _message(error: BaseException, engine: Running, shape: Sequence[int] | None) -> str:
    lines = [words_of(error) or "out of memory", "", "hf_dist measured:", *_indented(_measured(engine))]
    found: list[str] = []

    def plan() -> None:
        try:
            with comm_counter.refused():
                found.extend(_planned(engine, shape))
        except Exception as failure:  # the original error matters more
            found.append(f"(no plan: {type(failure).__name__}: {failure})")

    thread = threading.Thread(target=plan, name="hf_dist plan after an out-of-memory error", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return "\n".join([*lines, *(found or ["(no plan within two seconds; `hf-dist plan` makes one)"])])


def _measured(engine: Running) -> list[str]:
    held = ", ".join(f"{size_text(nbytes)} on {tier}" for tier, nbytes in engine.resident_nbytes().items() if nbytes)
    lines = [f"states at rest: {held}"]
    if engine.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(engine.device)
        peak, reserved = torch.cuda.max_memory_allocated(engine.device), torch.cuda.memory_reserved(engine.device)
        lines.append(
            f"device: {size_text(peak)} allocated at most, {size_text(reserved)} reserved, {size_text(free)} of "
            f"{size_text(total)} free"
        )
    # Linux reports kB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    lines.append(
        f"host: {size_text(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} used by this process at most"
    )
    return lines


def _planned(engine: Running, shape: Sequence[int] | None) -> list[str]:
    micro, seq = (engine.batch.micro or 1, DEFAULT_SEQ) if shape is None else shape[:2]
    config = planned_config(engine, micro)
    planner = planner_alone(engine, micro, seq)
    plan = planner.plan(config)
    limits = Limits()
    if engine.device.type == "cuda":
        limits = Limits(device=torch.cuda.mem_get_info(engine.device)[1] - (measured(engine.device) or 0))
    found = settings(try_each(planner, config, limits), limits)[:NUM_SETTINGS]
    lines = [f"planned for microbatches of {micro} x {seq} tokens:", *_indented(plan_table(plan))]
    return [*lines, "what saves most:", *_indented(found or ["nothing that hf_dist has a setting for"])]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
