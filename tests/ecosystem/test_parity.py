"""Trainers, TRL's trainers and raw accelerate loops equal the same script under plain DDP on the same two ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.covering import FULL_GRID, Cell, cells, chosen
from tests.ecosystem.tiny import save_models
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

needs.package("trl", "TRL needs Python 3.11")
TOLERANCE = 1e-5
KINDS = ("raw", "trainer", "seq2seq", "sft", "dpo", "reward", "grpo")
AXES = {"kind": KINDS, "stage": (1, 2, 3), "adapters": (False, True), "checkpointing": (False, True)}
Case = tuple[str, int, bool, bool]


def settings(cell: Cell) -> Cell:
    """Every kind below stage 3 and at it, every value of the others."""
    return {
        "kind": (cell["kind"], cell["stage"] == 3),
        **{axis: cell[axis] for axis in ("stage", "adapters", "checkpointing")},
    }


ALL: list[Case] = [
    *(tuple(cell.values()) for cell in chosen(cells(AXES, full=True), settings, 1)),
    *((kind, 3, False, False) for kind in ("by_hand", "two_models", "packed", "synced", "precomputed")),
    *((kind, 2, True, False) for kind in ("by_hand", "precomputed")),
    *((kind, 1, False, True) for kind in ("by_hand", "two_models", "synced")),
]
# Most at stage 3, where every weight is gathered. Of a kind that differs by its rows alone there is one: "synced" is DPO whose
# reference changes, and `test_shared_rows.py` has "raw", "packed" and "grpo".
FEW: list[Case] = [
    *(("seq2seq", 3, False, False), ("sft", 3, True, True), ("synced", 3, False, False), ("by_hand", 3, False, False)),
    ("two_models", 1, False, True),
]
CASES = ALL if FULL_GRID else FEW
OVER_STAGES = ("sft", "reward") if FULL_GRID else ("sft",)
UNEVEN = [("reward", None), *[("reward", 1)] * FULL_GRID, ("reward", 3), *[("dpo", None), ("dpo", 3)] * FULL_GRID]


def run_of(case: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of `runs.run`."""
    return dict(zip(("kind", "stage", "adapters", "checkpointing"), case, strict=True), root="")


REST: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped_by_json": ("tests.ecosystem.loops:clipped_by_json", {"norm": 0.25}),
    "errors": ("tests.ecosystem.loops:errors", {}),
    "refused_over_stages": ("tests.ecosystem.runs:refused_over_stages", {"root": ""}),
    **{f"{kind}_over_stages": ("tests.ecosystem.runs:run", run_of((kind, 4, True, False))) for kind in OVER_STAGES},
}

REST |= {
    f"uneven_{kind}_{stage}": ("tests.ecosystem.runs:uneven", {"kind": kind, "stage": stage, "root": ""})
    for kind, stage in UNEVEN
}


def reference_of(case: Case) -> tuple[Any, ...]:
    """DDP, which needs no gradient checkpointing to give the same numbers."""
    return (case[0], None, case[2], False)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes()[kind, stage or None, adapters, checkpointing]` of the main rank; one spawn for all."""

    @functools.cache
    def run() -> dict[Any, Any]:
        root = tmp_path_factory.mktemp("ecosystem")
        save_models(root)
        references = dict.fromkeys(map(reference_of, CASES))
        every = [*references, *CASES]
        jobs = [("tests.ecosystem.runs:run", {**run_of(case), "root": str(root)}) for case in every]
        jobs += [(job, {**given, "root": str(root)} if "root" in given else given) for job, given in REST.values()]
        results = run_ranks(run_jobs, 2, (jobs, str(root)), timeout=7200 if FULL_GRID else 1500)[0]
        return dict(zip([*every, *REST], results, strict=True))

    return run


@pytest.mark.timeout(7300 if FULL_GRID else 1800)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-z{c[1]}{'-lora' * c[2]}{'-checkpointing' * c[3]}")
def test_equals_the_same_script_under_ddp(case: Case, outcomes: Any) -> None:
    outcome, reference = outcomes()[case], outcomes()[reference_of(case)]
    assert not isinstance(reference, str), reference
    assert not isinstance(outcome, str), outcome
    assert len(reference["losses"]) > 2
    assert len(set(reference["losses"])) > 2 and min(reference["norms"]) > 0
    assert outcome.keys() == reference.keys()
    for key in reference:
        assert outcome[key] == pytest.approx(reference[key], rel=TOLERANCE, abs=1e-6), key


def test_a_loop_is_clipped_by_the_json_where_the_script_does_not(outcomes: Any) -> None:
    by_json, by_script = outcomes()["clipped_by_json"]
    assert by_json == pytest.approx(by_script, rel=1e-7)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("accumulation", "gradient_accumulation_steps: 2 differs from the 4"),
        ("engine", "fsdp_plugin: starts another engine"),
        ("config", "HF_DIST_CONFIG"),
        ("batch", "train_micro_batch_size_per_gpu: 4 differs from the 2 rows"),
        ("clipping", "gradient_clipping: 0.5 differs from max_norm=1.0"),
        ("uneven", "same number of batches"),
    ],
)
def test_a_script_that_contradicts_its_json_is_told_so(name: str, says: str, outcomes: Any) -> None:
    assert says in outcomes()["errors"][name]


@pytest.mark.parametrize(("kind", "stage"), [case for case in UNEVEN if case[1] is not None])
def test_sets_whose_rows_are_halves_of_samples_are_evaluated_as_under_ddp(kind: str, stage: int, outcomes: Any) -> None:
    outcome, reference = outcomes()[f"uneven_{kind}_{stage}"], outcomes()[f"uneven_{kind}_None"]
    assert not isinstance(reference, str), reference
    assert not isinstance(outcome, str), outcome
    assert len(reference) > 3
    assert outcome == pytest.approx(reference, rel=TOLERANCE, abs=1e-6)


@pytest.mark.parametrize("kind", OVER_STAGES)
def test_over_pipeline_stages_equals_one_process(kind: str, outcomes: Any, tmp_path: Path) -> None:
    save_models(tmp_path)
    jobs = [("tests.ecosystem.runs:run", {**run_of((kind, None, True, False)), "root": str(tmp_path)})]
    outcome, reference = outcomes()[f"{kind}_over_stages"], run_ranks(run_jobs, 1, (jobs, str(tmp_path)))[0][0]
    assert not isinstance(outcome, str), outcome
    own = {"sft": {"entropy", "mean_token_accuracy", "eval_entropy"}, "reward": {"accuracy", "margin", "eval_accuracy"}}
    assert outcome.keys() == reference.keys() > {"losses", "norms", "evaluated", "num_tokens", *own[kind]}
    for key in reference:
        assert outcome[key] == pytest.approx(reference[key], rel=TOLERANCE, abs=1e-6), key


@pytest.mark.parametrize(("kind", "name"), [("dpo", "DPOTrainer"), ("grpo", "GRPOTrainer")])
def test_steps_that_are_more_than_one_forward_are_refused_over_stages(kind: str, name: str, outcomes: Any) -> None:
    assert f"pipeline.stages: 2 cannot be combined with {name}" in outcomes()["refused_over_stages"][kind]
