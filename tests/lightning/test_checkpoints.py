"""Folders that Lightning saves through our strategy: complete, loadable by HF, and resumed on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests import needs
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

needs.package("lightning", "the test extra installs it")


BESIDE = {"checkpoint": {"async_save": True}}


def run(world: int, folder: Path, *jobs: dict[str, Any]) -> list[Any]:
    """What rank 0 returned for each job `epochs`."""
    results = run_ranks(
        run_jobs, world, ([("tests.lightning.jobs:epochs", job) for job in jobs], str(folder)), timeout=600
    )
    for rank in results:
        for result in rank:
            assert not isinstance(result, str), result
    return results[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Two epochs on two ranks; those with adapters are saved in the background, where the best replaces the one before."""
    root = tmp_path_factory.mktemp("saved")
    jobs = [
        {"stage": 3, "to": str(root / "full"), "last": 2},
        {"stage": 2, "to": str(root / "lora"), "last": 2, "kind": "lora", "config": BESIDE},
        {"stage": 1, "last": 3, "come_from": str(root / "full" / "last.ckpt")},
    ]
    return root, run(2, root, *jobs)


@pytest.fixture(scope="module")
def alone(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """In one process: three epochs of Lightning alone, plain and with adapters; and the third one of ours."""
    root, _ = saved
    jobs = [
        {"stage": None},
        {"stage": None, "kind": "lora"},
        {"stage": 2, "come_from": str(root / "full" / "last.ckpt")},
        {"stage": 3, "come_from": str(root / "lora" / "last.ckpt"), "kind": "lora"},
    ]
    return run(1, tmp_path_factory.mktemp("alone"), *jobs)


def test_the_best_and_the_last_are_kept(saved: Any) -> None:
    root, _ = saved
    names = sorted(path.name for path in (root / "full").iterdir() if not path.name.startswith("latest"))
    assert names == ["epoch=1.ckpt", "last.ckpt", "weights"], "that of the first epoch is deleted"
    assert {"epoch=1.ckpt", "last.ckpt"} <= {path.name for path in (root / "lora").iterdir()}
    assert not (root / "lora" / "epoch=0.ckpt").exists()
    assert (root / "full" / "last.ckpt" / "lightning.pt").is_file()


def test_a_folder_is_a_hugging_face_model(saved: Any) -> None:
    root, (full, _, _) = saved
    state = tf.AutoModelForCausalLM.from_pretrained(root / "full" / "epoch=1.ckpt").state_dict()
    assert [n for n, w in full["weights"].items() if not torch.equal(state[n], w)] == []
    assert (root / "lora" / "last.ckpt" / "adapter_config.json").is_file()


def test_weights_alone_are_validated_and_hold_no_training_state(saved: Any) -> None:
    root, (full, _, _) = saved
    assert full["tested"] == pytest.approx(full["logged"]["val"], rel=1e-6)
    assert not (root / "full" / "weights" / "hf_dist_state").exists()


@pytest.mark.parametrize(
    ("who", "reference"), [(("saved", 2), 0), (("alone", 2), 0), (("alone", 3), 1)], ids=["z1-w2", "z2-w1", "lora-w1"]
)
def test_the_third_epoch_is_that_of_a_run_without_a_break(who: Any, reference: int, saved: Any, alone: Any) -> None:
    resumed = (saved[1] if who[0] == "saved" else alone)[who[1]]
    whole = alone[reference]
    assert len(resumed["losses"]) == 4
    assert resumed["losses"] == pytest.approx(whole["losses"][-4:], rel=1e-5)
    assert resumed["rates"] == pytest.approx(whole["rates"][-2:], rel=1e-6)
    assert resumed["steps"] == whole["steps"] == 6
    for name, value in whole["weights"].items():
        assert torch.allclose(resumed["weights"][name], value, rtol=1e-5, atol=1e-6), name
