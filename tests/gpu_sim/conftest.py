"""Four GPUs that only answer what a mesh asks of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.dist import mesh

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
    monkeypatch.setattr(mesh, "_gpu", None, raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    return given
