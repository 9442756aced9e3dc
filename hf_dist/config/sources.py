"""The sources for "auto" as plain values: TrainingArguments, the model's width, the number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_COPIED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
)
"""Attributes of TrainingArguments that are copied unchanged."""


@dataclass(frozen=True)
class AutoSources:
    """Values for "auto"; None if a value is not known yet."""

    data_world_size: int = 1
    """Ranks that read different data."""
    per_device_train_batch_size: int | None = None
    """Samples per rank and forward."""
    gradient_accumulation_steps: int | None = None
    """Forward and backward passes per optimizer step."""
    max_grad_norm: float | None = None
    """Largest global L2 norm of the gradient, 0 for no limit."""
    learning_rate: float | None = None
    """Peak learning rate."""
    adam_beta1: float | None = None
    """Decay of the first moment."""
    adam_beta2: float | None = None
    """Decay of the second moment."""
    adam_epsilon: float | None = None
    """Addend of the denominator."""
    weight_decay: float | None = None
    """Decoupled weight decay."""
    fp16: bool | None = None
    """Whether --fp16 or --fp16_full_eval is given."""
    bf16: bool | None = None
    """Whether --bf16 or --bf16_full_eval is given."""
    launcher_precision: str = ""
    """Precision given to `accelerate launch`: "fp16", "bf16" or "fp8"; that of the arguments is in the two fields above."""
    warmup_steps: int | None = None
    """Warm-up length in optimizer steps, at least 1."""
    num_training_steps: int | None = None
    """Length of the run in optimizer steps."""
    hidden_size: int | None = None
    """Width of the model."""
    auto_find_batch_size: bool = False
    """Whether the Trainer lowers the batch size by trial, so that the file's batch sizes are not binding."""
    lr_scheduler_type: str = ""
    """Schedule given on the command line, for the note that the config overrides it."""

    on_gpu: bool = False
    """Whether the ranks compute on GPUs, where collectives overlap computation."""
    only_loss_is_read: bool | None = None
    """Whether in training only the loss inside the model's forward reads the logits."""
    optim: str = ""
    """Optimizer given on the command line, for the same note."""

    @classmethod
    def from_training_arguments(
        cls, args: Any, *, data_world_size: int, num_training_steps: int | None = None, hidden_size: int | None = None
    ) -> AutoSources:
        """Read any object with the attributes of TrainingArguments; `data_world_size` counts data ranks only."""
        warmup = args.get_warmup_steps(num_training_steps) if num_training_steps is not None else None
        kind, optim = getattr(args, "lr_scheduler_type", ""), getattr(args, "optim", "")
        values: dict[str, Any] = {name: getattr(args, name) for name in _COPIED}
        values |= {
            "max_grad_norm": 0.0 if args.max_grad_norm is None else args.max_grad_norm,
            "fp16": bool(args.fp16 or getattr(args, "fp16_full_eval", False)),
            "bf16": bool(args.bf16 or getattr(args, "bf16_full_eval", False)),
            "warmup_steps": None if warmup is None else max(1, warmup),
            "num_training_steps": num_training_steps,
            "hidden_size": hidden_size,
            "auto_find_batch_size": bool(getattr(args, "auto_find_batch_size", False)),
            "lr_scheduler_type": str(getattr(kind, "value", kind) or ""),
            "only_loss_is_read": not getattr(args, "label_smoothing_factor", 0.0),
            "optim": str(getattr(optim, "value", optim) or ""),
        }
        if splits_batches(args):
            values["per_device_train_batch_size"] = max(1, args.per_device_train_batch_size // data_world_size)
        return cls(data_world_size=data_world_size, **values)

    @property
    def fp8(self) -> bool | None:
        """Whether products in float8 are asked for outside the file; None: not."""
        return True if self.launcher_precision == "fp8" else None

    def precision(self, name: str) -> tuple[bool | None, str]:
        """Whether "fp16" or "bf16" is turned on outside the file, and by what."""
        asked = "bf16" if self.launcher_precision == "fp8" else self.launcher_precision  # products; the rest is bf16
        if not getattr(self, name) and asked == name:
            return True, "mixed_precision of accelerate"
        return getattr(self, name), f"TrainingArguments.{name}"

    @property
    def adam_betas(self) -> list[float] | None:
        """Both Adam decays."""
        if self.adam_beta1 is None or self.adam_beta2 is None:
            return None
        return [self.adam_beta1, self.adam_beta2]

    @property
    def lowest_lr(self) -> float:
        """Learning rate at the start of warm-up."""
        return 0.0

    @property
    def hidden_squared(self) -> int | None:
        """Elements of one square weight of the model."""
        return None if self.hidden_size is None else self.hidden_size**2

    @property
    def prefetch_numel(self) -> int | None:
        """Number of elements to prefetch."""
        return None if self.hidden_size is None else int(0.9 * self.hidden_size**2)


def hidden_size_of(model_config: object) -> int | None:
    """Width of a model by its Hugging Face config, the largest if there are several; None if it names none."""
    for part in (model_config, getattr(model_config, "text_config", None)):
        width = getattr(part, "hidden_size", None)
        if width is not None:
            return int(width)
        widths = getattr(part, "hidden_sizes", None)
        if widths:
            return int(max(widths))
    return None


def splits_batches(args: object) -> bool:
    """Whether the batch size of TrainingArguments is that of all data ranks together (`accelerator_config.split_batches`)."""
    config = getattr(args, "accelerator_config", None)
    return bool(config.get("split_batches") if isinstance(config, dict) else getattr(config, "split_batches", False))
