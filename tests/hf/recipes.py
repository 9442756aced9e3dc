"""Tiny trainings of the HF Trainer. Each recipe runs with the stock classes in one process and with ours on ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn
from transformers import Trainer, TrainingArguments

ROWS = 44  # batches of 4, in windows of 3: the last window of an epoch has 2
CLASSES = 4
VOCAB = 64
SMALL: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
Row = dict[str, torch.Tensor]


# ---- models and rows


def make_model(kind: str = "llama") -> Any:
    """The same weights on every call and rank; never in the state that a random tie or dropout could change."""
    torch.manual_seed(0)
    special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
    if kind in ("llama", "lora", "dropout", "deep"):
        blocks = {"num_hidden_layers": 4} if kind == "deep" else {}
        config: Any = tf.LlamaConfig(
            **{**SMALL, **blocks}, **special, vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=True,
            attention_dropout=0.2 if kind == "dropout" else 0.0,
        )  # fmt: skip
        model: Any = tf.LlamaForCausalLM(config)
    elif kind in ("moe", "moe_router_loss"):
        config = tf.Qwen3MoeConfig(
            **SMALL, **special, vocab_size=VOCAB, num_key_value_heads=2, head_dim=8, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, experts_implementation="eager",
            output_router_logits=kind == "moe_router_loss", router_aux_loss_coef=1.0,
        )  # fmt: skip
        model = tf.Qwen3MoeForCausalLM(config)
    elif kind == "bert":
        off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = tf.BertForSequenceClassification(
            tf.BertConfig(**SMALL, **off, vocab_size=VOCAB, max_position_embeddings=16, num_labels=CLASSES)
        )
    elif kind == "t5":
        model = tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
                        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
        )  # fmt: skip
    else:
        raise ValueError(kind)
    with torch.no_grad():  # a relative comparison needs weights that are not zero (key biases have no gradient either)
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.02)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0))
        with torch.no_grad():  # B starts at zero, and then A has no gradient
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1)
    return model


def texts(count: int = ROWS, ragged: bool = True, seed: int = 1) -> list[Row]:
    """Rows of 4 to 12 tokens with a quarter of the labels masked, or of 8 tokens each."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 13, (), generator=g)) if ragged else 8
        ids = torch.randint(3, VOCAB, (length,), generator=g)
        masked = torch.rand(length, generator=g) < 0.25
        masked[2] = False
        rows.append({"input_ids": ids, "labels": ids.masked_fill(masked, -100)})
    return rows


def classes(count: int = ROWS, seed: int = 1) -> list[Row]:
    """Rows of 8 tokens with one of four classes."""
    g = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(3, VOCAB, (8,), generator=g), "labels": torch.randint(CLASSES, (), generator=g)}
        for _ in range(count)
    ]


def pad(rows: list[Row]) -> Row:
    """Collate to the longest row."""
    batch = {}
    for key in ("input_ids", "labels"):
        values = [row[key] for row in rows]
        fill = -100 if key == "labels" else 0
        ragged = values[0].dim() > 0
        batch[key] = nn.utils.rnn.pad_sequence(values, True, fill) if ragged else torch.stack(values)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()
    return batch


def pad_encoded(rows: list[Row]) -> Any:
    """`pad` as a tokenizer returns it: a mapping, but no dict. What the standard collators give to the Trainer."""
    return tf.BatchEncoding(pad(rows))


# ---- losses of the user's own


def pad_at_random(rows: list[Row]) -> Row:
    """`pad`, with tokens masked by torch's, numpy's and Python's generators, as collators for masked LM do."""
    batch = pad(rows)
    ids = batch["input_ids"]
    masked = torch.rand(ids.shape) < 0.1
    masked[:, random.randrange(ids.shape[1])] = True
    masked[:, np.random.randint(ids.shape[1])] = True
    batch["input_ids"] = ids.masked_fill(masked, 3)
    return batch


def shifted_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed next-token loss."""
    flat = logits[:, :-1].float().reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum", ignore_index=-100)


def loss_func(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """For `compute_loss_func`: normalised over the window, as its documentation asks."""
    return 2.0 * shifted_sum(outputs.logits, labels) / num_items_in_batch


class AddsToTheLoss:
    """An override that calls its base and adds a term that depends on the outputs."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Twice the loss."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        return (2 * loss, outputs) if return_outputs else 2 * loss


class OwnLoss:
    """An override that ignores the model's loss; scaled by the number of ranks because HF averages over them."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Half the token mean over the window."""
        labels = inputs.labels  # an attribute, which no dict has
        del inputs["labels"]
        outputs = model(**inputs)
        ranks: int = self.accelerator.num_processes  # type: ignore[attr-defined]
        items = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch / ranks
        loss = 0.5 * shifted_sum(outputs.logits, labels) / items
        return (loss, outputs) if return_outputs else loss


def accuracy(prediction: Any) -> dict[str, float]:
    """Depends on every row, and on their order."""
    picked = torch.from_numpy(prediction.predictions).argmax(-1)
    labels = torch.from_numpy(prediction.label_ids)
    weight = torch.arange(1, len(labels) + 1)
    return {"accuracy": float((picked == labels).float().mean()), "order": float((weight * labels).sum())}


