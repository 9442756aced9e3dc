"""Which GPU a process and each of its threads uses, seen by what is asked of `torch.cuda`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_dist
from hf_dist.checkpoint import save
from hf_dist.checkpoint.save import CheckpointWriter
from hf_dist.dist import mesh
from hf_dist.dist.mesh import build_mesh
from hf_dist.memory.offload import host
from hf_dist.planning import overhead, running
from tests.parity.families import make_model


@pytest.mark.parametrize("asked", ["cuda", torch.device("cuda"), None, "cuda:0"])
def test_a_process_without_a_launcher_trains_on_the_gpu_that_has_no_number(asked: Any, chosen: list[Any]) -> None:
    assert build_mesh(device=asked).device == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0)]


def test_a_gpu_that_is_named_is_taken(chosen: list[Any]) -> None:
    assert build_mesh(device="cuda:3").device == chosen[0] == torch.device("cuda", 3)


def in_a_thread(job: Callable[[], None]) -> None:
    thread = threading.Thread(target=job, name="other")
    thread.start()
    thread.join()


def test_the_watchdog_asks_the_gpu_of_its_rank_and_none_other(
    chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def default_stream(device: Any = None) -> Any:
        asked.append((torch.device("cuda", 0) if device is None else device, list(chosen)))
        return SimpleNamespace(query=lambda: False)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", default_stream)
    in_a_thread(lambda: mesh.device_is_busy(True))
    assert not asked, "before there is a mesh nobody knows which GPU it will be"
    build_mesh(device="cuda:2")
    chosen.clear()
    in_a_thread(lambda: mesh.device_is_busy(False))
    assert not asked
    answers: list[bool] = []
    in_a_thread(lambda: answers.append(mesh.device_is_busy(True)))
    assert answers == [True]
    assert asked == [(torch.device("cuda", 2), [torch.device("cuda", 2)])], "set first, in the thread itself"


def test_the_thread_that_writes_a_checkpoint_uses_the_gpu_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    engine = hf_dist.initialize(model, config={"train_batch_size": 1}, optimizer=torch.optim.SGD(model.parameters()))
    gpu = torch.device("cuda", 3)
    engine.writer = CheckpointWriter(replace(engine.mesh, device=gpu), in_background=True)
    calls: list[tuple[str, str]] = []

    def called(name: str) -> None:
        calls.append((threading.current_thread().name, name))

    write = CheckpointWriter._write
    monkeypatch.setattr(CheckpointWriter, "_write", lambda *args: called("write") or write(*args))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called(f"set {device}"))
    engine.save_checkpoint(tmp_path / "checkpoint-1")
    engine.writer.wait()
    assert calls == [("hf_dist checkpoint", "set cuda:3"), ("hf_dist checkpoint", "write")]
    assert (tmp_path / "checkpoint-1").is_dir()


@pytest.mark.parametrize("torch_has_it", [True, False])
def test_refused_page_locking_does_not_fail_the_next_kernel(
    torch_has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[int] = []  # the last one, as the runtime keeps it
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: errors.append(2) or 2)
    loaded = SimpleNamespace(cudaGetLastError=lambda: errors.pop())
    if torch_has_it:
        runtime.cudaGetLastError = loaded.cudaGetLastError
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host, "_loaded_runtime", lambda: loaded, raising=False)
    assert host.host_empty(1 << 16, pin=True).numel() == 1 << 16
    assert errors == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings the runtime")
def test_a_system_without_a_loaded_runtime_has_no_error_to_forget() -> None:
    assert host._loaded_runtime() is None


@pytest.mark.parametrize("numel", [16, 1 << 20])
def test_a_snapshot_takes_no_more_host_memory_than_it_has_elements(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator of page-locked memory would round each tensor up to a power of two."""
    asked: list[tuple[int, bool]] = []
    locked: list[bool] = []

    def host_empty(nbytes: int, *, pin: bool) -> torch.Tensor:
        asked.append((nbytes, pin))
        return torch.zeros(nbytes, dtype=torch.uint8)

    empty = torch.empty
    monkeypatch.setattr(save, "host_empty", host_empty)
    monkeypatch.setattr(
        torch, "empty", lambda *shape, pin_memory, **how: locked.append(pin_memory) or empty(*shape, **how)
    )
    value: Any = SimpleNamespace(
        numel=lambda: numel, element_size=lambda: 4, is_cuda=True, shape=(numel,), dtype=torch.float32
    )
    copy = save._host_like(value)
    assert (copy.shape, copy.dtype) == ((numel,), torch.float32)
    assert (asked, locked) == (([(4 * numel, True)], []) if numel > 16 else ([], [True]))


def test_a_budget_of_the_whole_gpu_leaves_what_cublas_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first batch context and communicators are there: what is free is without them."""
    monkeypatch.setattr(running, "free_nbytes", lambda device: 30_000_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_000_000_000)
    engine: Any = SimpleNamespace(device=torch.device("cuda", 0))
    assert running.memory_of(engine) == 40_000_000_000 - overhead.WORKSPACES
