"""What trains nothing, or trains on tokens that do not exist, ends with an error in every layout, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.hf.layout_jobs import matrices, stages
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.hf.refused import VALUES, detached

JOBS, PP, TP = "tests.hf.refused:", stages(2), matrices(2)
UNTILED = {**TP, "hf_dist": {"tiled_loss": False}}
OUT: list[Job] = [
    (JOBS + "out_of_range", {"config": layout, "key": key, "value": value})
    for layout in (TP, UNTILED)
    for key, values in VALUES.items()
    for value in values
    if layout is TP or value == -1
]
FROZEN: list[Job] = [(JOBS + "frozen", {"config": layout}) for layout in (PP, TP)]
ATTENTIONS: Job = (JOBS + "attentions", {"config": TP})
EDGE: Job = (JOBS + "at_the_edge", {"config": TP})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world({2: [*OUT, *FROZEN, EDGE, ATTENTIONS]}, tmp_path_factory)


@pytest.mark.parametrize("job", OUT, ids=lambda job: f"{job[1]['key']}-{job[1]['value']}-{len(job[1]['config'])}")
def test_an_id_or_a_label_of_no_row_raises_on_every_rank(job: Job, outcomes: Any) -> None:
    for (error,) in found(outcomes, 2, job):
        wanted = (
            "index out of range in self"
            if job[1]["key"] == "input_ids"
            else f"Target {job[1]['value']} is out of bounds"
        )
        assert wanted in error


def test_the_attention_of_all_heads_is_refused_where_a_rank_has_some(outcomes: Any) -> None:
    for (error,) in found(outcomes, 2, ATTENTIONS):
        assert "output_attentions asks LlamaForCausalLM for the attention of all heads" in error


def test_the_last_row_is_one(outcomes: Any) -> None:
    assert found(outcomes, 2, EDGE) == [[""], [""]]


@pytest.mark.parametrize("job", FROZEN, ids=lambda job: next(iter(job[1]["config"])))
def test_a_frozen_model_is_refused_by_name(job: Job, outcomes: Any) -> None:
    for (error,) in found(outcomes, 2, job):
        assert "no parameter of LlamaForCausalLM requires grad" in error


def test_a_loss_without_a_gradient_is_torchs_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        run_ranks(detached, 2, (str(tmp_path), PP))
