"""Parameters of which each rank holds a slice: loaded from stock folders, saved, exported, and read back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dist.checkpoint.describe import describe
from hf_dist.checkpoint.export import export
from tests.covering import FULL_GRID
from tests.harness import run_ranks

from .families import make_model
from .sliced import round_trips

CASES = [("qwen3_moe", "float32", 3), ("phi3", "bfloat16", 1), ("phi3", "float32", 3), ("shuffled", "float32", 2)]
if not FULL_GRID:  # stacks of experts, and fused matrices in the dtype that is not the masters'
    CASES = CASES[:2]
WORLD = 4
"""Two ranks share every parameter, two more shard each of those slices."""
STATES = ("whole", "cut")


def name_of(case: tuple[str, str, int]) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module")
def stocks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(family, dtype) -> what `save_pretrained` writes."""
    folders = {}
    for family, dtype, _ in CASES:
        folders[family, dtype] = tmp_path_factory.mktemp("root") / "stock"
        make_model(family, getattr(torch, dtype)).save_pretrained(folders[family, dtype])  # type: ignore[operator]
    return folders


@pytest.fixture(scope="module")
def written(stocks: dict[tuple[str, str], Path]) -> list[dict[Any, Any]]:
    """Each rank's problems by case."""
    return run_ranks(round_trips, WORLD, (CASES, stocks))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_layout_loads_and_resumes_what_every_other_has_written(
    case: tuple[str, str, int], written: list[dict[Any, Any]]
) -> None:
    assert [found[case] for found in written] == [[]] * WORLD


@pytest.mark.parametrize("mode", ["in order", None])
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_folders_of_slices_are_those_of_save_pretrained_in_every_byte(
    case: tuple[str, str, int],
    kind: str,
    mode: str | None,
    written: list[dict[Any, Any]],
    stocks: dict[tuple[str, str], Path],
) -> None:
    family, dtype, stage = case
    stock = stocks[family, dtype]
    folder = stock.parent / f"{family}-{dtype}-{stage}" / f"{kind}-{mode}"
    assert (folder / "model.safetensors").read_bytes() == (stock / "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", [c for c in CASES if c[1] == "float32"], ids=name_of)
def test_export_and_inspect_see_whole_parameters(
    case: tuple[str, str, int],
    written: list[dict[Any, Any]],
    stocks: dict[tuple[str, str], Path],
    tmp_path: Path,
) -> None:
    family, dtype, stage = case
    stock = stocks[family, dtype]
    folder = stock.parent / f"{family}-{dtype}-{stage}" / "cut-None"
    whole = load_file(stock / "model.safetensors")
    save_file({n: torch.zeros_like(t) for n, t in whole.items()}, folder / "model.safetensors", {"format": "pt"})
    export(folder, tmp_path / "out", dtype="fp32")  # from the master weights, whatever the files say
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(exported[name], whole[name])] == []
    state = describe(folder).state
    assert state["elements"] == sum(p.numel() for p in make_model(family).parameters())
    assert state["master_weights"] == len(list(make_model(family).parameters()))
