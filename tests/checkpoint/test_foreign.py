"""A run that another program began is continued here: stock Trainer, FSDP, DeepSpeed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.checkpoint import foreign
from tests.checkpoint import importing
from tests.checkpoint.importing import AT
from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs
from tests.hf.recipes import RECIPES, make_model

JOBS = "tests.checkpoint.importing:"
READERS, MICRO = (2, 2) if FULL_GRID else (1, 4)
"""Ranks that read other files, and their rows: of two ranks are a stock run, FSDP's shards, a mixture, what is missing."""
STOCK = ("even", "dropout", "lora", "moe")


def ranks(folder: Path, world: int, *jobs: tuple[str, dict[str, Any]]) -> list[Any]:
    """What rank 0 returned for each job; a traceback in the place of a result fails the test."""
    results = run_ranks(run_jobs, world, ([(JOBS + name, kwargs) for name, kwargs in jobs], str(folder)))[0]
    for result in results:
        assert not (isinstance(result, str) and result.startswith("Traceback")), result
    return list(results)


@pytest.fixture(scope="module")
def stocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """The stock runs, one spawn: the third checkpoint of each, and its log from there on."""
    folder = tmp_path_factory.mktemp("stock")
    logs = ranks(folder, 1, *(("stock", {"recipe": recipe}) for recipe in STOCK))
    return {
        recipe: (folder / str(i) / f"checkpoint-{AT}", log[AT:])
        for i, (recipe, log) in enumerate(zip(STOCK, logs, strict=True))
    }


@pytest.fixture(scope="module")
def stock(stocks: dict[str, tuple[Path, list[Any]]]) -> tuple[Path, list[Any]]:
    """Of the recipe that most tests go on with."""
    return stocks["even"]


@pytest.fixture(scope="module")
def named(stock: tuple[Path, list[Any]]) -> tuple[Any, Any, Any]:
    """Weights, optimizer state and param groups of that checkpoint, by name."""
    return importing.named_state(stock[0], make_model(RECIPES["even"].model))


