"""Whoever saves, saves the model: folders of other libraries and of users' own code equal plain DDP's in names and bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID
from tests.ecosystem.savers import FOLDERS, grown, save_masked
from tests.ecosystem.savers import OWN as OWN_KINDS
from tests.ecosystem.tiny import save_example_models
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

SENTENCES = [
    *(("plain", stage) for stage in (0, 1, 3)),
    *((kind, stage) for kind in ("dense", "lora", "best") for stage in (1, 3)),
    *((kind, 3) for kind in ("cross", "sparse", "gist", "cached")),
    *(("softmax", stage) for stage in (1, 3)),
]
OWN = [(kind, stage) for kind in OWN_KINDS for stage in (1, 3)]
if not FULL_GRID:
    # At stage 3 what is saved is in shards. Modules of the library, and parameters in a loss beside the model.
    SENTENCES = [("dense", 3), ("softmax", 1)]  # `test_resumed_library.py` has "lora"
    # "main_alone": `test_one_rank.py`.
    OWN = [("cloning", 3), ("llava", 1), ("renaming", 3), ("value_head", 3)]
Job = tuple[str, dict[str, Any]]


def sentences(kind: str, stage: int | None) -> Job:
    return ("tests.ecosystem.savers:sentences", {"kind": kind, "stage": stage, "root": ""})


def own_code(kind: str, stage: int | None) -> Job:
    return ("tests.ecosystem.savers:own_code", {"kind": kind, "stage": stage, "root": ""})


JOBS: list[Job] = [
    *(own_code(kind, None) for kind in dict.fromkeys(kind for kind, _ in OWN)),
    *(sentences(kind, None) for kind in dict.fromkeys(kind for kind, _ in SENTENCES)),
    *(sentences(kind, stage) for kind, stage in SENTENCES),
    *(own_code(kind, stage) for kind, stage in OWN),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes(job)` of the main rank; one spawn for all."""

    @functools.cache
    def run() -> dict[str, Any]:
        root = tmp_path_factory.mktemp("saving")
        save_example_models(root)
        save_masked(root)
        jobs = [(name, {**given, "root": str(root)}) for name, given in JOBS]
        results = run_ranks(run_jobs, 2, (jobs, str(root)), timeout=600)[0]
        return {str(job): result for job, result in zip(JOBS, results, strict=True)}

    def found(job: Job) -> Any:
        outcome = run()[str(job)]
        assert not isinstance(outcome, str), outcome
        return outcome

    return found


def assert_same_folder(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """The same files; weights under the same names, in the same order and dtype, as far as training is equal."""
    assert sorted(ours) == sorted(stock)
    for name, content in stock.items():
        if isinstance(content, dict):
            assert list(ours[name]) == list(content), name
            for key, tensor in content.items():
                torch.testing.assert_close(ours[name][key], tensor, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        else:
            assert ours[name] == content, name


@pytest.mark.parametrize(("kind", "stage"), SENTENCES, ids=lambda value: str(value))
def test_sentence_transformers_writes_the_folders_of_ddp(kind: str, stage: int, outcomes: Any) -> None:
    ours, stock = outcomes(sentences(kind, stage)), outcomes(sentences(kind, None))
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    for folder in FOLDERS:
        assert any(name.endswith(".safetensors") for name in stock[folder])
        assert_same_folder(ours[folder], stock[folder])


def test_a_saved_sentence_transformer_gives_the_embeddings_of_the_trained_one(outcomes: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    ours = outcomes(sentences("dense", 3))
    again = SentenceTransformer(str(Path(ours["folder"]) / "saved"), device="cpu")
    torch.testing.assert_close(again.encode(["w5 w9 w11"], convert_to_tensor=True), ours["embedding"])


@pytest.mark.parametrize(("kind", "stage"), OWN, ids=lambda value: str(value))
def test_code_of_users_writes_the_folders_of_ddp(kind: str, stage: int, outcomes: Any) -> None:
    ours, stock = outcomes(own_code(kind, stage)), outcomes(own_code(kind, None))
    assert any(name.endswith(".safetensors") for name in stock["checkpoint-2"])
    for folder in FOLDERS:
        assert_same_folder(ours[folder], stock[folder])


@pytest.mark.parametrize("stage", [*[1] * FULL_GRID, 3])
def test_a_model_that_loads_by_itself_does_so_on_resume(stage: int, tmp_path: Path) -> None:
    ours, stock = grown(tmp_path / "ours", stage), grown(tmp_path / "stock", None)
    assert len(stock["seen in 4"]) == 8
    assert {key: ours[key] for key in stock if key != "folder"} == {key: stock[key] for key in stock if key != "folder"}
    weights, expected = (found["folder"]["model.safetensors"] for found in (ours, stock))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
