"""The head's weight in TRL's fused losses, which multiply by `lm_head.weight` themselves instead of calling the head.

Inside the forward and the backward of its own model the head is whole. A teacher's forward is over when the student's loss
reads it, and in backward it is nobody's turn. TRL enters one function around each such read, which gathers for DeepSpeed;
here it gathers what is not whole, too. Source: trl 1.16, `trainer/utils.py` `maybe_gather_lm_head_ctx` and its three callers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from hf_dist.sharding.full_params import unsharded
from hf_dist.sharding.prepared import OWNER

__all__ = ["let_trl_read_heads"]

_NAME = "maybe_gather_lm_head_ctx"
_MODULES = ("trl.trainer.utils", "trl.kernels.chunked_divergence")
"""Where it is defined, and where its name was imported to."""


def let_trl_read_heads() -> None:
    """Have TRL's losses find heads whole that our accelerators have prepared. Local; nothing where TRL was not imported."""
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        stock = getattr(module, _NAME, None)
        if stock is not None and stock is not _whole_heads:
            setattr(module, _NAME, _whole_heads)


@contextlib.contextmanager
def _whole_heads(*params: Any) -> Iterator[None]:
    """Inside, the parameters may be read; None and tensors of others pass. Collective where a group of them is not whole."""
    groups = {id(p): getattr(p, OWNER)[0]() for p in params if hasattr(p, OWNER)}
    away = [p for p in params if id(p) in groups and groups[id(p)] is not None and not groups[id(p)].fresh]
    with unsharded(away, settle=lambda group, changed: None):
        yield