def without_state(checkpoint: Path, folder: Path) -> Path:
    """A copy with the Trainer's small files only."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*", "optimizer.pt"))
    return folder


def same(result: Any, expected: list[Any], *taken: str) -> None:
    """Loss, gradient norm and rate of every remaining step, and the line that says what was taken."""
    assert [entry[0] for entry in result["logs"]] == [entry[0] for entry in expected]
    for mine, theirs in zip(result["logs"], expected, strict=True):
        assert mine[1] == pytest.approx(theirs[1], rel=1e-6), (mine, theirs)
        assert mine[2] == pytest.approx(theirs[2], rel=2e-5), (mine, theirs)
        assert mine[3] == pytest.approx(theirs[3], rel=1e-9), (mine, theirs)
    assert len(result["said"]) == 1
    for word in taken:
        assert word in result["said"][0]


# One process is `test_a_stock_run_goes_on_in_one_process`.
RUNS = [(1, 4, (0, 3)), (2, 2, (2, 3))] if FULL_GRID else [(2, 2, (2,))]


@pytest.mark.parametrize(("world", "micro", "stages"), RUNS)
def test_a_run_of_the_stock_trainer_goes_on(
    stock: tuple[Path, list[Any]], world: int, micro: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    jobs = [
        ("resumed", {"recipe": "even", "stage": stage, "checkpoint": str(stock[0]), "micro": micro}) for stage in stages
    ]
    for result in ranks(tmp_path, world, *jobs):
        same(result, stock[1], "the stock Trainer; taken: weights, optimizer state, schedule")


@pytest.mark.parametrize("recipe", ["dropout", "lora"])
def test_a_stock_run_goes_on_in_one_process(
    recipe: str, stocks: dict[str, tuple[Path, list[Any]]], tmp_path: Path
) -> None:
    """With its random numbers, and with an adapter whose base is not in the folder."""
    checkpoint, log = stocks[recipe]
    job = {"recipe": recipe, "stage": 3, "checkpoint": str(checkpoint), "micro": 4}
    same(ranks(tmp_path, 1, ("resumed", job))[0], log, "weights, optimizer state, schedule")


def test_bin_weights_of_the_stock_trainer_are_read(
    stock: tuple[Path, list[Any]], named: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    folder = without_state(stock[0], tmp_path / "checkpoint-3")
    shutil.copy(stock[0] / "optimizer.pt", folder)
    torch.save(named[0], folder / "pytorch_model.bin")
    job = {"recipe": "even", "stage": 3, "checkpoint": str(folder), "micro": MICRO}
    same(ranks(tmp_path, READERS, ("resumed", job))[0], stock[1], "the stock Trainer")


# One file is read, and goes on, in `test_an_import_counts_what_it_reads`.
@pytest.mark.parametrize("sharded", [True, *([False] if FULL_GRID else [])])
def test_a_run_of_fsdp_goes_on(
    stock: tuple[Path, list[Any]], named: tuple[Any, Any, Any], sharded: bool, tmp_path: Path
) -> None:
    folder = without_state(stock[0], tmp_path / "checkpoint-3")
    weights, state, groups = named
    if sharded:
        run_ranks(importing.write_sharded, 3, (str(folder), weights, state, groups))
    else:
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
        torch.save({"state": state, "param_groups": groups}, folder / "optimizer.bin")
    jobs = [
        ("resumed", {"recipe": "even", "stage": stage, "checkpoint": str(folder)})
        for stage in ((1, 3) if FULL_GRID else (1,))
    ]
    for result in ranks(tmp_path, 2, *jobs):
        same(result, stock[1], "FSDP", "weights, optimizer state, schedule")


# With shapes and steps: `test_of_several_universal_folders_the_one_is_read_that_deepspeed_reads`.
@pytest.mark.parametrize("flat", [*([False] if FULL_GRID else []), True])
def test_a_universal_checkpoint_of_deepspeed_goes_on(
    stock: tuple[Path, list[Any]], named: tuple[Any, Any, Any], flat: bool, tmp_path: Path
) -> None:
    folder = without_state(stock[0], tmp_path / "checkpoint-3")
    importing.write_universal(folder, named[0], named[1], flat=flat)
    job = {"recipe": "even", "stage": 3, "checkpoint": str(folder), "micro": MICRO}
    same(ranks(tmp_path, READERS, ("resumed", job))[0], stock[1], "DeepSpeed (universal)", "optimizer state")


def test_weights_of_a_deepspeed_checkpoint_are_taken_or_the_way_to_them_is_named(
    stock: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder = without_state(stock[0], tmp_path / "checkpoint-3")
    (folder / "global_step3").mkdir()
    for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (folder / "global_step3" / name).write_bytes(b"never opened")
    (folder / "latest").write_text("global_step3")
    whole = Path(shutil.copytree(folder, tmp_path / "whole" / "checkpoint-3"))
    shutil.copy(stock[0] / "model.safetensors", whole)
    job = {"recipe": "even", "stage": 3, "checkpoint": str(whole), "micro": MICRO}
    refusal, result = ranks(tmp_path / "jobs", READERS, ("refused", {"checkpoint": str(folder)}), ("resumed", job))
    assert "python zero_to_fp32.py" in refusal
    assert result["logs"][0][1] == pytest.approx(stock[1][0][1], rel=1e-6), "the first loss depends on the weights only"
    assert "written by DeepSpeed; taken: weights, schedule; not taken: optimizer state" in result["said"][0]


def test_files_of_single_ranks_and_another_model_are_refused_by_name(
    stock: tuple[Path, list[Any]], named: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    single = without_state(stock[0], tmp_path / "checkpoint-3")
    torch.save({}, single / "pytorch_model_fsdp_0_rank0.bin")
    part = without_state(stock[0], tmp_path / "checkpoint-4")
    torch.save(dict(list(named[0].items())[:2]), part / "pytorch_model_fsdp.bin")
    jobs = [("refused", {"checkpoint": str(folder)}) for folder in (single, part)]
    local, other = ranks(tmp_path / "jobs", READERS, *jobs)
    assert "LOCAL_STATE_DICT" in local and "SHARDED_STATE_DICT" in local
    assert "does not hold" in other and "saved from another model" in other


def test_only_tensors_and_numbers_are_unpickled(
    stock: tuple[Path, list[Any]], named: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    folder = without_state(stock[0], tmp_path / "checkpoint-3")
    torch.save({**named[0], "more": Path("x")}, folder / "pytorch_model_fsdp.bin")
    message = ranks(tmp_path / "jobs", READERS, ("refused", {"checkpoint": str(folder)}))[0]
    assert "written by FSDP" in message and "cannot be read (UnpicklingError" in message


def test_a_stock_mixture_of_experts_goes_on_though_its_file_holds_experts_one_by_one(
    stocks: dict[str, tuple[Path, list[Any]]], tmp_path: Path
) -> None:
    checkpoint, log = stocks["moe"]
    weights = importing.file_of(checkpoint)
    named = {
        "without": {k: v for k, v in weights.items() if ".experts.1." not in k},
        "more": {**weights, "extra": torch.ones(2)},
    }
    for name, changed in named.items():
        folder = without_state(checkpoint, tmp_path / name / "checkpoint-3")
        shutil.copy(checkpoint / "optimizer.pt", folder)
        importing.write_file(folder, changed)
    job = {"recipe": "moe", "stage": 3, "checkpoint": str(checkpoint)}
    refusals = [("refused", {"checkpoint": str(tmp_path / name / "checkpoint-3"), "recipe": "moe"}) for name in named]
    result, lacking, more = ranks(tmp_path / "jobs", 2, ("resumed", job), *refusals)
    same(result, log, "weights, optimizer state, schedule")
    assert "does not hold model.layers." in lacking and "experts" in lacking
    assert "holds 1 tensors that the model does not have: extra." in more


Change = Callable[[Any, Any, Any], None]
CHANGES: dict[str, tuple[Change, str]] = {
    "weights more": (lambda w, s, g: w.update(extra=torch.ones(2)), "1 tensors that the model does not have: extra"),
    "half of the states": (
        lambda w, s, g: [s.pop(name) for name in sorted(s)[::2]],
        " of 10 parameters, this run trains 20: model.embed_tokens.weight, ",
    ),
    "one state": (
        lambda w, s, g: s.pop(sorted(s)[0]),
        "of 19 parameters, this run trains 20: model.embed_tokens.weight is missing",
    ),
}


# Of files in shards, too, `test_a_run_of_fsdp_goes_on` takes all.
@pytest.mark.parametrize("sharded", [*([True] if FULL_GRID else []), False])
def test_an_import_counts_what_it_reads(
    stock: tuple[Path, list[Any]], named: tuple[Any, Any, Any], sharded: bool, tmp_path: Path
) -> None:
    """Missing and unknown names are an error with the names; states of nobody, or of another optimizer, are said."""

    def written(name: str, change: Change) -> str:
        folder = without_state(stock[0], tmp_path / name / "checkpoint-3")
        weights, state, groups = dict(named[0]), {k: dict(v) for k, v in named[1].items()}, named[2]
        change(weights, state, groups)
        if sharded:
            run_ranks(importing.write_sharded, 2, (str(folder), weights, state, groups))
        else:
            torch.save(weights, folder / "pytorch_model_fsdp.bin")
            torch.save({"state": state, "param_groups": groups}, folder / "optimizer.bin")
        return str(folder)

    refusals = [("refused", {"checkpoint": written(name, change)}) for name, (change, _) in CHANGES.items()]

    def wrapped(weights: Any, state: Any, groups: Any) -> None:
        for values in (weights, state):
            for name in list(values):
                values[name.replace("layers.0.", "layers.0._orig_mod.")] = values.pop(name)

    def momentum(weights: Any, state: Any, groups: Any) -> None:
        for name, values in state.items():
            state[name] = {"momentum_buffer": values["exp_avg"]}

    def empty(weights: Any, state: Any, groups: Any) -> None:
        state.clear()

    jobs = [
        ("resumed", {"recipe": "even", "stage": 3, "checkpoint": written(change.__name__, change), **more})
        for change, more in ((wrapped, {}), (momentum, {"last": AT + 1}), (empty, {"last": AT + 1}))
    ]
    *messages, compiled, other, none = ranks(tmp_path / "jobs", 2, *refusals, *jobs)
    for message, (_, words) in zip(messages, CHANGES.values(), strict=True):
        assert words in message
    same(compiled, stock[1], "weights, optimizer state, schedule")
    assert "it is another optimizer's (momentum_buffer; this run's AdamW has exp_avg, exp_avg_sq)" in other["said"][0]
    assert "not taken: optimizer state: there is none" in none["said"][0]


def test_of_several_universal_folders_the_one_is_read_that_deepspeed_reads(
    stock: tuple[Path, list[Any]], named: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    folder = without_state(stock[0], tmp_path / "checkpoint-3")
    importing.write_universal(folder, named[0], named[1], flat=False)
    shutil.copytree(folder / "global_step3_universal", folder / "global_step20_universal")
    for file in (folder / "global_step20_universal").rglob("fp32.pt"):
        torch.save({"param": torch.load(file)["param"] * 2, "cat_dim": 0}, file)
    job = {"recipe": "even", "stage": 3, "checkpoint": str(folder), "micro": MICRO}
    same(ranks(tmp_path / "named", READERS, ("resumed", job))[0], stock[1], "DeepSpeed (universal)")
    (folder / "latest_universal").unlink()
    found = foreign._universal_folder(folder)
    assert found is not None and found.parent.name == "global_step20_universal", "by its step, not by its letters"
