"""What the kernel says: memory of this process, processes killed for memory, the state of a process."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["available_nbytes", "memory_kills", "memory_report", "process_state", "resident_nbytes"]

_CGROUP = Path("/sys/fs/cgroup")


def resident_nbytes() -> int:
    """Host memory of this process; 0 where the kernel does not say (not Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def available_nbytes(root: Path = _CGROUP) -> int:
    """Host memory that can still be had, within the limit of this container or job; 0 where the kernel does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    available = int(found[1]) * 1024 if found else 0
    for folder in _folders(root):
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdigit() and now.isdigit():
                available = min(available, max(int(most) - int(now), 0))
    return available


def process_state(pid: int) -> str:
    """One letter for a process of this machine (R, S, D, T, t, Z); empty if there is none, or none that can be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def memory_kills(root: Path = _CGROUP) -> int:
    """Processes of this container or job that were killed for host memory so far; 0 where the kernel does not say."""
    for folder in _folders(root):
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
    limits = [
        _text(folder / name).strip() for folder in _folders(root) for name in ("memory.max", "memory.limit_in_bytes")
    ]
    limit = next((int(text) for text in limits if text.isdigit()), 0)
    known = f" (the limit here is {limit / 1e9:.2f} GB)" if limit else ""
    return f"the kernel has killed {kills} process{'es' if kills > 1 else ''} for host memory since the start{known}"


def _folders(root: Path) -> list[Path]:
    """The cgroup of this process where it can be seen, and the one at the root of the container's view."""
    found = re.search(r"^0::/?(.*)$", _text(Path("/proc/self/cgroup")), re.MULTILINE)
    return [root / found[1] if found else root, root, root / "memory"]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
