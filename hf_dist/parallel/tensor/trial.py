"""Batches on which a plan is tried: what a class's forward takes, by the names of its arguments and its config's fields.

A class that reads tokens is tried on tokens; others on images, waves, spectrograms or series. The sizes come from the config.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hf_dist.model_config import field, text_config
from hf_dist.parallel.tensor.tiny import IMAGE, VOCAB

__all__ = ["Batch", "trial_batches", "trial_input"]

Batch = dict[str, torch.Tensor]
SHAPES = ((2, 12), (2, 11))
"""Rows and tokens of two microbatches; no number of ranks divides the second."""


def trial_batches(model: Any) -> Iterator[list[Batch]]:
    """Pairs of ragged microbatches for `model`'s forward, the likeliest first: take the next if it does not run. On the CPU.

    A model that can read tokens alone is first tried on tokens; then come all inputs that its forward must have, or that
    are its main input.
    """
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    required = {name for name, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    known = set(takes) & set(_MAKERS)
    if "input_ids" not in takes:
        known -= {"attention_mask"}  # of images or sounds: of another length
    tokens = {"input_ids", "attention_mask", *_OF_TOKENS}
    reads_tokens = "input_ids" in takes or not known
    wanted = [
        *([tokens & known or {"input_ids", "attention_mask"}] if reads_tokens else []),
        {main} | required,
        {main} | required | (known & set(_BESIDE)),
        known - set(_FUTURE),
        known,
    ]
    seen: list[set[str]] = []
    for names in wanted:
        names &= set(_MAKERS)
        if names and names not in seen:
            seen.append(names)
            yield _batches(model.config, [name for name in _MAKERS if name in names])


def _batches(config: object, names: Sequence[str]) -> list[Batch]:
    g = torch.Generator().manual_seed(3)
    batches: list[Batch] = []
    for rows, length in SHAPES:
        batch: Batch = {}
        for name in names:
            if name in _OF_TOKENS and batches:
                continue  # a model that can do without takes another path then
            batch[name] = _MAKERS[name](_Trial(config, rows, length, g, batch))
        batches.append(batch)
    return batches


def trial_input(name: str, config: object, batch: Batch) -> torch.Tensor:
    """One input beside the token ids of `batch`: images, a spectrogram. On the CPU, the same on every call."""
    rows, length = batch["input_ids"].shape
    return _MAKERS[name](_Trial(config, rows, length, torch.Generator().manual_seed(3), batch))


class _Trial:
    """What a maker of one input needs."""

    def __init__(self, config: object, rows: int, length: int, generator: torch.Generator, batch: Batch) -> None:
        self.config, self.rows, self.length, self.generator, self.batch = config, rows, length, generator, batch

    def of(self, names: str, default: object) -> Any:
        """The first field of this name that the config, or the config of one of its parts, has."""
        nested = [c for c in vars(self.config).values() if hasattr(c, "to_dict") and hasattr(c, "model_type")]
        for config in (self.config, *nested):
            for name in names.split():
                if vars(config).get(name) is not None:
                    return vars(config)[name]
        return default

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.rows, *shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (self.rows, *shape), generator=self.generator)


def _ids(trial: _Trial) -> torch.Tensor:
    vocabulary = min(VOCAB, field(text_config(trial.config), "vocab_size", VOCAB) or VOCAB)
    ids = trial.integers(4, vocabulary - 8, trial.length)
    pad = getattr(trial.config, "pad_token_id", None) or 0
    eos = getattr(trial.config, "eos_token_id", None)
    if getattr(trial.config, "is_encoder_decoder", False) and isinstance(eos, int) and eos < vocabulary:
        ids[torch.arange(trial.rows), _mask(trial).sum(1) - 1] = eos  # these classify at the end of the sentence
    return torch.where(_mask(trial) == 0, pad, ids)


def _mask(trial: _Trial) -> torch.Tensor:
    mask = torch.ones(trial.rows, trial.length, dtype=torch.long)
    mask[0, trial.length - 3 :] = 0
    return mask


def _pair(value: object) -> tuple[int, int]:
    return tuple(value)[:2] if isinstance(value, list | tuple) else (value, value)


def _images(trial: _Trial) -> torch.Tensor:
    return trial.normal(trial.of("num_channels in_channels", 3), *_pair(trial.of("image_size", IMAGE)))


def _patches(trial: _Trial) -> int:
    image, patch = _pair(trial.of("image_size", IMAGE)), _pair(trial.of("patch_size", 16))
    return math.prod(whole // part for whole, part in zip(image, patch, strict=True))


def _wave(trial: _Trial) -> torch.Tensor:
    bins = trial.of("num_mel_bins", None)
    if bins is not None and trial.of("conv_stride", None) is None:  # a spectrogram transformer
        return trial.normal(trial.of("max_length", 64), bins)
    strides = trial.of("conv_stride upsampling_ratios", (320,))
    return trial.normal(math.prod(strides) * (trial.length + 4))


def _spectrogram(trial: _Trial) -> torch.Tensor:
    bins = trial.of("num_mel_bins input_feat_per_channel feature_projection_input_dim", 80)
    frames = trial.of("max_source_positions", 4 * trial.length)
    if trial.of("model_type", "").startswith("whisper"):
        return trial.normal(bins, 2 * frames)  # a fixed length
    return trial.normal(4 * trial.length, bins)


def _past(trial: _Trial) -> int:
    lags = trial.of("lags_sequence", [0])
    return int(trial.of("context_length", 16)) + max(lags, default=0)


def _channels(trial: _Trial) -> tuple[int, ...]:
    size = trial.of("num_input_channels", None) or trial.of("input_size", 1)
    return () if size == 1 and trial.of("lags_sequence", None) is not None else (int(size),)


def _series(length: Callable[[_Trial], int], features: bool = False) -> Callable[[_Trial], torch.Tensor]:
    def make(trial: _Trial) -> torch.Tensor:
        if features:
            return trial.normal(length(trial), int(trial.of("num_time_features", 1)))
        return trial.normal(length(trial), *_channels(trial))

    return make


def _horizon(trial: _Trial) -> int:
    return int(trial.of("prediction_length", 4))


def _steps(*width: str) -> Callable[[_Trial], torch.Tensor]:
    return lambda trial: trial.normal(trial.length, *(int(trial.of(name, 1)) for name in width))


_MAKERS: dict[str, Callable[[_Trial], torch.Tensor]] = {
    "input_ids": _ids,
    "attention_mask": _mask,
    "entity_ids": lambda trial: torch.ones(trial.rows, 2, dtype=torch.long),
    "entity_position_ids": lambda trial: torch.tensor([[1, 2, -1], [4, -1, -1]]).expand(trial.rows, -1, -1),
    "decoder_input_ids": lambda trial: trial.integers(4, VOCAB - 8, trial.length),
    "pixel_values": _images,
    "noise": lambda trial: torch.rand(trial.rows, _patches(trial), generator=trial.generator),
    "input_values": _wave,
    "input_features": _spectrogram,
    "past_values": _series(_past),
    "past_time_features": _series(_past, features=True),
    "past_observed_mask": lambda trial: torch.ones(trial.rows, _past(trial), *_channels(trial)),
    "static_categorical_features": lambda trial: trial.integers(0, 1, trial.of("num_static_categorical_features", 0)),
    "future_values": _series(_horizon),
    "future_time_features": _series(_horizon, features=True),
    "states": _steps("state_dim"),
    "actions": _steps("act_dim"),
    "rewards": lambda trial: trial.normal(trial.length, 1),
    "returns_to_go": lambda trial: trial.normal(trial.length, 1),
    "timesteps": lambda trial: torch.arange(trial.length).expand(trial.rows, -1),
}
"""Argument of a forward -> how a trial of it is made."""
_OF_TOKENS = ("entity_ids", "entity_position_ids")
"""Optional inputs that code of their own reads: given to the first of the two batches."""
_BESIDE = ("input_ids", "attention_mask", "decoder_input_ids", "pixel_values")
"""What goes with a main input, where a forward takes it: images beside texts, tokens beside sounds."""
_FUTURE = ("future_values", "future_time_features", "static_categorical_features")
