"""A few of TRL's trainers against plain DDP on the same two ranks; all of them: `python -m tests.sweep trl`."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.ecosystem.tiny import save_models
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs
from tests.sharding.loop import TOLERANCE

pytest.importorskip("trl", reason="TRL needs Python 3.11")
from tests.ecosystem.trl_trainers import ALIASES, RECIPES, difference_of, save_teacher, trainers

Case = tuple[str, int | None, bool, bool]
"""Trainer, stage (None: DDP), adapters, whether HF's continuous batching generates."""

CASES: list[Case] = [
    ("DistillationTrainer", 3, False, False),  # a teacher's head is read when its forward is over
    ("KTOTrainer", 3, False, False),
    ("async_grpo.AsyncGRPOTrainer", 3, True, False),  # streams weights to a server
    ("bema_for_ref_model.DPOTrainer", 3, False, False),  # a callback that reads all weights
    ("iw_opd.IWOPDTrainer", 1, True, False),  # generates where a batch is prepared
    ("online_dpo.OnlineDPOTrainer", 3, False, False),  # a `training_step` of its own
    ("sdpo.SDPOTrainer", 3, True, False),  # a second adapter that follows the first
    ("GRPOTrainer", 3, False, True),
    ("RLOOTrainer", 3, True, True),
]
if not FULL_GRID:  # the others go through what `test_parity.py`, `test_vllm.py` and these have
    FEW = ("DistillationTrainer", "bema_for_ref_model.DPOTrainer", "GRPOTrainer")
    CASES = [case for case in CASES if case[0] in FEW]
if FULL_GRID:
    CASES = [(name, stage, adapters, False) for name in RECIPES for stage in (1, 3) for adapters in (False, True)]
    CASES = [case for case in CASES if case[0] != "bema_for_ref_model.DPOTrainer" or not case[2]]  # fails under DDP
    CASES += [
        (name, stage, a, True) for name in ("GRPOTrainer", "RLOOTrainer") for stage in (1, 3) for a in (False, True)
    ]

BATCHING = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 16, "page_size": 32, "max_batch_tokens": 64},
}
"""Without the sizes HF takes the memory of the machine."""


def reference_of(case: Case) -> Case:
    """Plain DDP."""
    return (case[0], None, *case[2:])


def job_of(case: Case, root: str) -> tuple[str, dict[str, Any]]:
    """For `run_jobs`."""
    name, stage, adapters, batches = case
    given = {"name": name, "stage": stage, "adapters": adapters, "root": root, **(BATCHING if batches else {})}
    return "tests.ecosystem.trl_trainers:run", given


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes()[case]` of the main rank; one spawn for all."""

    @functools.cache
    def run() -> dict[Case, Any]:
        root = tmp_path_factory.mktemp("trl")
        save_models(root)
        save_teacher(root)
        every = list(dict.fromkeys([*map(reference_of, CASES), *CASES]))
        jobs = [job_of(case, str(root)) for case in every]
        results = run_ranks(run_jobs, 2, (jobs, str(root)), timeout=7200 if FULL_GRID else 900)[0]
        return dict(zip(every, results, strict=True))

    return run


@pytest.mark.timeout(7300 if FULL_GRID else 1000)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-z{c[1]}{'-lora' * c[2]}{'-continuous-batching' * c[3]}")
def test_equals_the_same_trainer_under_ddp(case: Case, outcomes: Any) -> None:
    outcome, expected = outcomes()[case], outcomes()[reference_of(case)]
    assert not isinstance(expected, str), expected
    assert not isinstance(outcome, str), outcome
    assert len(expected["log"]["loss"]) > 2 and min(expected["log"]["grad_norm"]) > 0
    worst, where = difference_of(outcome, expected)
    assert worst <= TOLERANCE, (where, worst)


def test_every_trainer_of_the_installed_trl_has_a_recipe() -> None:
    new = set(trainers()) - set(RECIPES) - set(ALIASES)
    gone = (set(RECIPES) | set(ALIASES)) - set(trainers())
    assert not new, f"{sorted(new)}: add recipes to trl_trainers.py, then `python -m tests.sweep trl --write`"
    assert not gone, f"{sorted(gone)}: not in this TRL any more"


def test_names_that_trl_keeps_are_the_classes_of_others() -> None:
    for name, other in ALIASES.items():
        assert issubclass(trainers()[name], trainers()[other])
