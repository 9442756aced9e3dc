"""One training that changes its mixture of axes at every step: numbers, tokens and files of the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.harness import run_ranks
from tests.parity import mixed_life
from tests.parity.mixed_life import CHAIN
from tests.parity.train import relative


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    ours, stock = (tmp_path_factory.mktemp(name) for name in ("ours", "stock"))
    found = run_ranks(mixed_life.whole_life, 4, (str(ours),), timeout=600)
    expected = mixed_life.stock_life(str(stock))
    return found, expected, ours, stock


@pytest.mark.parametrize("step", range(len(CHAIN)))
def test_each_layout_goes_on_where_the_one_before_has_stopped(step: int, lives: Any) -> None:
    found, expected, *_ = lives
    for rank in found:
        for key in ("loss", "grad_norm", "eval_loss"):
            assert rank[step][key] == pytest.approx(expected[step][key], rel=1e-5), key
        assert rank[step]["tokens"] == expected[step]["tokens"]


@pytest.mark.parametrize("step", range(len(CHAIN)))
def test_each_checkpoint_is_the_model_of_one_process(step: int, lives: Any) -> None:
    *_, ours, stock = lives
    name = f"checkpoint-{step + 1}/model.safetensors"
    saved, expected = load_file(ours / name), load_file(stock / name)
    assert saved.keys() == expected.keys()
    for key, value in expected.items():
        assert relative(saved[key], value) < 1e-5, key
