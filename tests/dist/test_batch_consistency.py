"""Ranks that compute one model read batches of other forms: every rank raises the same error at once, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_dist.errors import ModelError
from tests.harness import run_ranks
from tests.parity.families import make_model

Batch = dict[str, torch.Tensor]
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline": {"stages": 2}},
    "tp": {"tensor_parallel": {"autotp_size": 2}},
    "cp": {"sequence_parallel_size": 2},
}
OTHER: dict[str, Callable[[Batch], Batch]] = {
    "dtype": lambda batch: batch | {"input_ids": batch["input_ids"].int()},
    "more entries": lambda batch: batch | {"position_ids": torch.arange(8).expand(4, -1)},
    "fewer entries": lambda batch: {key: value for key, value in batch.items() if key != "attention_mask"},
    "shorter rows": lambda batch: {key: value[:, :6] for key, value in batch.items()},
    "fewer rows": lambda batch: {key: value[:2] for key, value in batch.items()},
    "other rows": lambda batch: batch | {"input_ids": batch["input_ids"].flip(0)},
}
NAMED = {
    "dtype": "input_ids is 4x8 int32 in microbatch 1, not 4x8 int64",
    "more entries": "position_ids of 4x8 int64 in microbatch 1, which stage 0 has not",
    "fewer entries": "no attention_mask in microbatch 1",
    "shorter rows": "input_ids is 4x6 int64 in microbatch 1, not 4x8 int64",
    "fewer rows": "input_ids is 2x8 int64 in microbatch 1, not 4x8 int64",
    "other rows": "reads other data",
}
"""What a pipeline says; ranks of the other axes compare a digest of everything, in each forward."""


def batch(number: int) -> Batch:
    ids = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def steps_with_others(rank: int, world: int, layout: str) -> dict[str, str]:
    """Good steps, and after each of them one in which rank 1 reads something else in its second microbatch."""
    import hf_dist

    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, **LAYOUTS[layout]}
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer)
    said = {}
    for number, (what, other) in enumerate(OTHER.items()):
        engine.train_batch(iter([batch(3 * number), batch(3 * number + 1)]))
        second = batch(3 * number + 2)
        try:
            engine.train_batch(iter([batch(3 * number), other(second) if rank == 1 else second]))
        except ModelError as error:
            said[what] = str(error)
    assert bool(torch.isfinite(engine.train_batch(iter([batch(98), batch(99)]))))
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_another_form_is_named_on_every_rank(layout: str) -> None:
    first, second = run_ranks(steps_with_others, 2, (layout,), timeout=120)
    assert first.keys() == second.keys() == OTHER.keys()
    for what, said in first.items():
        if layout == "pp":
            assert NAMED[what] in said, said
        else:
            assert "rank 1 reads another batch than rank 0" in said, said
