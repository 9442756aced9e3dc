"""Folders that Lightning saves through our strategy: complete, loadable by HF, and resumed on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests import needs
from tests.covering import FULL_GRID_ONLY, some_of
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

needs.package("lightning", "the test extra installs it")


BESIDE = {"checkpoint": {"async_save": True}}
RESUMED = {
    "z1-w2": ("saved", "z1", "plain"),
    "z2-w1": ("alone", "z2", "plain"),
    "lora-w1": ("alone", "z3-lora", "lora"),
}
RESUMED = some_of(RESUMED, "z2-w1")


def run(world: int, folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 returned for each job `epochs`."""
    asked = [("tests.lightning.jobs:epochs", job) for job in jobs.values()]
    results = run_ranks(run_jobs, world, (asked, str(folder)), timeout=600)
    for rank in results:
        for result in rank:
            assert not isinstance(result, str), result
    return dict(zip(jobs, results[0], strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two epochs on two ranks; those with adapters are saved in the background, where the best replaces the one before."""
    root = tmp_path_factory.mktemp("saved")
    jobs: dict[str, dict[str, Any]] = {
        "full": {"stage": 3, "to": str(root / "full"), "last": 2},
        "lora": {"stage": 2, "to": str(root / "lora"), "last": 2, "kind": "lora", "config": BESIDE},
        "z1": {"stage": 1, "last": 3, "come_from": str(root / "full" / "last.ckpt")},
    }
    return root, run(2, root, some_of(jobs, "full"))


@pytest.fixture(scope="module")
def alone(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In one process: three epochs of Lightning alone, plain and with adapters; and the third one of ours."""
    root, _ = saved
    jobs: dict[str, dict[str, Any]] = {
        "plain": {"stage": None},
        "lora": {"stage": None, "kind": "lora"},
        "z2": {"stage": 2, "come_from": str(root / "full" / "last.ckpt")},
        "z3-lora": {"stage": 3, "come_from": str(root / "lora" / "last.ckpt"), "kind": "lora"},
    }
    return run(1, tmp_path_factory.mktemp("alone"), some_of(jobs, "plain", "z2"))


def test_the_best_and_the_last_are_kept(saved: Any) -> None:
    root, _ = saved
    names = sorted(path.name for path in (root / "full").iterdir() if not path.name.startswith("latest"))
    assert names == ["epoch=1.ckpt", "last.ckpt", "weights"], "that of the first epoch is deleted"
    assert (root / "full" / "last.ckpt" / "lightning.pt").is_file()


@FULL_GRID_ONLY
def test_adapters_saved_in_the_background_are_kept_likewise(saved: Any) -> None:
    root, _ = saved
    assert {"epoch=1.ckpt", "last.ckpt"} <= {path.name for path in (root / "lora").iterdir()}
    assert not (root / "lora" / "epoch=0.ckpt").exists()
    assert (root / "lora" / "last.ckpt" / "adapter_config.json").is_file()


def test_a_folder_is_a_hugging_face_model(saved: Any) -> None:
    root, full = saved[0], saved[1]["full"]
    state = tf.AutoModelForCausalLM.from_pretrained(root / "full" / "epoch=1.ckpt").state_dict()
    assert [n for n, w in full["weights"].items() if not torch.equal(state[n], w)] == []


def test_weights_alone_are_validated_and_hold_no_training_state(saved: Any) -> None:
    root, full = saved[0], saved[1]["full"]
    assert full["tested"] == pytest.approx(full["logged"]["val"], rel=1e-6)
    assert not (root / "full" / "weights" / "hf_dist_state").exists()


@pytest.mark.parametrize(("world", "name", "reference"), RESUMED.values(), ids=RESUMED)
def test_the_third_epoch_is_that_of_a_run_without_a_break(
    world: str, name: str, reference: str, saved: Any, alone: Any
) -> None:
    resumed = (saved[1] if world == "saved" else alone)[name]
    whole = alone[reference]
    assert len(resumed["losses"]) == 4
    assert resumed["losses"] == pytest.approx(whole["losses"][-4:], rel=1e-5)
    assert resumed["rates"] == pytest.approx(whole["rates"][-2:], rel=1e-6)
    assert resumed["steps"] == whole["steps"] == 6
    for name, value in whole["weights"].items():
        assert torch.allclose(resumed["weights"][name], value, rtol=1e-5, atol=1e-6), name
