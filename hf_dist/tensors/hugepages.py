"""Large host buffers in huge pages, on systems that grant them on request (madvise).

The C library returns large freed buffers to the system, so a buffer allocated anew for every unit takes a page fault at the
first touch of each page. Pages of 2 MiB instead of 4 KiB make faults 512 times rarer.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

PAGE = 4096
"""Bytes. Buffers start on a page boundary, as direct file access requires."""
HUGE_PAGE = 1 << 21
"""Bytes, on x86-64 and (with pages of 4 KiB) on arm64. Elsewhere, buffers are only aligned to it, which does no harm."""
MAPPED_NBYTES = 32 << 20
"""glibc always maps allocations of at least this size separately and returns them when freed (`M_MMAP_THRESHOLD`)."""
_PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""mmap's default, shared pages, are never huge."""


def fresh_pages(nbytes: int) -> torch.Tensor:
    """A 1-D uint8 tensor of zeros that starts on a page boundary; on a huge page if it is large."""
    if nbytes < 2 * HUGE_PAGE or _madvise() is None:
        return torch.frombuffer(mmap.mmap(-1, nbytes, **_PRIVATE), dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, **_PRIVATE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    buffer = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes)
    _ask(buffer)
    return buffer


def not_in_children(tensor: torch.Tensor) -> None:
    """Leave the pages of a tensor of `fresh_pages` out of processes that are forked later, which must not read it.

    Linux (5.12 and newer) copies page-locked private pages into a child at once, not when one of the two writes: each worker
    of a DataLoader would cost the host as much memory as an offloaded model, and seconds.
    """
    madvise = _madvise()
    if madvise is not None:
        madvise(tensor.data_ptr(), -(-tensor.numel() * tensor.element_size() // PAGE) * PAGE, mmap.MADV_DONTFORK)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Request huge pages for `tensor`, if it is large and on the host, and return it. Its memory must be untouched."""
    large = tensor.numel() * tensor.element_size() >= MAPPED_NBYTES
    if large and tensor.device.type == "cpu" and type(tensor) is torch.Tensor:  # a fake tensor has no memory
        _ask(tensor)
    return tensor


def _ask(tensor: torch.Tensor) -> None:
    # A kernel without huge pages refuses, which changes nothing. The ends of the buffer stay in small pages.
    first = tensor.data_ptr() + -tensor.data_ptr() % HUGE_PAGE
    last = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    madvise = _madvise()
    if madvise is not None and last - first >= HUGE_PAGE:
        madvise(first, (last - first) // HUGE_PAGE * HUGE_PAGE, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """The C function `madvise`; None on systems without huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
