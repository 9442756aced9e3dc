"""A real file for tensor parallelism trains as it is: equal to the stock Trainer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.hf.on_ranks import record_of, run_jobs
from tests.hf.recipes import RECIPES
from tests.hf.test_trainer import check_equal

FILE = "hiyouga__LLaMA-Factory__examples__deepspeed__ds_z2_autotp_config.json"
PATH = Path(__file__).resolve().parents[4] / "shared" / "corpus" / FILE


def from_file(folder: Path, path: str) -> dict[str, Any]:
    """A Trainer whose JSON is a file of somebody else; and what share of the parameters was cut."""
    from hf_dist import DistTrainer, DistTrainingArguments, full_shape
    from tests.hf.recipes import RECIPES

    trainer = RECIPES["plain"].build(DistTrainer, DistTrainingArguments, folder, 2, dist_config=path)
    trainer.train()
    cut = [p.shape != full_shape(p) for p in trainer.model.parameters() for _ in range(p.numel())]
    return {**record_of(trainer), "share": sum(cut) / len(cut)}


@pytest.mark.skipif(not PATH.exists(), reason="the corpus is not here")
def test_the_autotp_file_of_llama_factory_trains_unchanged(tmp_path: Path) -> None:
    job = ("tests.parallel.tensor.test_corpus:from_file", {"path": str(PATH)})
    ranks = [rank[0] for rank in run_ranks(run_jobs, 2, ([job], str(tmp_path / "ours")), timeout=300)]
    trainer: Any = RECIPES["plain"].in_one_process(tmp_path / "alone", 1)
    trainer.train()
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
        assert outcome["share"] > 0.9
    check_equal(ranks[0], record_of(trainer))
