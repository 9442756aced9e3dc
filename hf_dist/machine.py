"""What this machine has for this process: ranks that share it, memory that can still be had, what the kernel says of both."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hf_dist.sizes import size_text

__all__ = [
    "available_nbytes",
    "free_nbytes",
    "memory_kills",
    "memory_report",
    "process_state",
    "ranks_here",
    "resident_nbytes",
    "share_nbytes",
]

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_LIMITS = (  # (limit, usage, what of the usage is cache that the kernel gives back): cgroup v2, then v1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def ranks_here(env: Mapping[str, str] | None = None) -> int:
    """Ranks of this job on this machine, as `launch.py` was told; where nobody tells, all of the job: there cannot be more."""
    env = os.environ if env is None else env
    return max(1, int(env.get("LOCAL_WORLD_SIZE") or env.get("WORLD_SIZE") or 1))


def free_nbytes(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on `device`; None where nobody says. Of a host its share."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return share_nbytes()


def share_nbytes(root: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """This rank's part of the host memory that can still be had; None where the kernel does not say."""
    available = available_nbytes(root, proc)
    return None if available is None else available // ranks_here()


def resident_nbytes() -> int:
    """Host memory of this process; 0 where the kernel does not say (not Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def available_nbytes(root: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """Host memory that can still be had, within the limits of this container or job; None where the kernel does not say.

    A limit of any cgroup around this process counts. Files that it has read are in its usage, but given back when needed.
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


def process_state(pid: int) -> str:
    """One letter for a process of this machine (R, S, D, T, t, Z); empty if there is none, or none that can be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def memory_kills(root: Path = _CGROUP) -> int:
    """Processes of this container or job that were killed for host memory so far; 0 where the kernel does not say."""
    for folder in _folders(root, _PROC):
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", _text(folder / name), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def memory_report(kills_before: int, root: Path = _CGROUP) -> str:
    """A sentence if a process was killed for memory since `kills_before`, with the limit where there is one; else empty."""
    kills = memory_kills(root) - kills_before
    if kills <= 0:
        return ""
    limits = [_text(folder / name).strip() for folder in _folders(root, _PROC) for name, *_ in _LIMITS]
    limit = next((int(text) for text in limits if text.isdigit()), 0)
    known = f" (the limit here is {size_text(limit)})" if limit else ""
    return f"the kernel has killed {kills} process{'es' if kills > 1 else ''} for host memory since the start{known}"


def _folders(root: Path, proc: Path) -> Iterator[Path]:
    """The cgroups of this process as far as they can be seen, innermost first: v2, then the memory controller of v1.

    Inside a container the path that the kernel tells may be one of the host; the root of the view is the container's own.
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
