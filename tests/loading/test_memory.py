"""Loading a model takes no more host memory per rank than its shard and a little."""

from __future__ import annotations

import pytest

from tests.covering import FULL_GRID
from tests.loading.memory import run


@pytest.mark.parametrize("dtype", ["bfloat16", *(["float32"] if FULL_GRID else [])])
def test_peak_is_the_shard_and_at_most_the_largest_tensor(dtype: str) -> None:
    for rank in run(hidden=704, ranks=4, dtype=dtype):  # 160M parameters
        assert rank["peak"] <= 1.3 * rank["shard"] + rank["largest"], rank
        assert rank["read"] <= 1.2 * rank["stored"] / 4, rank
