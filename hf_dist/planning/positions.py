"""How many positions a model has, if it looks them up in a table: longer rows are an index error, which meta does not raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_dist.parallel.pipeline.meta import meta_twin
from hf_dist.planning.recorder import text_batch

__all__ = ["positions_of"]

_MOST_RESERVED = 2
"""OPT and BART have as many rows more in the table than positions."""
_PROBED = 8
"""Tokens of the row that shows which table is asked for every token."""


def positions_of(model: nn.Module) -> int | None:
    """Tokens of the longest row that the model has positions for; None if no table sets a limit (rotary, relative). Local.

    The table: an embedding beside that of the tokens, with the rows that `max_position_embeddings` says, which a forward asks
    for every token. `model` may be on meta and stays as it was. A model that does not run on meta has no limit here.
    """
    stated = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < _PROBED + _MOST_RESERVED:
        return None
    tables = _tables(model, stated)
    if not tables:
        return None
    asked = _asked(model, list(tables))
    return min((tables[name] for name in asked), default=None)


def _tables(model: nn.Module, stated: int) -> dict[str, int]:
    """Name -> positions of every table that may be one of positions. RoBERTa's begin behind the padding's number."""
    tokens: Any = getattr(model, "get_input_embeddings", lambda: None)()
    return {
        name: min(stated, module.num_embeddings - (module.padding_idx + 1 if module.padding_idx is not None else 0))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not tokens
        and stated <= module.num_embeddings <= stated + _MOST_RESERVED
    }


def _asked(model: nn.Module, names: list[str]) -> set[str]:
    """Those of the tables that one forward on meta asks for each of its tokens."""
    twin, found = meta_twin(model), set[str]()

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and args[0].shape[-1:] == (_PROBED,):
                found.add(name)

        return note

    for name in names:
        twin.get_submodule(name).register_forward_pre_hook(hook(name))
    try:
        with torch.no_grad():
            twin(**text_batch(twin, 1, _PROBED))
    except Exception:  # whatever a model's own code raises on meta; what it asked before still counts
        return found
    return found
