"""The table of where a step goes finds the functions that it times, and its rows are the step."""

import pytest

from tests.harness import run_ranks
from tests.sharding.profile_step import profile


def test_the_rows_add_up_to_the_step() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    rows = run_ranks(profile, 1, (config, 1), timeout=300)[0]
    step = rows.pop("step")
    assert sum(rows.values()) == pytest.approx(step)
    assert {"the model", "optimizer", "gradients: copy into the flat buffer", "norm"} < set(rows)
    assert all(milliseconds > 0 for milliseconds in rows.values())
