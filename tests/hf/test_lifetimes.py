"""Weights belong to the model object, not to its Trainer: what happens after the Trainer, or under a second one, equals DDP's.

The stock Trainer in one process on the joined batches is the reference, story by story.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf import lifetimes
from tests.hf.lifetimes import Weights, small_model
from tests.references import shared

STAGES = (0, 1, 3) if FULL_GRID else (1, 3)
LAYOUTS: list[tuple[int, str, tuple[str, ...]]] = [
    (1, "plain", ("pp", "tp", "cp", "")),
    (3, "plain", ("tp", "pp", "pp", "cp")),
    (3, "lora", ("pp", "tp", "")),
    (1, "experts", ("ep", "pp", "cp")),
    (3, "experts", ("pp", "ep", "ep")),
]
"""Stage, model, and along what it is cut, one training after the other."""
DROPPED: list[tuple[int, str, bool]] = [
    *((stage, "", False) for stage in STAGES),
    (3, "", True),
    *((1, cut, False) for cut in ("pp", "tp", "cp")),
]
"""Stage, along what the model is cut, whether adapters are trained."""
PICKLED: list[tuple[int, str, bool]] = [
    *((stage, "", lora) for stage in STAGES for lora in (False, True)),
    *((1, cut, False) for cut in ("pp", "tp")),
]
"""As `DROPPED`."""
LOADED: list[tuple[int, str, str]] = [
    *((3, kind, "pp") for kind in ("experts", "lora")),
    *((1, kind, cut) for kind, cut in (("plain", "pp"), ("experts", "ep"), ("plain", "tp"))),
    (3, "lora", ""),
]
"""Stage, model, along what it is cut."""
CHANGED: list[tuple[int, str, str]] = [
    *((stage, kind, "") for stage, kind in ((0, "plain"), (1, "lora"), (3, "plain"), (3, "lora"))),
    (1, "plain", "pp"),
]
"""As `LOADED`."""
OUTLIVES: list[tuple[int, bool]] = [(stage, lora) for stage in STAGES for lora in (False, True)]
"""Stage, whether adapters are trained."""
if not FULL_GRID:  # each story once; each stage, model and cut in some story
    OUTLIVES, PICKLED, LOADED, DROPPED = [(3, False)], [(3, "", True)], [(1, "experts", "ep")], [(1, "pp", False)]
    CHANGED, LAYOUTS = [(3, "plain", "")], [(3, "plain", ("tp", "pp", "cp"))]
TAKEN_OVER, EVALUATED_FIRST = (STAGES, STAGES) if FULL_GRID else (STAGES[1:], STAGES[:1])
STORIES: list[tuple[str, tuple[Any, ...]]] = [
    *(("outlives", story) for story in OUTLIVES),
    *(("alive", (stage,)) for stage in TAKEN_OVER),
    *(("evaluated_first", (stage,)) for stage in EVALUATED_FIRST),
    *(("many", (stage,)) for stage in STAGES[-1:]),
    ("half_an_optimizer", (1,)),
    *(("pickled", story) for story in PICKLED),
    *(("loaded", story) for story in LOADED),
    *(("changed", story) for story in CHANGED),
    *(("layouts", story) for story in LAYOUTS),
    *(("dropped", story) for story in DROPPED),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Any]], Path]:
    folder = tmp_path_factory.mktemp("stories")
    return run_ranks(lifetimes.stories, 2, (STORIES, str(folder)), timeout=400), folder


def outcome(told: Any, *story: Any) -> tuple[Any, Path]:
    number = STORIES.index((story[0], tuple(story[1:])))
    for rank in told[0]:
        assert not isinstance(rank[number], str), rank[number]
    return told[0][0][number], told[1] / str(number)


def alone(story: str, *how: Any) -> tuple[Any, dict[str, Weights]]:
    """What the stock Trainer makes of a story in one process, and the weights that it saved; once per test run."""

    def run() -> tuple[Any, dict[str, Weights]]:
        with tempfile.TemporaryDirectory() as folder:
            found = getattr(lifetimes, story)(None, 1, folder, *how)
            files = sorted(Path(folder).rglob("*.safetensors"))
            return found, {str(file.relative_to(folder)): load_file(file) for file in files}

    return shared(("lifetimes", story, how), run)


def close(ours: Weights, stock: Weights, start: Weights) -> None:
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        update = (value - start[name]).norm()
        assert (ours[name] - value).norm() <= 1e-5 * value.norm() and (
            update == 0 or (ours[name] != start[name]).any()
        ), name


@pytest.mark.parametrize(("stage", "lora"), OUTLIVES)
def test_a_model_outlives_its_trainer(stage: int, lora: bool, told: Any) -> None:
    ours, folder = outcome(told, "outlives", stage, lora)
    stock, saved_by_stock = alone("outlives", lora)
    start = dict(small_model(lora).named_parameters())
    assert (ours["logits"] - stock["logits"]).norm() <= 1e-5 * stock["logits"].norm()
    assert ours["tokens"] == stock["tokens"]
    for key in ("saved", "second", "third"):
        close(ours[key], stock[key], start)
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    expected = saved_by_stock[f"saved/{name}"]
    close(
        load_file(folder / "saved" / name), expected, {key: torch.zeros_like(value) for key, value in expected.items()}
    )


@pytest.mark.parametrize("stage", TAKEN_OVER)
def test_a_second_trainer_takes_the_model_over(stage: int, told: Any) -> None:
    ours, folder = outcome(told, "alive", stage)
    stock, _ = alone("alive")
    close(ours["weights"], stock["weights"], dict(small_model().named_parameters()))
    saved = load_file(folder / "by_the_first" / "model.safetensors")
    assert all(torch.equal(saved[name], ours["weights"][name]) for name in saved), "of the weights before"
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert ours["error"].startswith("ModelError: LlamaForCausalLM was taken over by another Trainer")


@pytest.mark.parametrize("stage", EVALUATED_FIRST)
def test_evaluation_then_training_then_an_ordinary_model(stage: int, told: Any) -> None:
    ours, _ = outcome(told, "evaluated_first", stage)
    stock, _ = alone("evaluated_first")
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    close(ours["weights"], stock["weights"], dict(small_model().named_parameters()))


@pytest.mark.parametrize("story", PICKLED, ids=str)
def test_a_whole_model_is_pickled_and_copied_as_an_ordinary_one(story: tuple[int, str, bool], told: Any) -> None:
    stage, cut, lora = story
    ours, _ = outcome(told, "pickled", *story)
    if cut or stage == 3:
        remedy = (
            "Call hf_dist.unprepare(model) on every rank" if cut else "Do it inside `with hf_dist.gathered(model):`"
        )
        assert len(ours["errors"]) == 3
        for error in ours["errors"]:
            assert re.match(r"ModelError: \w+ cannot be pickled or copied here \(torch.save", error) and remedy in error
        if cut:
            return
    else:
        assert ours["errors"] == []
    assert ours["ordinary"] == [[]] * 4
    stock, _ = alone("pickled", "", lora)
    for copied in ours["copies"]:
        names = [(n, trained) for n, (trained, _) in stock["copies"][0].items()]
        assert [(n, trained) for n, (trained, _) in copied.items()] == names
        assert all(torch.equal(value, ours["start"][n]) for n, (_, value) in copied.items())
    for trained in ours["trained"]:
        close(trained, stock["trained"][0], ours["start"])


@pytest.mark.parametrize(
    ("stage", "kind", "cuts"), LAYOUTS, ids=lambda part: "-".join(part) if isinstance(part, tuple) else str(part)
)
def test_one_model_under_one_layout_after_the_other(stage: int, kind: str, cuts: tuple[str, ...], told: Any) -> None:
    ours, _ = outcome(told, "layouts", stage, kind, cuts)
    stock, _ = alone("layouts", kind, cuts)
    close(ours["weights"], stock["weights"], dict(lifetimes.MODELS[kind]().named_parameters()))
    assert ours["tokens"] == ours["tokens after"] == stock["tokens after"]


@pytest.mark.parametrize("story", LOADED, ids=str)
def test_a_state_that_is_loaded_between_trainings_is_trained_on(story: tuple[int, str, str], told: Any) -> None:
    ours, _ = outcome(told, "loaded", *story)
    stock, _ = alone("loaded", *story[1:])
    assert ours["said"] == stock["said"] and len(stock["said"]) == 6
    close(ours["weights"], stock["weights"], lifetimes.MODELS[story[1]]().state_dict())


@pytest.mark.parametrize("story", CHANGED, ids=str)
def test_casts_and_other_sizes_after_training(story: tuple[int, str, str], told: Any) -> None:
    ours, _ = outcome(told, "changed", *story)
    stock, _ = alone("changed", *story[1:])
    assert (ours["logits"] - stock["logits"]).norm() <= 1e-5 * stock["logits"].norm()
    assert ours["logits"].dtype == torch.float64
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert len(ours["said"]) == 2 * lifetimes.STEPS
    assert all("during training" in said or "after training" in said for said in ours["said"])
    close(ours["weights"], stock["weights"], stock["weights"])


def test_an_optimizer_of_one_stage_is_refused_for_the_whole(told: Any) -> None:
    number = STORIES.index(("half_an_optimizer", (1,)))
    for rank in told[0]:
        assert rank[number].startswith("refused: the optimizer does not hold the same parameters on every rank")
        assert "model.embed_tokens.weight" in rank[number] and "hf_dist.unprepare(model)" in rank[number]


@pytest.mark.parametrize("story", DROPPED, ids=str)
def test_a_dropped_trainer_is_freed_at_once(story: tuple[int, str, bool], told: Any) -> None:
    for rank in told[0]:
        assert rank[STORIES.index(("dropped", story))] == []


@pytest.mark.parametrize("stage", STAGES[-1:])
def test_nothing_is_left_of_trainers_before(stage: int, told: Any) -> None:
    number = STORIES.index(("many", (stage,)))
    for rank in told[0]:
        left = rank[number]
        assert not isinstance(left, str), left
        print(left)
        assert {(shards, groups) for shards, groups, *_ in left} == {(1, 3)}, "of the model that is there"
        before, after = left[1], left[-1]
        assert len({nbytes for _, _, nbytes, *_ in left[len(left) // 2 :]}) == 1, "bytes of tensors"
        assert after[3] == before[3], "process groups"
        # At least four Trainers later: one thread or file of each would be four. Collectives of gloo end in their own time.
        assert after[4] - before[4] < 4 and after[5] - before[5] < 4, "threads, open files"
