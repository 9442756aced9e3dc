"""Models that are given fp32 targets in half precision: what a rank does, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

BIG = torch.tensor([1001.0, 1003.0, 1005.0, 20231.0])


class Seen(nn.Module):
    """Keeps what its forward was given for the loss, however that came."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Any, target: Any = None, batch: Any = None, **more: Any) -> torch.Tensor:
        """Huber loss to the first target found, after the other things that code does with masks."""
        found = [target, *(batch or {}).values(), *more.values()]
        self.seen = next(v[0] if isinstance(v, list) else v for v in found if v is not None)
        if isinstance(self.seen, dict):
            (self.seen,) = self.seen.values()
        out = self.layer(x).squeeze(-1)
        grid = torch.zeros(1, 1, 1, 2, dtype=out.dtype)
        picked = F.grid_sample(self.seen[None, None, :, None], grid, align_corners=False).sum()
        return F.huber_loss(out, self.seen) + 0 * picked + 0 * (out @ self.seen).float()


def _bert(**config: Any) -> tuple[Any, dict[str, Any]]:
    ids = torch.randint(3, 90, (4, 6), generator=torch.Generator().manual_seed(1))
    small = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return tf.BertForSequenceClassification(tf.BertConfig(**small, **off, **config)), {"input_ids": ids}


def _patches() -> tuple[Any, dict[str, Any]]:
    config = tf.PatchTSTConfig(
        num_input_channels=2, context_length=8, patch_length=2, patch_stride=2, prediction_length=4, d_model=8,
        num_attention_heads=2, num_hidden_layers=2, ffn_dim=16, scaling="std", loss="mse", attention_dropout=0.0,
        ff_dropout=0.0, path_dropout=0.0, head_dropout=0.0, positional_dropout=0.0, norm_type="layernorm",
    )  # fmt: skip
    g = torch.Generator().manual_seed(2)
    past, future = torch.randn(4, 8, 2, generator=g) + 202310, torch.randn(4, 4, 2, generator=g) + 202311
    return tf.PatchTSTForPrediction(config), {"past_values": past, "future_values": future}