class Averaged(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): trains on weights between an iterate and the average, evaluates the average."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    def train(self) -> None:
        """The average becomes the weights that are trained. Nothing if they are those already."""
        self._move(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        """The other way."""
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _move(self, to: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != to else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = to

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Refuses weights that are not those that are trained."""
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() in evaluation mode: call train() first")
            beta, part = group["beta"], 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, part).add_(p.grad, alpha=group["lr"] * (beta * (1 - part) - 1))
                    z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


# ---- recipes


def plain_arguments(folder: Path | str, micro: int, **changes: Any) -> dict[str, Any]:
    """Arguments of TrainingArguments; Adam's epsilon is large so that rounding does not decide a sign."""
    return {
        **dict(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", seed=5),
        **dict(logging_steps=1, num_train_epochs=2, per_device_train_batch_size=micro, gradient_accumulation_steps=3),
        **dict(learning_rate=5e-3, adam_epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2),
        **dict(
            remove_unused_columns=False, per_device_eval_batch_size=micro, ddp_timeout=300, logging_nan_inf_filter=False
        ),
        **changes,
    }


class Recipe:
    """What is trained: model, rows, changed arguments, an override, and what is recorded beside the log."""

    def __init__(
        self,
        model: str = "llama",
        rows: Callable[[], list[Row]] = texts,
        override: type | None = None,
        trainer: dict[str, Any] | None = None,
        joined: int | None = None,
        **arguments: Any,
    ) -> None:
        """`joined`: accumulation of the one process, whose batch then is a whole window (default: that of the ranks)."""
        self.model, self.rows, self.override = model, rows, override
        self.trainer, self.joined, self.arguments = trainer or {}, joined, arguments

    def build(self, base: type, arguments_class: type, folder: Path | str, micro: int, **changes: Any) -> Any:
        """A trainer of class `base`, ready to run."""
        cls: Any = type("Overridden", (self.override, base), {}) if self.override else base
        arguments = arguments_class(**plain_arguments(folder, micro, **{**self.arguments, **changes}))
        rows = self.rows()
        given = {"train_dataset": rows, "eval_dataset": rows[:24], "data_collator": pad, **self.trainer}
        return cls(make_model(self.model), arguments, **given)

    def in_one_process(self, folder: Path | str, world: int = 2, **changes: Any) -> Any:
        """The stock Trainer on the batches that `world` ranks see together."""
        micro = 2 * world
        if self.joined:
            changes["gradient_accumulation_steps"] = self.joined
            micro *= 3 // self.joined
        return self.build(Trainer, TrainingArguments, folder, micro, per_device_eval_batch_size=2, **changes)


RECIPES: dict[str, Recipe] = {
    "plain": Recipe(trainer={"data_collator": pad_encoded}),
    "label_smoothing": Recipe(label_smoothing_factor=0.1),
    "override_adds": Recipe(override=AddsToTheLoss),
    "override_own": Recipe(override=OwnLoss, trainer={"data_collator": pad_encoded}),
    "compute_loss_func": Recipe(trainer={"compute_loss_func": loss_func}),
    "classifier": Recipe("bert", classes, joined=1),
    "classifier_override": Recipe("bert", classes, AddsToTheLoss, joined=1),
    # The window must be the same on both sides, because HF sorts chunks of a multiple of the local batch.
    "group_by_length": Recipe(rows=lambda: texts(48), train_sampling_strategy="group_by_length"),
    "moe": Recipe("moe"),
    "lora": Recipe("lora", gradient_checkpointing=True),
    "checkpointing": Recipe(gradient_checkpointing=True),
    "adamw_torch_fused": Recipe(optim="adamw_torch_fused"),
    "sgd": Recipe(optim="sgd", optim_args="momentum=0.9"),
    "adagrad": Recipe(optim="adagrad"),
    "rmsprop": Recipe(optim="rmsprop"),
    "averaged": Recipe(trainer={"optimizer_cls_and_kwargs": (Averaged, {"lr": 0.5})}),
    "no_clipping": Recipe(max_grad_norm=0.0),
    "metrics": Recipe("bert", classes, trainer={"compute_metrics": accuracy}, joined=1),
    "dropout": Recipe("dropout"),  # for resuming only: ranks and one process draw different numbers
    "even": Recipe(rows=lambda: texts(48)),  # divides by 12: no rank repeats samples to fill its last batch
    "random_collator": Recipe("dropout", trainer={"data_collator": pad_at_random}),  # for resuming only
    "cosine": Recipe(lr_scheduler_type="cosine", warmup_steps=3),
}


def warmup_decay(step: int, warmup: int, total: int) -> float:
    """DeepSpeed's WarmupDecayLR as a factor of step 0, 1, ...: logarithmic warm-up, then a line to zero.

    DeepSpeed counts from -1, at which the rate is 0: the first two steps of a run have none.
    """
    index = step - 1
    if index < warmup:
        return math.log(max(0, index) + 1) / math.log(warmup)
    return max(0.0, (total - index) / max(1.0, total - warmup))
