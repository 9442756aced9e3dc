"""An expert-parallel model in the Trainer, on disk and in generation: as in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID, FULL_GRID_ONLY, some_of
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs
from tests.hf.recipes import RECIPES, make_model
from tests.hf.test_lifecycle import equal
from tests.hf.test_trainer import check_equal
from tests.parallel.experts import life_jobs

HERE = "tests.parallel.experts.life_jobs:"
HALF: dict[str, Any] = {"max_steps": 4}
LENGTH = {} if FULL_GRID else HALF
"""An epoch has four steps, the last one with a shorter window."""
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"trained-z{stage}": (HERE + "trained", {"stage": stage, **LENGTH}) for stage in (1, 3)},
    **{
        f"{dtype}{'' if spread else '-gathered'}": (
            HERE + "trained",
            {"stage": 3, "spread": spread, "sections": {dtype: {"enabled": True}}, **HALF},
        )
        for dtype in ("bf16", "fp16")
        for spread in (True, False)
    },
    "saved": (HERE + "saved", {"stage": 3, "config": life_jobs.SPREAD}),
    "resumed": ("tests.hf.lifecycle:resumed", {"recipe": "moe", "stage": 2, "at": (3,), "config": life_jobs.SPREAD}),
    "streamed": (HERE + "streamed", {}),
    **{f"generated-z{stage}": (HERE + "generated", {"stage": stage, "config": life_jobs.SPREAD}) for stage in (1, 3)},
    "trained-split": (HERE + "trained", {"stage": 3, "sections": life_jobs.SPLIT, **LENGTH}),
    "saved-split": (HERE + "saved", {"stage": 1, "config": life_jobs.SPLIT}),
    "generated-split": (HERE + "generated", {"stage": 1, "config": life_jobs.SPLIT}),
}
"""`split`: on four ranks, of which two cut the matrices."""
# What a run saves and resumes, half precision, and files beside cut matrices are in `parity/test_mixed.py`,
# `tools/test_check.py` and `hf/test_lifetimes.py`, too.
JOBS = some_of(JOBS, "saved", "streamed", "generated-z3", "trained-split")
WORLDS = {2: [name for name in JOBS if "split" not in name], 4: [name for name in JOBS if "split" in name]}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes(name)` of every rank; a spawn for each number of ranks."""
    root = tmp_path_factory.mktemp("life")
    make_model("moe").save_pretrained(root / "source")

    @functools.cache
    def run(world: int) -> list[list[Any]]:
        jobs = [
            (f, {**given, "source": str(root / "source")} if f.endswith("streamed") else given)
            for f, given in (JOBS[name] for name in WORLDS[world])
        ]
        return run_ranks(run_jobs, world, (jobs, str(root / str(world))), timeout=600)

    def of(name: str) -> list[Any]:
        world, names = next(row for row in WORLDS.items() if name in row[1])
        found = [rank[names.index(name)] for rank in run(world)]
        assert not any(isinstance(outcome, str) for outcome in found), found[0]
        return found

    return of


@functools.cache
def stock(folder: Path) -> dict[str, Any]:
    """The stock Trainer in one process."""
    trainer = RECIPES["moe"].in_one_process(folder, 2, **LENGTH)
    trainer.train()
    return {**life_jobs.record_of(trainer), "evaluated": life_jobs.evaluated(trainer)}


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("trained")])
def test_the_trainer_gives_the_numbers_of_one_process(
    name: str, outcomes: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ranks, expected = outcomes(name), stock(tmp_path_factory.getbasetemp())
    found = ranks[0]
    check_equal(found, expected)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
    assert found["ep"] == 2  # "auto": both ranks are of one machine, and 2 divides 4 experts
    for expert, rank in found["loads"]:
        assert 1 <= rank <= 2 and rank <= expert <= 4
    load = found["load_file"]
    readers = ranks[:: 2 if "split" in name else 1]  # ranks that cut matrices between them route the same rows
    assert load.layers == {path: sum(rank["routed"][path] for rank in readers).tolist() for path in found["routed"]}
    assert (load.ranks, load.first_step, load.last_step) == (2, 1, len(found["losses"]))


@FULL_GRID_ONLY
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_as_close_as_gathering(dtype: str, outcomes: Any) -> None:
    spread, gathered = outcomes(dtype)[0], outcomes(f"{dtype}-gathered")[0]
    assert spread["losses"] == pytest.approx(gathered["losses"], rel=3e-3)
    assert spread["norms"] == pytest.approx(gathered["norms"], rel=3e-2)


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("saved")])
def test_the_folder_is_the_one_of_save_pretrained_byte_for_byte(name: str, outcomes: Any) -> None:
    folders = outcomes(name)[0]
    ours, theirs = (Path(folders[key], "model.safetensors").read_bytes() for key in ("ours", "stock"))
    assert ours == theirs


@FULL_GRID_ONLY
def test_a_resumed_run_is_the_one_without_a_break_bit_for_bit(outcomes: Any) -> None:
    for rank in outcomes("resumed"):
        whole, run = rank["whole"], rank["runs"][3]
        assert run["logs"] == whole["logs"]
        assert equal(run["state"], whole["state"])


def test_a_rank_reads_its_experts_only(outcomes: Any) -> None:
    for rank in outcomes("streamed"):
        assert rank["wrong"] == []
        # At stage 0 each rank reads its shard of what is replicated, and all of its own experts.
        assert rank["read"] <= rank["experts"] // 2 + rank["rest"] // 2 + 4096


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("generated")])
def test_a_prepared_model_generates_with_prompts_of_any_length(name: str, outcomes: Any) -> None:
    model = make_model("moe").eval()
    for prompt, tokens in outcomes(name)[0]:
        rows = torch.tensor(prompt)
        assert life_jobs.generate(model, rows, len(tokens[0]) - rows.shape[1]) == tokens
