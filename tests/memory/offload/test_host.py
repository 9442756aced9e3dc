"""Memory on the host: exactly the bytes that were asked for, whole pages, zeros, huge pages where the system has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_dist.memory.offload.host import host_empty, host_zeros
from hf_dist.tensors.hugepages import HUGE_PAGE, MAPPED_NBYTES, PAGE, in_huge_pages

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


def flags_of(address: int) -> list[str]:
    """VmFlags of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= address < last
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not _ENABLED.exists(), reason="a system without huge pages")
def test_large_tensors_ask_for_huge_pages_and_small_ones_do_not() -> None:
    large, small = host_zeros(HUGE_PAGE, torch.float32, pin=False), host_zeros(PAGE, torch.float32, pin=False)
    assert "hg" in flags_of(large.data_ptr())
    assert "hg" not in flags_of(small.data_ptr())


@pytest.mark.skipif(not _ENABLED.exists(), reason="a system without huge pages")
def test_what_the_library_maps_afresh_each_time_lies_in_huge_pages() -> None:
    """The middle of it, as its ends share pages with nobody but are not aligned; smaller tensors come from the heap."""
    mapped = in_huge_pages(torch.empty(MAPPED_NBYTES, dtype=torch.uint8))
    heap = in_huge_pages(torch.empty(MAPPED_NBYTES // 64, dtype=torch.uint8))
    assert "hg" in flags_of(mapped.data_ptr() + MAPPED_NBYTES // 2)
    assert "hg" not in flags_of(heap.data_ptr())
