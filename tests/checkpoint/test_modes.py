"""Whoever may read files of this user may read checkpoints: modes follow the umask, and a group that folders pass on stays."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_dist
from hf_dist import DistAccelerator
from tests.parity.families import make_model

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}


def by_engine(folder: Path) -> None:
    hf_dist.initialize(make_model("llama"), config=CONFIG).save_checkpoint(folder)


def by_accelerator(folder: Path) -> None:
    accelerator = DistAccelerator(cpu=True, dist_config=CONFIG)
    model: Any = make_model("llama")
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(folder)


def by_model(folder: Path) -> None:
    accelerator = DistAccelerator(cpu=True, dist_config=CONFIG)
    model: Any = make_model("llama")
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_model(model, folder)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077], ids=oct)
@pytest.mark.parametrize("save", [by_engine, by_accelerator, by_model])
def test_modes_follow_the_umask(save: Callable[[Path], None], mask: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o2755)  # folders below belong to its group
    before = os.umask(mask)
    try:
        save(tmp_path / "saved")
    finally:
        os.umask(before)
    paths = [tmp_path / "saved", *(tmp_path / "saved").rglob("*")]
    assert len(paths) > 3
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == ((0o2777 if path.is_dir() else 0o666) & ~mask), (path.name, oct(mode))
