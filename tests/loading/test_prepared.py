"""After prepare: every weight, buffer and output equals one process, at every stage and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import chosen, some_of
from tests.harness import run_ranks
from tests.loading.checkpoints import CASES, write
from tests.loading.on_ranks import check_all

# The others read files in one piece, in the dtype that they have, or fused and stacked weights as one of these does.
NAMES = some_of(
    CASES, "llama tied, several files", "llama fp32 to bf16", "llama bf16 to fp32", "llama base to causal",
    "llama causal to classifier", "llama, other shapes", "llama, odd keys", "llama tied, both stored, not equal", "gpt2",
    "bert base to mlm", "qwen3_moe bf16, several files", "mixtral", "gpt_oss", "phi3", "t5 fp16", "vit",
)  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, folder) for name in NAMES}


WORLDS = (1, 2, 3)
GRID = [(name, world, stage) for name in NAMES for world in WORLDS for stage in (0, 1, 2, 3)]


def settings(case: tuple[str, int, int]) -> dict[str, Any]:
    """Every checkpoint; every number of ranks with every stage."""
    name, world, stage = case
    return {"read": name, "layout": (world, stage)}


CHOSEN = chosen([case for case in GRID if case[1] > 1 or case[2] in (0, 3)], settings, 1)


@pytest.mark.parametrize("world", WORLDS)
def test_prepared_model_equals_one_process(world: int, paths: dict[str, Path]) -> None:
    asked = [(name, paths[name], stage) for name, ranks, stage in CHOSEN if ranks == world]
    for problems in run_ranks(check_all, world, (asked,)):
        assert problems == {}
