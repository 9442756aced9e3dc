"""Higher-dimensional tensor parallelism on paper: the table in the README is the formulas', and nothing in it wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.tensor.higher import RANKS, sent, table
from tests.scale.engines import LLAMA_3

README = Path(__file__).resolve().parents[3] / "hf_dist" / "parallel" / "tensor" / "RESULTS.md"


def test_the_readme_has_the_table() -> None:
    assert "\n".join(table()) in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", ["70b", "405b"])
def test_one_dimension_inside_a_machine_sends_least(model: str, ranks: int) -> None:
    found = sent(LLAMA_3[model], ranks)
    ours = found.pop("1-D of 8")
    assert ours is not None
    assert all(other is None or other >= ours for other in found.values())
