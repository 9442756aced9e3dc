"""Memory on the host: exactly the bytes that were asked for, whole pages, zeros, huge pages where the system has them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_dist.memory.activation.host_copies import HostCopies
from hf_dist.memory.offload import host
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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="a system that does not tell")
@pytest.mark.parametrize("nbytes", [1, PAGE, 2 * HUGE_PAGE - 4, 3 * HUGE_PAGE + 12])
@pytest.mark.parametrize("refused", [False, True])
def test_forked_processes_get_no_page_locked_memory(
    nbytes: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux would copy it whole into each worker of a DataLoader. Ordinary memory is shared until one of them writes."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: int(refused), cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    locked, plain = host_empty(nbytes, pin=True), host_empty(nbytes, pin=False)
    for place in (0, nbytes // 2, nbytes - 1):
        assert ("dc" in flags_of(locked.data_ptr() + place)) is not refused
        assert "dc" not in flags_of(plain.data_ptr() + place)
    plain.fill_(3)
    child = os.fork()
    if not child:
        os._exit(int(plain[-1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.parametrize("shape", [(5, 3), (3, 4, 130), (0, 7)])
def test_kept_activations_take_no_more_host_memory_than_they_have_elements(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their dimensions, so that the copy is one piece."""
    asked: list[int] = []
    made = host.host_empty
    monkeypatch.setattr(host, "host_empty", lambda nbytes, pin: asked.append(nbytes) or made(nbytes, pin=pin))
    kept = torch.randn(shape).transpose(0, -1)
    copies = HostCopies()
    copy = copies.put(kept)
    assert asked == [kept.numel() * 4] == [copies.nbytes]
    assert copy.host.stride() == torch.empty_like(kept).stride() and torch.equal(copy.host, kept)
    assert torch.equal(copies.get(copy), kept)