def _series() -> tuple[Any, dict[str, Any]]:
    config = tf.TimeSeriesTransformerConfig(
        prediction_length=2, context_length=4, lags_sequence=[1, 2], num_time_features=1, d_model=8, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    g = torch.Generator().manual_seed(2)
    batch = {
        "past_values": torch.rand(4, 6, generator=g) + 2023, "past_time_features": torch.rand(4, 6, 1, generator=g),
        "past_observed_mask": torch.ones(4, 6), "future_values": torch.rand(4, 2, generator=g) + 2023,
        "future_time_features": torch.rand(4, 2, 1, generator=g),
    }  # fmt: skip
    return tf.TimeSeriesTransformerForPrediction(config), batch


def make(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model and a batch of four rows."""
    torch.manual_seed(0)
    if kind == "regression":
        model, batch = _bert(num_labels=1)
        return model, batch | {"labels": BIG}
    if kind == "multi-label":
        model, batch = _bert(num_labels=3, problem_type="multi_label_classification")
        return model, batch | {"labels": torch.rand(4, 3, generator=torch.Generator().manual_seed(3))}
    return _patches() if kind == "patches" else _series()


def losses(rank: int, world: int, cases: list[tuple[str, int, str]]) -> list[Any]:
    """The model's own loss on this rank's rows, and two steps of training, by (kind, stage, dtype)."""
    import hf_dist

    found = []
    for kind, stage, dtype in cases:
        model, batch = make(kind)
        mine = {k: v[rank::world] for k, v in batch.items()}
        config = {
            "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, dtype: {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 1e-7}},
        }  # fmt: skip
        if dtype == "fp16":
            config["fp16"]["initial_scale_power"] = 0
        engine = hf_dist.initialize(model, config=config)
        values = []
        for _ in range(2):
            loss = engine(**mine).loss
            engine.backward(loss)
            engine.step()
            values.append((float(loss), str(loss.dtype)))
        with torch.no_grad():
            engine.eval()
            values.append((float(engine(**mine).loss), ""))
        found.append((values, engine.skipped_steps))
    return found


def staged(rank: int, world: int, dtype: str) -> list[float]:
    """Losses of two windows of the regression over two pipeline stages."""
    import hf_dist

    model, batch = make("regression")
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "pipeline": {"stages": 2},
        dtype: {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1e-7}},
    }  # fmt: skip
    engine = hf_dist.initialize(model, config=config, example_batch=batch)
    return [float(engine.train_batch({k: v[i::2] for k, v in batch.items()} for i in range(2))) for _ in range(2)]


def interrupted(rank: int, world: int) -> tuple[bool, int]:
    """Ctrl-C inside a forward that was given targets: what the next one sees, and what is left open after it."""
    import hf_dist

    model = Seen()
    engine = hf_dist.initialize(
        model,
        config={
            "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        },
    )  # fmt: skip

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layer.register_forward_pre_hook(stop)
    try:
        engine(torch.ones(4, 8), BIG)
    except KeyboardInterrupt:
        handle.remove()
    engine(torch.ones(4, 8), BIG)
    return torch.equal(model.seen, BIG), torch._C._len_torch_function_stack()


def trained(rank: int, world: int, root: str) -> list[float]:
    """Logged losses of the regression under the Trainer in bf16."""
    import hf_dist

    torch.manual_seed(0)
    model, _ = _bert(num_labels=1)
    rows = [{"input_ids": list(range(3 + i, 9 + i)), "labels": 1001.0 + 2 * i} for i in range(8)]
    arguments = hf_dist.DistTrainingArguments(
        root, dist_config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, max_steps=2, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-7, optim="sgd", report_to=[], use_cpu=True, seed=1, save_strategy="no",
    )  # fmt: skip
    trainer = hf_dist.DistTrainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def seen(rank: int, world: int) -> dict[str, Any]:
    """What the forward saw, by how it was handed over; the dtype of an input beside it."""
    import hf_dist

    found: dict[str, Any] = {}
    for dtype in ("bf16", "fp16"):
        model = Seen()
        engine = hf_dist.initialize(
            model,
            config={
                "train_micro_batch_size_per_gpu": 4, dtype: {"enabled": True},
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            },
        )  # fmt: skip
        x, y = torch.ones(4, 8), BIG * 10
        ways = {
            "keyword": lambda x=x, y=y, e=engine: e(x, target=y),
            "position": lambda x=x, y=y, e=engine: e(x, y),
            "nested": lambda x=x, y=y, e=engine: e(x, batch={"labels": [y]}),
            "rows of dicts": lambda x=x, y=y, e=engine: e(x, labels=[{"boxes": y}]),
            "other name": lambda x=x, y=y, e=engine: e(x, mask_labels=y),
        }
        for way, call in ways.items():
            loss = call()
            loss.backward()
            found[f"{dtype} {way}"] = (torch.equal(model.seen, y), loss.dtype == torch.float32)
        found[f"{dtype} input"] = (engine(x, batch={"scale": y}), model.seen.dtype)[1] != torch.float32
    return found


def alone(kind: str, dtype: torch.dtype) -> list[float]:
    """One process and plain torch: a model in `dtype`, inputs cast by hand, targets as they are; each rank's rows of two."""
    model, batch = make(kind)
    model.to(dtype)
    return [float(model(**{k: v[rank::2] for k, v in batch.items()}).loss) for rank in range(2)]


def autocast(kind: str) -> list[float]:
    """One process under autocast, as HF's Trainer runs bf16."""
    model, batch = make(kind)
    with torch.autocast("cpu", torch.bfloat16):
        return [float(model(**{k: v[rank::2] for k, v in batch.items()}).loss) for rank in range(2)]
