"""This machine's resources for this process: ranks that share it, available memory, the kernel's reports on both."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dist.format_bytes import size_text

if TYPE_CHECKING:  # for time-outs in processes that must not load torch yet
    import torch

__all__ = [
    "available_nbytes",
    "free_nbytes",
    "memory_kills",
    "memory_report",
    "process_identity",
    "process_state",
    "processors",
    "ranks_here",
    "resident_nbytes",
    "schedule_as_batch",
    "share_nbytes",
]

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_LIMITS = (  # (limit, usage, reclaimable cache within the usage): cgroup v2, then v1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def schedule_as_batch() -> None:
    """Schedule this thread, and those that it starts, so that none of them interrupts a running one when it wakes up. Linux.

    For ranks that share processors over gloo. A thread of gloo that wakes up spins for as long as another one holds its
    connection, and which one holds it is often the thread that it has just interrupted: it then spins for a whole time slice.
    On two processors, small all-reduces of two (four) ranks take a quarter (a fifth) of the time.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may refuse it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def ranks_here(env: Mapping[str, str] | None = None) -> int:
    """Ranks of this job on this machine, according to the launcher; if unknown, all ranks of the job, an upper bound."""
    env = os.environ if env is None else env
    return max(1, int(env.get("LOCAL_WORLD_SIZE") or env.get("WORLD_SIZE") or 1))


def free_nbytes(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on `device` (of host memory, its share); None if unknown."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return share_nbytes()


def share_nbytes(root: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """This rank's share of the available host memory; None if the kernel does not say."""
    available = available_nbytes(root, proc)
    return None if available is None else available // ranks_here()


def resident_nbytes() -> int:
    """Resident host memory of this process; 0 if the kernel does not say (not Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def available_nbytes(root: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """Available host memory in bytes, within the limits of this container or job; None if the kernel does not say.

    The limits of all cgroups around this process count. Cached files are part of a cgroup's usage but reclaimable.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    if found is None:
        return None
    available = int(found[1]) * 1024
    for folder in _folders(root, proc):
        for limit, usage, cache in _LIMITS:
            most, now = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdigit() and now.isdigit():
                cached = re.search(rf"^{cache} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
                available = min(available, max(int(most) - int(now) + (int(cached[1]) if cached else 0), 0))
    return available


class CoreDelay:
    """How long the thread that creates it was ready to run and had no processor core: other programs had them."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):  # no Linux, or a kernel without these numbers
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def seconds(self) -> float:
        """Since the thread began; 0 where the kernel does not say. Any thread may ask, about 2 microseconds."""
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) / 1e9


def process_state(pid: int) -> str:
    """State letter of a process on this machine (R, S, D, T, t, Z); empty if it does not exist or is not visible."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def process_identity(pid: int) -> str:
    """`<boot and process namespace> <start>` of a visible process: no later one has the same. Empty if it is gone or unknown.

    Numbers of processes come again, in a restarted container always.
    """
    try:
        boot = _text(_PROC / "sys/kernel/random/boot_id").strip()
        space = os.readlink(_PROC / "self/ns/pid")
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return f"{boot}/{space} {fields[19]}" if boot and len(fields) > 19 and fields[0] not in "ZX" else ""


def memory_kills(root: Path = _CGROUP) -> int:
    """Number of processes of this container or job killed for host memory so far; 0 if the kernel does not say."""
    for folder in _folders(root, _PROC):
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", _text(folder / name), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def memory_report(kills_before: int, root: Path = _CGROUP) -> str:
    """A sentence, with any memory limit, if more than `kills_before` processes were killed for host memory; else empty."""
    kills = memory_kills(root) - kills_before
    if kills <= 0:
        return ""
    limits = [_text(folder / name).strip() for folder in _folders(root, _PROC) for name, *_ in _LIMITS]
    limit = next((int(text) for text in limits if text.isdigit()), 0)
    known = f" (the limit here is {size_text(limit)})" if limit else ""
    return f"the kernel has killed {kills} process{'es' if kills > 1 else ''} for host memory since the start{known}"


def _folders(root: Path, proc: Path) -> Iterator[Path]:
    """The visible cgroup folders of this process, innermost first: v2, then the memory controller of v1.

    Inside a container, the kernel may report a path on the host; the container's own cgroup is then the visible root.
    """
    paths = _text(proc / "self" / "cgroup")
    for pattern, base in ((r"^0::/?(.*)$", root), (r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/?(.*)$", root / "memory")):
        found = re.search(pattern, paths, re.MULTILINE)
        folder = base / found[1] if found else base
        while folder != base and base in folder.parents:
            yield folder
            folder = folder.parent
        yield base


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
