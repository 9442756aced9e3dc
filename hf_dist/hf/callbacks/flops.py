"""Floating point operations that training a transformer needs, by formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_dist.model_config import field, text_config, values
from hf_dist.sharding.param_slice import held_slice


@dataclass(frozen=True)
class TrainingFlops:
    """Forward and backward, without recomputation by activation checkpointing.

        6 * N * tokens  +  12 * layers * width * (sum of squared text lengths)

    N: parameters that take part in a matrix product for every token. Embedding tables do not count (a head tied to one does);
    of a mixture's experts, the share that a token visits counts. 6 = 2 forward + 2 gradient of the inputs + 2 gradient of the
    weights; frozen parameters have 4. The second term is the scores and values of full attention (12 * layers * width *
    length per token), width = heads * head size, with no deduction for causal or sliding windows.

    Source: PaLM, Chowdhery et al. 2022, arXiv 2204.02311, appendix B; 6 * N is Kaplan et al. 2020, arXiv 2001.08361.
    """

    per_token: float
    per_pair: float
    """Per query-key pair; 0 if the config does not give layers and width."""

    @classmethod
    def of(cls, model: nn.Module) -> TrainingFlops | None:
        """The formula for `model`; None for encoder-decoders, where a token meets only part of the parameters. Local."""
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return None
        text = text_config(config)
        return cls(_per_token(model, _expert_share(text)), _per_pair(text))

    def total(self, tokens: int, pairs: int) -> float:
        """Operations for `tokens` tokens in texts whose squared lengths sum to `pairs`."""
        return self.per_token * tokens + self.per_pair * pairs


def _per_token(model: nn.Module, expert_share: float) -> float:
    total, seen = 0.0, set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in seen:
                seen.add(id(p))
                share = expert_share if ".experts." in f".{path}.{name}" else 1.0
                total += (6 if p.requires_grad else 4) * share * held_slice(p).whole_numel
    return total


def _expert_share(config: object) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((n for n in (field(config, name) for name in names) if n), None)
    visited = field(config, "num_experts_per_tok")
    return visited / total if total and visited else 1.0


def _per_pair(config: object) -> float:
    layers, hidden = field(config, "num_hidden_layers"), field(config, "hidden_size")
    heads, sizes = values(config, "num_attention_heads"), values(config, "head_dim")
    if not isinstance(layers, int):
        return 0.0
    if heads and sizes and all(isinstance(n, int) for n in heads + sizes):
        of_layers = [math.prod(pair) for pair in zip(_each(heads, layers), _each(sizes, layers), strict=True)]
        return 12.0 * sum(of_layers)
    return 12.0 * layers * hidden if isinstance(hidden, int) else 0.0


def _each(found: list[object], layers: int) -> list[Any]:
    """A value for each layer."""
    return found if len(found) == layers else found[:1] * layers
