"""What kind of loss a model has is decided by rows that can tell, by all ranks together, whichever rows come first.

Rows without labels may be anywhere; every step equals the stock Trainer's in one process on the joined batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.hf.loss_probe import _in_rows
from tests.hf.loss_kinds import KINDS, UNTOLD, Net, outcome, rows
from tests.hf.on_ranks import Job, found, outcomes_by_world
from tests.window.test_raw_loops import RELATIVE

STEP = 4
"""Rows of a step."""
# Rows of the first microbatch, of the second one, of one rank's first, of both ranks' first, of a whole step.
UNLABELLED = [frozenset(rows) for rows in ((0, 1), (2, 3), (0,), (0, 2), (1, 3), (0, 1, 2, 3))]
JOBS: list[tuple[str, frozenset[int], int, int]] = [
    ("auxiliary" if i % 3 == 0 else "counted", rows, 1 + i % 2, 2 - i % 2) for i, rows in enumerate(UNLABELLED)
] + [
    (kind, rows, batch, STEP // 2 // batch)
    for kind, rows in (
        ("sum", frozenset()),
        ("mean", UNLABELLED[0]),
        ("mixed", UNLABELLED[2]),
        ("wrapped", UNLABELLED[0]),
        ("shifted", UNLABELLED[2]),
        ("believed", UNLABELLED[2]),
        ("fresh", frozenset()),
        ("looking", frozenset()),
        *((f"{cls} {kind}", UNLABELLED[2]) for cls in ("declining", "closed") for kind in UNTOLD),
    )
    for batch in (1, 2)
]


def ours(job: tuple[str, frozenset[int], int, int]) -> Job:
    """The job of each of two ranks."""
    kind, rows, batch, accumulation = job
    given = {"kind": kind, "unlabelled": rows, "batch": batch, "accumulation": accumulation, "ours": True}
    return "tests.hf.loss_kinds:outcome", given


RARELY: Job = (ours(("mean", frozenset(), 2, 1))[0], {**ours(("mean", frozenset(), 2, 1))[1], "logging_steps": 2})
"""The last of three steps is not logged."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world({2: [*(ours(job) for job in JOBS), RARELY]}, tmp_path_factory)


def equal(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """Losses, norms and weights."""
    for key in ("losses", "norms"):
        assert ours[key] == pytest.approx(stock[key], rel=RELATIVE, abs=RELATIVE), key
    for name, value in stock["weights"].items():
        assert ours["weights"][name].numpy() == pytest.approx(value.numpy(), rel=RELATIVE, abs=RELATIVE), name


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_two_ranks_equal_one_process(job: Any, outcomes: Any, tmp_path: Path) -> None:
    kind, rows, _, _ = job
    equal(found(outcomes, 2, ours(job))[0], outcome(tmp_path, kind, rows, STEP, 1, ours=False))


def test_the_loss_of_a_run_is_that_of_all_ranks_also_after_the_last_log(outcomes: Any, tmp_path: Path) -> None:
    wanted = outcome(tmp_path, "mean", frozenset(), STEP, 1, ours=False, logging_steps=2)["train_loss"]
    for rank in found(outcomes, 2, RARELY):
        assert rank["train_loss"] == pytest.approx(wanted, rel=RELATIVE)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(kind="mixed", rows=frozenset({0}), batch=1)  # the first rows leave the mean alone
@example(kind="fresh", rows=frozenset(), batch=2)  # the losses of two thirds differ by a few roundings
@example(kind="closed sum", rows=frozenset(), batch=1)
@given(
    kind=st.sampled_from((*KINDS, *(f"declining {kind}" for kind in UNTOLD))),
    rows=st.frozensets(st.integers(0, 7), max_size=3),
    batch=st.sampled_from([1, 2]),
)
def test_accumulation_equals_the_joined_batch(kind: str, rows: frozenset[int], batch: int, tmp_path: Path) -> None:
    equal(
        outcome(tmp_path, kind, rows, batch, STEP // batch, ours=True),
        outcome(tmp_path, kind, rows, STEP, 1, ours=False),
    )


def test_batches_with_tensors_that_are_no_rows_are_not_repeated() -> None:
    row = torch.ones(1, 8)
    assert _in_rows({"input_ids": row, "labels": row, "name": "x", "scale": torch.tensor(2.0)})
    assert not _in_rows({"input_ids": row, "labels": row, "cu_seq_lens": torch.tensor([0, 3, 8])})
    assert not _in_rows({"input_ids": row.repeat(2, 1), "position_ids": torch.ones(3, 2, 8)})


def test_a_trainer_with_stock_arguments_is_its_base(tmp_path: Path) -> None:
    losses = []
    for kind in (DistTrainer, Trainer):
        args = TrainingArguments(str(tmp_path), max_steps=2, logging_steps=1, report_to="none", use_cpu=True)
        trainer: Any = kind(model=Net("counted"), args=args, train_dataset=rows(frozenset()))
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]


class Pairs(DistTrainer):
    """Calls of its own: the batch has two texts, and no key that the model's forward names."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(input_ids=torch.cat((inputs["chosen"], inputs["rejected"])))
        chosen, rejected = output.logits.squeeze(-1).chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        return (loss, output) if return_outputs else loss


def test_a_model_is_not_run_on_a_batch_of_which_it_takes_nothing(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=0)
    data = [{"chosen": torch.full((4,), n + 1), "rejected": torch.full((4,), 9 - n)} for n in range(4)]
    losses = []
    for batch in (4, 1):
        torch.manual_seed(0)
        args = DistTrainingArguments(
            str(tmp_path),
            dist_config={"zero_optimization": {"stage": 1}},
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=4 // batch,
            **{"label_names": ["chosen"], "remove_unused_columns": False, "max_steps": 2, "use_cpu": True},
            **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1},
        )
        trainer = Pairs(model=LlamaForSequenceClassification(config), args=args, train_dataset=data, eval_dataset=data)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        losses[-1].append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
