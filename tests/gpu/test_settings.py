"""Where states rest and what is kept for backward changes no number: each setting against none, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_dist
from tests.gpu.place import DEVICE, TOLERANCE, rehearsed
from tests.parity.families import make_batches, make_model
from tests.parity.train import relative

STEPS = 4
HOST = {"device": "cpu", "pin_memory": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "optimizer on the host": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}},
    "weights and optimizer on the host": {
        "zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}
    },
    "half of the optimizer on the host": {"zero_optimization": {"stage": 3, "offload_optimizer": {**HOST, "ratio": 0.5}}},
    "optimizer on disk": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"}}},
    "checkpointed inputs on the host": {
        "zero_optimization": {"stage": 3}, "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 3},
    },
    "loss in tiles": {"zero_optimization": {"stage": 3}, "hf_dist": {"tiled_loss": True}},
    "optimizer in backward": {"zero_optimization": {"stage": 3}, "hf_dist": {"optimizer_in_backward": True}},
}  # fmt: skip


def train(config: dict[str, Any], folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights after `STEPS` steps.

    A checkpoint is saved in the background in the middle, and loaded at the end.
    """
    model = make_model("llama", checkpointing="activation_checkpointing" in config)
    whole = {
        "train_micro_batch_size_per_gpu": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-3}},
        "checkpoint": {"async_save": True},
        **config,
    }
    offload = whole.get("zero_optimization", {}).get("offload_optimizer", {})
    if "nvme_path" in offload:
        whole["zero_optimization"] = {"stage": 3, "offload_optimizer": {**offload, "nvme_path": str(folder / "swap")}}
    engine = hf_dist.initialize(model, config=whole, device=DEVICE)
    losses: list[float] = []

    def steps(first: int) -> None:
        for step, batch in enumerate(make_batches("llama", STEPS)):
            if step >= first:
                loss = engine(**{k: v[:12].to(DEVICE) for k, v in batch.items()}).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
                if step == 1 and first == 0:
                    engine.save_checkpoint(folder / "checkpoint")

    steps(0)
    engine.writer.wait()
    engine.load_checkpoint(folder / "checkpoint")
    steps(2)
    assert losses[2:4] == pytest.approx(losses[4:6], rel=1e-6), "after the load the same again"
    with hf_dist.gathered(model):
        return losses, {n: p.detach().cpu().clone() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Without any of them."""
    return train({"zero_optimization": {"stage": 0}}, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", rehearsed(list(SETTINGS), 2))
def test_a_setting_changes_no_number(name: str, plain: Any, tmp_path: Path) -> None:
    losses, weights = train(SETTINGS[name], tmp_path)
    assert losses == pytest.approx(plain[0], rel=TOLERANCE)
    for key, weight in weights.items():
        assert relative(weight, plain[1][key]) < TOLERANCE, key


def test_fp16_finds_its_loss_scale_and_learns() -> None:
    model = make_model("llama")
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "fp16": {"enabled": True, "initial_scale_power": 32},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    }
    engine = hf_dist.initialize(model, config=config, device=DEVICE)
    batch = {k: v[:12].to(DEVICE) for k, v in make_batches("llama", 1)[0].items()}
    losses = []
    for _ in range(40):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert 0 < engine.skipped_steps < 30
    assert losses[-1] < 0.9 * losses[0]
