"""Tensors at rest: what is written comes back, whatever the order of the calls; files leave nothing behind."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.errors import ConfigError
from hf_dist.memory.offload import nvme
from hf_dist.memory.offload.host import HostGradient, HostLink, host_empty, step_threads, threads
from hf_dist.memory.offload.nvme import BufferPool, DiskTensor, SwapFile
from hf_dist.memory.offload.resting import Resident, Tier, opened
from hf_dist.tensors.hugepages import PAGE


def swap_file(folder: Path, **options: Any) -> SwapFile:
    """A file with small blocks, so that a transfer is many of them."""
    return SwapFile(
        "zero_optimization.offload_optimizer.nvme_path", folder, **{"block_nbytes": 4096, "num_requests": 3, **options}
    )


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize("numel", (0, 1, 1023, 1024, 5000, 100_001))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_is_written_comes_back(
    direct: bool, numel: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(nvme, "_open_direct", lambda name: None)
    pool = BufferPool(2, pin=False)
    file = swap_file(tmp_path)
    neighbour, tensor = (DiskTensor(file, pool, n, dtype) for n in (700, numel))
    assert not tensor[:].any()  # zeros before anything was written
    values = torch.randn(numel).to(dtype)
    tensor.get(blank=True).copy_(values)
    tensor.release(changed=True)
    with opened(neighbour, changed=True) as other:
        other.fill_(3)
    tensor.fetch()
    assert torch.equal(tensor.get(), values)
    tensor.get().zero_()
    tensor.release()  # not changed: what was done to the buffer is forgotten
    assert torch.equal(tensor[:], values)
    part = tensor.part(numel // 3, numel).narrow(0, 0, numel // 2)
    assert torch.equal(part[5:], values[numel // 3 :][: numel // 2][5:])
    assert torch.equal(neighbour[:], torch.full((700,), 3, dtype=dtype))


def test_a_file_of_a_running_process_has_no_name(tmp_path: Path) -> None:
    tensor = DiskTensor(swap_file(tmp_path), BufferPool(1, pin=False), 1 << 20, torch.float32)
    assert os.listdir(tmp_path) == [] and tensor.nbytes == 4 << 20


def test_buffers_are_used_again_and_as_many_as_are_written_at_a_time(tmp_path: Path) -> None:
    pool = BufferPool(3, pin=False)
    file = swap_file(tmp_path)
    tensors = [DiskTensor(file, pool, 10_000, torch.float32) for _ in range(12)]
    for number, tensor in enumerate(tensors):
        tensor.get(blank=True).fill_(number)
        tensor.release(changed=True)
    assert pool.nbytes <= 3 * tensors[0].nbytes
    assert [int(tensor[9_999:].item()) for tensor in tensors] == list(range(12))


def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload_optimizer\.nvme_path: .*file.* cannot be written"):
        swap_file(tmp_path / "file" / "below")


def test_a_disk_that_is_full_is_named_with_what_is_needed(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = swap_file(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"nvme_path: .* 4 MB are needed there"):
            DiskTensor(file, BufferPool(1, pin=False), 1_000_000, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_refused_page_locking_is_said_once_and_ordinary_memory_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        @staticmethod
        def cudaHostRegister(*_: Any) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing)
    with caplog.at_level(logging.WARNING, logger="hf_dist"):
        buffers = [host_empty(1 << 16, pin=True) for _ in range(2)]
    assert all(b.numel() == 1 << 16 and b.data_ptr() % PAGE == 0 for b in buffers)
    assert caplog.text.count("refused to page-lock") == 1


def test_a_gradient_on_the_host_keeps_its_place() -> None:
    gradient = HostGradient(100, torch.float32, HostLink(torch.device("cpu")), pin=False)
    a, b = torch.randn(100), torch.randn(100).bfloat16()
    gradient.add(a)
    place = gradient.on_device().data_ptr()
    gradient.add(b)
    assert torch.equal(gradient.on_device(), a + b)
    gradient.drop()
    assert gradient.values is None
    gradient.add(b)
    assert torch.equal(gradient.on_device(), b.float()) and gradient.on_device().data_ptr() == place


def test_threads_for_a_step_are_shared_out_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [step_threads(n) for n in (1, 2, 4, 16)] == [6, 4, 2, 1]
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_tensor_in_memory_does_nothing() -> None:
    resting = Resident(torch.arange(4.0), Tier.HOST)
    with opened(resting, changed=True) as values:
        values.add_(1)
    assert resting.elements.tolist() == [1, 2, 3, 4] and resting.nbytes == 16
