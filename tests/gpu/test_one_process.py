"""One process on the card: what only a GPU runs (bf16 products, fused kernels, page-locked copies beside forks, generators).

Without a GPU the same functions run on the CPU, fewer and smaller.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import hf_dist
from hf_dist.parallel.sequence import ring
from tests.gpu.place import DEVICE, GPUS, TOLERANCE, rehearsed
from tests.parity.families import make_batches, make_model
from tests.parity.train import relative

STEPS = 3
FAMILIES = rehearsed(("llama", "qwen3_moe", "bert", "gpt2", "t5"), 2)
STAGES = rehearsed((3, 0, 1, 2), 2)
HOST = {"device": "cpu", "pin_memory": True}
HALF = 2e-2
"""Relative, of losses in bf16 against fp32: eight bits of mantissa."""


def train(
    family: str, zero: dict[str, Any], *, device: torch.device = DEVICE, checkpointing: bool = False, **more: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of `STEPS` steps, and the weights after them."""
    model = make_model(family, checkpointing=checkpointing)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-3}},
        **more,
    }
    engine = hf_dist.initialize(model, config=config, device=device)
    losses = []
    for batch in make_batches(family, STEPS):
        loss = engine(**{k: v[:6].to(device) for k, v in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    with hf_dist.gathered(model):
        return losses, {n: p.detach().cpu().float().clone() for n, p in model.named_parameters()}


@functools.cache
def on_cpu(family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """In fp32, nothing sharded."""
    return train(family, {"stage": 0}, device=torch.device("cpu"))


@functools.cache
def in_half(family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """In bf16, nothing sharded."""
    return train(family, {"stage": 0}, bf16={"enabled": True})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_one_process_on_the_cpu(family: str, stage: int) -> None:
    losses, weights = train(family, {"stage": stage}, checkpointing=stage == 3)
    assert losses == pytest.approx(on_cpu(family)[0], rel=TOLERANCE)
    assert max(relative(weights[n], w) for n, w in on_cpu(family)[1].items()) < TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_the_same_in_every_stage_and_near_fp32(family: str, stage: int) -> None:
    losses, weights = train(family, {"stage": stage}, bf16={"enabled": True})
    assert losses == pytest.approx(in_half(family)[0], rel=1e-6)
    assert max(relative(weights[n], w) for n, w in in_half(family)[1].items()) < 1e-5
    assert losses == pytest.approx(on_cpu(family)[0], rel=HALF)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    name: {"lr": 1e-3} for name in rehearsed(("AdamW", "Adam", "Lion", "Lamb", "Muon", "SGD", "Adagrad"), 3)
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_the_one_of_the_cpu(name: str) -> None:
    optimizer = {"optimizer": {"type": name, "params": OPTIMIZERS[name]}}
    expected, weights = train("llama", {"stage": 0}, device=torch.device("cpu"), **optimizer)
    found, own = train("llama", {"stage": 3}, **optimizer)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    # Of the whole model: signs of tiny gradients (Lion, Adam without eps) turn with the order of sums.
    apart = sum(float((own[n] - w).square().sum()) for n, w in weights.items()) ** 0.5
    assert apart < 20 * TOLERANCE * sum(float(w.square().sum()) for w in weights.values()) ** 0.5


def test_real_tiles_of_the_loss_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 and fp32, with tiles so small that several are made."""
    from hf_dist.memory.loss import lazy_logits, tiles

    made: list[int] = []
    original = lazy_logits.tiled_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(tiles, "TILE_BYTES", 4096)
    monkeypatch.setattr(lazy_logits, "tiled_cross_entropy", counted)
    for half in (False, True):
        precision = {"bf16": {"enabled": half}}
        plain = train("llama", {"stage": 3}, hf_dist={"tiled_loss": False}, **precision)
        tiled = train("llama", {"stage": 3}, hf_dist={"tiled_loss": True}, **precision)
        assert tiled[0] == pytest.approx(plain[0], rel=5e-3 if half else TOLERANCE)
        assert len(made) == STEPS * (2 if half else 1), "tiles are made"


def test_compiled_blocks_change_no_number() -> None:
    if not GPUS:
        pytest.skip("compiling takes a minute on a CPU; tests/sharding/test_compile.py does it")
    losses, _ = train("llama", {"stage": 3}, compile={"enabled": True})
    assert losses == pytest.approx(on_cpu("llama")[0], rel=1e-3)


def test_autocast_is_near_fp32() -> None:
    losses, _ = train("llama", {"stage": 3}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert losses == pytest.approx(on_cpu("llama")[0], rel=HALF)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Of the first batch, again and again."""

    def __init__(self) -> None:
        self.batch = make_batches("llama", 1)[0]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {k: v[index % 6] for k, v in self.batch.items()}


@pytest.mark.parametrize("where", ["host", "disk"])
def test_forked_workers_beside_page_locked_memory(where: str, tmp_path: Path) -> None:
    """Workers are forked while the optimizer's states are page-locked: the numbers stay, and no child copies them."""
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    found = []
    for zero in ({"stage": 3}, {"stage": 3, "offload_optimizer": HOST if where == "host" else disk}):
        model = make_model("llama")
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
        config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": zero, "optimizer": optimizer}
        engine = hf_dist.initialize(model, config=config, device=DEVICE)
        losses = []
        loader: Any = DataLoader(
            Rows(), batch_size=6, num_workers=2, pin_memory=GPUS > 0, multiprocessing_context="fork"
        )
        for batch in loader:
            loss = engine(**{k: v.to(DEVICE, non_blocking=True) for k, v in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=TOLERANCE)


def test_a_resume_draws_the_random_numbers_of_the_device(tmp_path: Path) -> None:
    """Dropout on: what follows a checkpoint is the same after a load."""
    model = make_model("llama")
    model.model.embed_tokens.register_forward_hook(lambda m, a, out: functional.dropout(out, 0.3, m.training))
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": 3},
        "checkpoint": {"async_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = hf_dist.initialize(model.train(), config=config, device=DEVICE)
    batch = {k: v[:6].to(DEVICE) for k, v in make_batches("llama", 1)[0].items()}

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    step()
    engine.save_checkpoint(tmp_path / "checkpoint")
    going_on = [step() for _ in range(3)]
    engine.writer.wait()
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert [step() for _ in range(3)] == pytest.approx(going_on, rel=1e-6)


def test_packed_rows_are_kept_apart() -> None:
    model = make_model("llama").to(DEVICE).eval()
    ids = make_batches("llama", 1)[0]["input_ids"][:1].to(DEVICE)
    half = ids.shape[1] // 2
    places = torch.arange(ids.shape[1], device=DEVICE)
    packed = torch.where(places < half, places, places - half)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, position_ids=packed, use_cache=False).logits
        alone = model(input_ids=ids[:, half:], use_cache=False).logits
    assert relative(whole[:, half:], alone) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", rehearsed((64, 80, 128, 256, 512, 72), 2))
def test_a_rings_kernel_is_attention_at_every_head_size(width: int, dtype: torch.dtype) -> None:
    """Output and gradients of a causal tile, by the kernel for this device, precision and size."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, 4, 96, width, device=DEVICE).to(dtype) for _ in range(4))
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    scale = width**-0.5
    expected = functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale)
    wanted = [expected, *torch.autograd.grad(expected, leaves, grad.double())]
    out, total = ring._attend(query, key, value, "causal", scale)
    parts = ring._attend_backward(grad, query, key, value, out.to(dtype), total, "causal", scale)
    for found, want in zip((out, *parts), wanted, strict=True):
        assert relative(found.cpu(), want.detach().cpu()) < (1e-4 if dtype == torch.float32 else HALF)


def test_experts_in_one_product_are_those_one_by_one() -> None:
    """`grouped_mm` in bf16, whose rows begin at multiples of 16 bytes."""
    losses = []
    for how in ("eager", "grouped_mm"):
        model = make_model("qwen3_moe")
        model.set_experts_implementation(how)
        config = {"train_micro_batch_size_per_gpu": 6, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
        engine = hf_dist.initialize(model, config={**config, "optimizer": {"type": "AdamW"}}, device=DEVICE)
        batch = {k: v[:6].to(DEVICE) for k, v in make_batches("qwen3_moe", 1)[0].items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
