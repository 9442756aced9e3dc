"""Tiny configs and batches for any class of the HF mappings, by the names of the config's fields."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_dist.parallel.tensor.tiny import FIXED, IMAGE, LAYERS, SCALED, VARIANTS, VOCAB, tiny_fields, varied
from hf_dist.parallel.tensor.tiny import tiny_model as model_of

__all__ = ["FIXED", "LAYERS", "SCALED", "VARIANTS", "VOCAB", "builders", "tiny_batches", "tiny_fields", "tiny_model"]


def builders(model_class: Any) -> Iterator[Callable[[], nn.Module]]:
    """Functions that build the same tiny random model on every call; the next one when a model does not build or run."""
    fields = tiny_fields(model_class.config_class())
    for variant in VARIANTS:
        yield functools.partial(tiny_model, model_class, varied(fields, variant))
    yield functools.partial(tiny_model, model_class, {k: v for k, v in fields.items() if not isinstance(v, dict)})


def tiny_model(model_class: Any, fields: dict[str, Any]) -> nn.Module:
    """A random fp32 model in training mode; attributes that the config refuses as arguments are left out."""
    return model_of(model_class, model_class.config_class(**fields))


def tiny_batches(task: str, model: Any) -> list[dict[str, torch.Tensor]]:
    """Two microbatches of different shapes (of equal ones for images)."""
    g = torch.Generator().manual_seed(3)
    config, batches = model.config, []
    for rows, length in ((2, 12), (2, 10)):
        if task == "image":
            vision = getattr(config, "vision_config", config)
            size = getattr(vision, "image_size", None) or IMAGE
            size = tuple(size) if isinstance(size, list | tuple) else (size, size)
            images = torch.randn(rows, getattr(vision, "num_channels", 3), *size, generator=g)
            batches.append({"pixel_values": images, "labels": torch.randint(0, 2, (rows,), generator=g)})
            continue
        ids = torch.randint(
            4, min(VOCAB, getattr(config, "vocab_size", VOCAB) or VOCAB) - 8, (rows, length), generator=g
        )
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, length - 3 :] = 0
        pad = getattr(config, "pad_token_id", None) or 0
        batch = {"input_ids": torch.where(mask == 0, pad, ids), "attention_mask": mask}
        if task == "classification":
            eos = getattr(config, "eos_token_id", None)
            if isinstance(eos, int) and eos < VOCAB:  # encoder-decoders classify at the end of the sentence
                batch["input_ids"][torch.arange(rows), mask.sum(1) - 1] = eos
            batch["labels"] = torch.randint(0, 2, (rows,), generator=g)
        else:
            batch["labels"] = ids.masked_fill(mask == 0, -100)
        batches.append(batch)
    return batches
