"""Large buffers on the host in huge pages, where the system gives them to who asks (madvise).

A buffer that comes and goes with every unit is new to the process each time: the C library returns large ones to the system,
and the first touch of each page is a fault. 2 MiB a fault instead of 4 KiB makes that 512 times rarer.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

PAGE = 4096
"""Bytes. Buffers start on a page, which direct file access asks for."""
HUGE_PAGE = 1 << 21
"""Bytes, on x86-64 and (with pages of 4 KiB) on arm64. Elsewhere buffers begin on a multiple of it, and nothing is lost."""
MAPPED_NBYTES = 32 << 20
"""glibc asks the system for at least this much at once and gives it back, whatever came before (`M_MMAP_THRESHOLD`)."""
_PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Shared pages, which mmap gives else, are never huge."""


def fresh_pages(nbytes: int) -> torch.Tensor:
    """1-D uint8, zero, beginning on a page; on a huge one if it is large."""
    if nbytes < 2 * HUGE_PAGE or _madvise() is None:
        return torch.frombuffer(mmap.mmap(-1, nbytes, **_PRIVATE), dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, **_PRIVATE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    buffer = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes)
    _ask(buffer)
    return buffer


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, whose memory nobody has touched yet, with huge pages asked for where it is on the host and large."""
    large = tensor.numel() * tensor.element_size() >= MAPPED_NBYTES
    if large and tensor.device.type == "cpu" and type(tensor) is torch.Tensor:  # a fake tensor has no memory
        _ask(tensor)
    return tensor


def _ask(tensor: torch.Tensor) -> None:
    # A kernel built without them says no, which changes nothing; what is left at the ends stays in small pages.
    first = tensor.data_ptr() + -tensor.data_ptr() % HUGE_PAGE
    last = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    madvise = _madvise()
    if madvise is not None and last - first >= HUGE_PAGE:
        madvise(first, (last - first) // HUGE_PAGE * HUGE_PAGE, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """The C function; None where there are no huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
