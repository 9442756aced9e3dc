"""TRL's trainers and raw accelerate loops with split sequences, on two ranks that share every row, against one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem import runs
from tests.ecosystem.tiny import save_models
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

SPLIT = 5
KINDS = [
    ("sft", False),
    ("sft", True),
    ("packed", False),
    ("dpo", False),
    ("dpo", True),
    ("reward", False),
    ("grpo", False),
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks returned for each kind, and the folder of the models; one spawn."""
    root = tmp_path_factory.mktemp("models")
    save_models(root)

    @functools.cache
    def run() -> list[list[Any]]:
        jobs = [("tests.ecosystem.runs:run", given(kind, SPLIT, adapters, root)) for kind, adapters in KINDS]
        return run_ranks(run_jobs, 2, (jobs, str(root / "out")), timeout=600)

    return run, root


def given(kind: str, stage: int | None, adapters: bool, root: Path) -> dict[str, Any]:
    """Arguments of `runs.run`."""
    return {"kind": kind, "stage": stage, "adapters": adapters, "checkpointing": False, "root": str(root)}


@pytest.mark.parametrize("index", range(len(KINDS)), ids=[f"{kind}-lora" if lora else kind for kind, lora in KINDS])
def test_trl_equals_one_process(index: int, outcomes: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL needs Python 3.11")
    run, root = outcomes
    kind, adapters = KINDS[index]
    ranks = [rank[index] for rank in run()]
    for found in ranks:
        assert not isinstance(found, str), found
    expected = runs.run(tmp_path, **given(kind, None, adapters, root))
    for found in ranks:
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert found[key] == pytest.approx(values, rel=TOLERANCE, abs=1e-7), key
