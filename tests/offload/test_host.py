"""Memory on the host: exactly the bytes that were asked for, whole pages, zeros, huge pages where the system has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_dist.offload.host import HUGE_PAGE, PAGE, host_empty, host_zeros

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, 2 * HUGE_PAGE - 4, 2 * HUGE_PAGE, 3 * HUGE_PAGE + 12])
def test_exactly_the_bytes_from_the_beginning_of_a_page(nbytes: int) -> None:
    buffer = host_empty(nbytes, pin=False)
    assert buffer.numel() == buffer.untyped_storage().nbytes() == nbytes
    if nbytes:
        assert buffer.data_ptr() % (HUGE_PAGE if nbytes >= 2 * HUGE_PAGE else PAGE) == 0
        buffer[-1] = 7
        assert int(buffer[-1]) == 7


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    part = host_zeros(3 * HUGE_PAGE, torch.float32, pin=False)[-5:]
    assert part.tolist() == [0.0] * 5


def huge_kib() -> int:
    """Of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(not _ENABLED.exists() or "[never]" in _ENABLED.read_text(), reason="a system without huge pages")
def test_large_tensors_lie_in_huge_pages() -> None:
    before = huge_kib()
    held = host_zeros(16 * HUGE_PAGE // 4, torch.float32, pin=False)
    assert (huge_kib() - before) * 1024 >= held.numel() * 4 // 2  # the kernel may not find a free one for each
