"""Which GPU a process and each of its threads uses, seen by what is asked of `torch.cuda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.mesh import build_mesh

GPUS = 4


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """What `set_device` was given; it refuses what torch's refuses."""
    given: list[torch.device] = []

    def set_device(device: Any) -> None:
        torch.cuda._utils._get_device_index(device)  # raises ValueError without an index
        given.append(torch.device(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    return given


@pytest.mark.parametrize("asked", ["cuda", torch.device("cuda"), None, "cuda:0"])
def test_a_process_without_a_launcher_trains_on_the_gpu_that_has_no_number(asked: Any, chosen: list[Any]) -> None:
    assert build_mesh(device=asked).device == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0)]


def test_a_gpu_that_is_named_is_taken(chosen: list[Any]) -> None:
    assert build_mesh(device="cuda:3").device == chosen[0] == torch.device("cuda", 3)
