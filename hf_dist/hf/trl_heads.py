"""The head's weight in TRL's fused losses, which multiply by `lm_head.weight` themselves instead of calling the head.

During the forward and backward of its own model the head is whole. But a teacher's forward is over when the student's loss
reads the teacher's head, and in backward no unit is unsharded for it. TRL wraps each such read in one function that gathers
for DeepSpeed; here it also gathers sharded heads. Source: trl 1.16, `trainer/utils.py` `maybe_gather_lm_head_ctx` and its
three callers.
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
"""The module that defines the function, and the one that imports its name."""


def let_trl_read_heads() -> None:
    """Give TRL's losses whole heads of prepared models. Local; does nothing if TRL was not imported."""
    for name in _MODULES:
        module: object = sys.modules.get(name)
        stock = getattr(module, _NAME, None)
        if stock is not None and stock is not _whole_heads:
            setattr(module, _NAME, _whole_heads)


@contextlib.contextmanager
def _whole_heads(*params: Any) -> Iterator[None]:
    """Inside, `params` may be read; None and unsharded tensors pass. Collective if a group of them is not whole."""
    groups = {id(p): getattr(p, OWNER)[0]() for p in params if hasattr(p, OWNER)}
    away = [p for p in params if id(p) in groups and groups[id(p)] is not None and not groups[id(p)].full.is_current]
    with unsharded(away, after=lambda group, changed: None):
        yield
