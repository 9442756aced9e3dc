"""TRL's trainers and raw loops on two ranks that share every row (split sequences, cut matrices), against one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.covering import FULL_GRID
from tests.ecosystem.tiny import save_models
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

needs.package("trl", "TRL needs Python 3.11")
SEQUENCE, TENSOR = 5, 6  # `loops.LAYOUTS`
LAYOUTS = {"cp": SEQUENCE, "tp": TENSOR}
KINDS = [
    *(("raw", False), ("raw", True), ("by_hand", False), ("two_models", False)),
    *(("sft", False), ("sft", True), ("packed", False)),
    *(("dpo", False), ("dpo", True), ("reward", False), ("grpo", False)),
]
# Two models and a trainer's own metrics where a rank has a part of each row; adapters and generation over split matrices.
OF_LAYOUT = {"cp": [("two_models", False), ("packed", False)], "tp": [("raw", True), ("grpo", False)]}
CASES = [(layout, kind) for layout in LAYOUTS for kind in (KINDS if FULL_GRID else OF_LAYOUT[layout])]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes()[layout, kind, adapters]` of both ranks, and of one process (layout None); two spawns for all."""

    @functools.cache
    def run() -> dict[Any, list[Any]]:
        root = tmp_path_factory.mktemp("shared")
        save_models(root)
        cases = [(LAYOUTS[layout], *kind) for layout, kind in CASES]
        alone = list(dict.fromkeys((None, *kind) for _, kind in CASES))
        found: dict[Any, list[Any]] = {}
        for world, asked in ((2, cases), (1, alone)):
            jobs = [("tests.ecosystem.runs:run", given(*case, root)) for case in asked]
            ranks = run_ranks(run_jobs, world, (jobs, str(root / str(world))), timeout=900)
            found |= {case: [rank[i] for rank in ranks] for i, case in enumerate(asked)}
        return found

    return run


def given(stage: int | None, kind: str, adapters: bool, root: Path) -> dict[str, Any]:
    """Arguments of `runs.run`."""
    return {"kind": kind, "stage": stage, "adapters": adapters, "checkpointing": False, "root": str(root)}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("layout", "kind"), CASES, ids=[f"{on}-{kind}{'-lora' * lora}" for on, (kind, lora) in CASES])
def test_equals_one_process(layout: str, kind: tuple[str, bool], outcomes: Any) -> None:
    ranks, (expected,) = outcomes()[(LAYOUTS[layout], *kind)], outcomes()[(None, *kind)]
    assert not isinstance(expected, str), expected
    for found in ranks:
        assert not isinstance(found, str), found
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            # Margins are differences of log-probabilities a thousand times as large, a mean is of numbers of both signs.
            least = 1e-6 if key == "rewards/margins" else 1e-7
            if key == "mean_reward":
                least = TOLERANCE * max(abs(v) for name in ("min_reward", "max_reward") for v in expected[name])
            assert found[key] == pytest.approx(values, rel=TOLERANCE, abs=least), key
