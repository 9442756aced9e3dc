"""`torch_autocast` against what it stands for: the stock Trainer with `bf16=True`, and accelerate's bf16 loop, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.utils.data import SequentialSampler

from tests.covering import chosen
from tests.harness import run_ranks
from tests.hf.lifetimes import STEPS, WORDS, rows, small_model, weights_of

ON = {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
QUIET = {"hf_dist": {"stall_report_seconds": 0, "check_load": False}}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"z0": {}, "z3": {"zero_optimization": {"stage": 3}}},
    2: {
        "z1": {"zero_optimization": {"stage": 1}},
        "z3": {"zero_optimization": {"stage": 3}},
        "z3-checkpointing": {
            "zero_optimization": {"stage": 3},
            "activation_checkpointing": {"every_n_layers": 1},
        },
        "pp2": {"pipeline": {"stages": 2}},
    },
}
KINDS = ("llama", "tied", "gpt2", "lora")
CASES = chosen(
    [(world, kind, name) for world, layouts in LAYOUTS.items() for kind in KINDS for name in layouts],
    lambda case: {"layout": (case[0], case[2]), "kind": (case[0], case[1])},
    1,
)
"""Ranks, model, layout: every model and every layout, on one rank and on two."""


def model_of(kind: str) -> Any:
    """The same weights on every call."""
    if kind in ("llama", "lora"):
        return small_model(lora=kind == "lora")
    torch.manual_seed(0)
    if kind == "tied":
        shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
        return tf.LlamaForCausalLM(tf.LlamaConfig(**shape, vocab_size=WORDS, tie_word_embeddings=True))
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ends = dict(bos_token_id=1, eos_token_id=2)
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, **off, **ends))


def train(folder: str, kind: str, config: dict[str, Any] | None, ranks: int) -> dict[str, torch.Tensor]:
    """Losses, the loss and the logits of an evaluation, and the weights; windows are of two microbatches of two rows."""
    base, arguments, own = tf.Trainer, tf.TrainingArguments, {}
    if config is not None:
        from hf_dist import DistTrainer, DistTrainingArguments

        base, arguments, own = DistTrainer, DistTrainingArguments, {"dist_config": {**config, **ON, **QUIET}}

    class InOrder(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    alike = config is not None and "pipeline" in config
    more = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2 // (1 if alike else ranks)}
    # Clipping divides by a norm whose last bit depends on the order in which it is summed.
    more |= {"optim": "sgd", "learning_rate": 0.1, "max_steps": STEPS, "logging_steps": 1, "max_grad_norm": 0.0}
    more |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": True}
    trainer = InOrder(model := model_of(kind), arguments(folder, **more, **own), train_dataset=rows())
    trainer.train()
    found = {f"loss {i}": torch.tensor(x["loss"]) for i, x in enumerate(trainer.state.log_history) if "loss" in x}
    found["eval_loss"] = torch.tensor(trainer.evaluate(rows()[:4])["eval_loss"])
    found["logits"] = torch.as_tensor(trainer.predict(rows()[:4]).predictions)
    return {**found, **(weights_of(model) if config is not None else dict(model.named_parameters()))}


def on_ranks(rank: int, world: int, folder: str) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    cases = [(kind, name) for ranks, kind, name in CASES if ranks == world]
    return {(kind, name): train(folder, kind, LAYOUTS[world][name], world) for kind, name in cases}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    folder = str(tmp_path_factory.mktemp("stock"))
    return {kind: train(folder, kind, None, 1) for kind in KINDS}


@pytest.mark.parametrize("world", [1, 2])
def test_numbers_are_those_of_the_stock_trainer_with_bf16(
    world: int, stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Loss, evaluation, logits and weights; tied weights in a pipeline add up at another place, in fp32."""
    for found in run_ranks(on_ranks, world, (str(tmp_path),), timeout=300):
        assert found
        for (kind, name), values in found.items():
            expected = stock[kind]
            assert values.keys() <= expected.keys() and (name == "pp2" or values.keys() == expected.keys())
            for key, value in values.items():
                if name == "pp2":
                    torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-8)
                else:
                    assert value.dtype is expected[key].dtype
                    assert torch.equal(value, expected[key]), f"{kind} at {name}: {key} differs"
            assert "loss 0" in values


def loop(folder: str, ours: bool) -> list[torch.Tensor]:
    """A loop of one's own, its loss taken from the logits outside the model: losses, the logits' dtype as a number, weights."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from hf_dist import DistAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator: Any = (
        DistAccelerator(
            dist_config={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, **ON, **QUIET}
        )
        if ours
        else Accelerator(mixed_precision="bf16", cpu=True)
    )
    model = model_of("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for start in (0, 2):
        ids = torch.tensor([row["input_ids"] for row in rows()[start : start + 2]])
        logits = model(input_ids=ids).logits
        assert logits.dtype is torch.float32
        with accelerator.autocast():
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            product = ids.float() @ ids.float().T
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), product]
    weights = weights_of(model) if ours else {n: p.detach().clone() for n, p in model.named_parameters()}
    return [*found, *weights.values()]


def loops(rank: int, world: int, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return loop(folder, True), loop(folder, False)


def test_a_loop_of_ones_own_is_that_of_accelerate_with_bf16(tmp_path: Path) -> None:
    ((ours, stock),) = run_ranks(loops, 1, (str(tmp_path),))
    assert len(ours) == len(stock)
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    assert ours[1].dtype is torch.bfloat16, "accelerator.autocast() casts"
