"""A job without roles has no part of them: no store, no group, no variable, no thread, no import."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from hf_dist.config import load_config
from tests import processes


def test_a_config_without_roles_enters_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_dist.hf import roles

    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("the start is divided")

    monkeypatch.setattr(roles, "divide", asked)
    variables, threads = dict(os.environ), threading.active_count()
    roles.enter(load_config({"zero_optimization": {"stage": 3}}))
    assert dict(os.environ) == variables and threading.active_count() == threads


def test_training_loads_nothing_that_serves() -> None:
    """What a role runs is imported by its ranks alone; the rest is a list that stays empty."""
    program = (
        "import sys, torch, hf_dist\n"
        "engine = hf_dist.initialize(torch.nn.Linear(2, 2), config={'train_micro_batch_size_per_gpu': 1,\n"
        "    'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}}})\n"
        "engine.backward(engine(torch.ones(1, 2)).sum()); engine.step()\n"
        "assert engine.beside == []\n"
        "found = [m for m in sys.modules if m.startswith('hf_dist.hf.serving_')]\n"
        "assert not found, found\n"
    )
    done = processes.run([sys.executable, "-c", program], timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
