"""`save_state`, `load_state`, `save_model` of accelerate loops; `save_checkpoint` of engine loops: any layout goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

JOB = "tests.hf.loop_states:"


def run(world: int, folder: Path, *jobs: tuple[str, dict[str, Any]]) -> list[list[Any]]:
    """What each rank returned for each job."""
    results = run_ranks(
        run_jobs, world, ([(JOB + name, arguments) for name, arguments in jobs], str(folder)), timeout=600
    )
    for rank in results:
        for result in rank:
            assert not isinstance(result, str), result
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """On two ranks at stage 3: an accelerate loop, an engine loop, weights that were frozen, a window that was open."""
    folder = tmp_path_factory.mktemp("saved")
    jobs = ("saved", "engine_loop", "frozen_then_trained", "inside_a_window")
    return run(2, folder, *((job, {"stage": 3}) for job in jobs))


def test_states_are_numbered_and_the_oldest_is_dropped(saved: Any) -> None:
    outcome = saved[0][0]
    assert outcome["states"] == ["checkpoint_1", "checkpoint_2", "latest"]
    assert outcome["iteration"] == 3, "the next save does not collide with what is there"
    assert outcome["errors"] == ["none"], "numbers below the kept ones are free"


def test_save_model_is_a_folder_of_small_files(saved: Any) -> None:
    outcome = saved[0][0]
    assert sum(name.endswith(".safetensors") for name in outcome["model"]) > 1
    assert {"config.json", "model.safetensors.index.json"} <= set(outcome["model"])
    state = tf.AutoModelForCausalLM.from_pretrained(Path(outcome["folder"], "model")).state_dict()
    assert [n for n, w in outcome["weights"].items() if not torch.equal(state[n], w)] == []


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (3, 3)])
def test_another_layout_continues_the_loop(world: int, stage: int, saved: Any, tmp_path: Path) -> None:
    outcome, root = saved[0][0], Path(saved[0][0]["folder"], "checkpoints")
    jobs = [("resumed", {"stage": stage, "state": str(root / f"checkpoint_{n}"), "first": n + 1}) for n in (1, 2)]
    results = run(world, tmp_path, *jobs)[0]
    for n, again in zip((1, 2), results, strict=True):
        assert len(again["losses"]) == 3 - n
        for mine, theirs in zip(again["losses"], outcome["losses"][n + 1 :], strict=True):
            assert mine == pytest.approx(theirs, rel=2e-5)
        for name, weight in again["weights"].items():
            assert (weight - outcome["weights"][name]).norm() < 1e-5 * outcome["weights"][name].norm()


def test_an_engine_loop_saves_a_model_folder_and_goes_on_bit_for_bit(saved: Any, tmp_path: Path) -> None:
    state = saved[0][1]["folder"]
    assert {"config.json", "generation_config.json", "model.safetensors", "hf_dist.json"} <= set(saved[0][1]["names"])
    tf.AutoModelForCausalLM.from_pretrained(state)
    again = run(2, tmp_path, ("engine_loop", {"stage": 3, "load": state}))
    for rank in (0, 1):
        assert again[rank][0]["losses"] == saved[rank][1]["losses"][6:], "dropout too"


def test_windows_end_where_they_did_before_the_save(saved: Any) -> None:
    for rank in saved:
        assert rank[3] == [False, True, True, False, True]


def test_weights_that_were_frozen_when_saved_are_restored(saved: Any) -> None:
    different, count = saved[0][2]
    assert different == [] and count > 20
