"""Tiny configs and batches for any class of the HF mappings, by the names of the config's fields."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_dist.parallel.tensor.tiny import FIXED, IMAGE, LAYERS, SCALED, VARIANTS, VOCAB, tiny_fields, varied
from hf_dist.parallel.tensor.tiny import tiny_model as model_of

__all__ = ["FIXED", "LAYERS", "SCALED", "VARIANTS", "VOCAB", "builders", "tiny_batches", "tiny_fields", "tiny_model"]


def builders(model_class: Any, extra: dict[str, Any] | None = None) -> Iterator[Callable[[], nn.Module]]:
    """Functions that build the same tiny random model on every call; the next one when a model does not build or run.

    `extra`: fields of the config beside those that make it tiny.
    """
    config = model_class.config_class()
    fields = with_modal_fields(config, tiny_fields(config)) | (extra or {})
    for variant in VARIANTS:
        yield functools.partial(tiny_model, model_class, varied(fields, variant))
    yield functools.partial(tiny_model, model_class, {k: v for k, v in fields.items() if not isinstance(v, dict)})


MODAL: dict[str, Any] = {
    "image_token_(id|index)": VOCAB - 1,
    "video_token_(id|index)": VOCAB - 2,
    "audio_token_(id|index)": VOCAB - 3,
    "mm_tokens_per_image": 4,
    "projection_dim|output_dim|out_hidden_size": 32,
    "vision_output_dim": 192,
    "ext_pw_out_channel|depthwise_separable_out_channel|nemo_conv_channels": 32,
    "image_grid_pinpoints": [[64, 64], [64, 128], [128, 64]],
}
"""Fields by name: tokens that stand for images and sounds are in the vocabulary, and images give few of them."""


def with_modal_fields(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of a class that takes images or sounds beside a text."""
    changed = dict(fields)
    for name, value in vars(config).items():
        if isinstance(fields.get(name), dict):
            changed[name] = with_modal_fields(value, fields[name])
        for pattern, tiny in MODAL.items():
            if (value is not None or "token" in pattern) and re.fullmatch(pattern, name):
                changed[name] = tiny
        if name == "vision_feature_layer" and isinstance(value, list | tuple):
            changed[name] = tuple(-2 for _ in value)
    if getattr(config, "downsample_rate", None) and changed.get("window_size"):  # Granite's windows are divided by it
        changed["window_size"] = 3 * config.downsample_rate
    reads, made = changed.get("projector_config"), changed.get("encoder_config")
    if (
        isinstance(reads, dict) and isinstance(made, dict) and "hidden_dim" in made
    ):  # Granite's projector reads the encoder
        changed["projector_config"] = {**reads, "encoder_hidden_size": made["hidden_dim"]}
    return changed


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
