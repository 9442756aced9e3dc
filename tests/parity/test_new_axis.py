"""A new axis is a row of the table of axes and a row of what is done to a group's gradient; nothing else knows its name.

`dp_outer` exists in this test only: copies of the copies, outside of `dp_replicate`. On 4 ranks it equals one process, alone
with shards inside, and together with `dp_replicate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.attempts import attempts
from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parity import pipelines
from tests.parity.pipelines import PipelineCase
from tests.parity.train import Case, reference, relative, train_on_rank

STAGES = (0, 1, 2, 3)
SIZES: dict[str, dict[str, int]] = {
    "outer-over-shards": {"dp_outer": 2, "dp_shard": 2},
    "outer-over-copies": {"dp_outer": 2, "dp_replicate": 2},
}
CASES = [(name, Case("llama", stage, accumulation=3, tied=True)) for name in SIZES for stage in STAGES]
CASES = CASES if FULL_GRID else [CASES[i] for i in (1, 3, 4, 6)]  # shards at stages 1 and 3, copies at 0 and 2
STAGED: list[tuple[str, PipelineCase]] = [
    (name, PipelineCase("Llama", pp=2, dp=2, stage=stage, microbatches=2, tied=True))
    for name in ("dp_outer", "dp_replicate")
    for stage in (0, 1)
]
"""Weights that two stages hold, over copies of the pipeline: two rows for one group."""


def add_the_row() -> None:
    """All that a second axis of copies needs."""
    from hf_dist.dist.axes import AXES
    from hf_dist.sharding import group_axes

    rows: Any = dict(AXES)
    AXES.clear()  # type: ignore[attr-defined]
    AXES.update({"pp": rows.pop("pp"), "dp_outer": ("world", "dp", "data"), **rows})  # type: ignore[attr-defined]
    group_axes.DENSE = (*group_axes.DENSE, ("dp_outer", "mean"))


def train(rank: int, world: int) -> tuple[list[Any], list[Any]]:
    """Every case; what a rank owns of all weights is counted beside."""
    from hf_dist.checkpoint.training_state import owned_parts
    from hf_dist.dist.axes import Axes
    from hf_dist.engine import build
    from hf_dist.engine.engine import Engine

    add_the_row()
    owned: list[int] = []
    apply = Engine.apply_gradients

    def counted(self: Engine) -> None:
        owned.append(sum(part.values.numel() for _, part in owned_parts(self.sharded, lambda name, values: values)))
        apply(self)

    Engine.apply_gradients = counted  # type: ignore[assignment, method-assign]

    def run(sizes: dict[str, int], train: Callable[..., dict[str, Any]], case: Any) -> Any:
        build.axes_of = lambda config, ranks, **_: Axes(sizes)  # type: ignore[assignment]
        return {**train(rank, world, case), "owned": owned[-1]}

    jobs = [functools.partial(run, SIZES[name], train_on_rank, case) for name, case in CASES]
    staged = pipelines.with_shared_plans(rank, world)
    jobs += [
        functools.partial(run, {"pp": 2, name: 2}, lambda _, __, case: staged(case), case) for name, case in STAGED
    ]
    found = attempts(rank, world, jobs)
    return found[: len(CASES)], found[len(CASES) :]


@functools.cache
def results() -> list[tuple[list[Any], list[Any]]] | str:
    """One spawn."""
    try:
        return run_ranks(train, 4, timeout=600)
    except RuntimeError as error:
        return str(error)


def check(ranks: list[Any], expected: dict[str, Any]) -> None:
    """Losses, norms and weights; every element is written by one rank."""
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
    for outcome in ranks:
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for name, weight in outcome["weights"].items():
            assert relative(weight, expected["weights"][name]) < 1e-5, name
    assert {name for outcome in ranks for name in outcome["weights"]} == expected["weights"].keys()
    assert sum(outcome["owned"] for outcome in ranks) == sum(w.numel() for w in expected["weights"].values())


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name}-z{case.stage}" for name, case in CASES])
def test_an_axis_that_is_a_row_equals_one_process(index: int) -> None:
    everyone = results()
    assert not isinstance(everyone, str), everyone
    check([whole[index] for whole, _ in everyone], reference(Case("llama", accumulation=3, tied=True)))


@pytest.mark.parametrize("index", range(len(STAGED)), ids=[f"{name}-z{case.stage}" for name, case in STAGED])
def test_weights_of_two_stages_over_copies_of_the_pipeline_equal_one_process(index: int) -> None:
    everyone = results()
    assert not isinstance(everyone, str), everyone
    check([staged[index] for _, staged in everyone], pipelines.reference(*STAGED[index][1].work))
