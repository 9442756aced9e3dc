"""Weights that TRL sends to vLLM from shards are those that it sends from one process, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.hf.on_ranks import Job, found, outcomes_by_world

pytest.importorskip("trl", reason="TRL needs Python 3.11")
from tests.ecosystem.vllm_jobs import alone

CASES = [
    *((kind, 3, "server") for kind in ("full", "lora", "dora", "head")),
    *((kind, 1, "server") for kind in ("full", "lora")),
    *((kind, 3, "colocate") for kind in ("full", "lora")),
    *((kind, 3, "online_dpo") for kind in ("full", "lora")),
]
REAL = [(kind, stage, "client") for kind in ("full", "lora", "head") for stage in (1, 3)] if find_spec("vllm") else []
"""With vLLM's own code, where vLLM is installed; `run.sh` does not install it."""
CASES += REAL
Outcomes = Callable[[int], dict[str, list[Any]]]


def job(kind: str, stage: int, mode: str) -> Job:
    """Of `synchronised`."""
    return "tests.ecosystem.vllm_jobs:synchronised", {"kind": kind, "stage": stage, "mode": mode}


def adapter(stage: int) -> Job:
    """Of `adapter_for_server`."""
    return "tests.ecosystem.vllm_jobs:adapter_for_server", {"stage": stage}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of both ranks."""
    return outcomes_by_world({2: [*(job(*case) for case in CASES), *map(adapter, (1, 3))]}, tmp_path_factory)


@pytest.mark.parametrize(("kind", "stage", "mode"), CASES)
def test_vllm_receives_what_one_process_sends(kind: str, stage: int, mode: str, outcomes: Outcomes) -> None:
    expected = alone(kind)
    ranks = found(outcomes, 2, job(kind, stage, mode))
    for rank in ranks if mode == "colocate" else ranks[:1]:
        assert list(rank["weights"]) == list(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(rank["weights"][name], tensor, rtol=1e-6, atol=1e-7, msg=name)
    for rank in ranks:
        assert rank["unchanged"] and not rank["merged"]
        assert set(rank["at rest"]) == {stage == 1}
    if stage == 3 and mode == "server":
        assert 0 < ranks[0]["most"] < 0.6


@pytest.mark.parametrize("stage", [1, 3])
def test_an_adapter_that_is_published_alone_is_the_trained_one(stage: int, outcomes: Outcomes) -> None:
    assert found(outcomes, 2, adapter(stage)) == [True, True]


def test_adapters_change_what_is_sent() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(alone("full")[name], alone("lora")[name])
    assert not torch.equal(alone("dora")[name], alone("lora")[name])
