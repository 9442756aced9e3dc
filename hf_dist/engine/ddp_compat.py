"""torch's DDP around a model that hf_dist has prepared, or whose weights are still in their files.

The constructor of DDP sends all weights from C++, which asks no guard (`sharding/guard.py`): it would read memory that is not
there. A stock Trainer or accelerator makes DDP, so a script reaches it after a training of ours in the same process.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dist.engine.unprepare import made_ordinary
from hf_dist.errors import ModelError
from hf_dist.sharding.guard import make_readable
from hf_dist.sharding.ownership import prepared_in

__all__ = ["give_ddp_whole_weights"]


@functools.cache
def give_ddp_whole_weights() -> None:
    """From now on, DDP in this process first reads the weights of a model, or makes the model ordinary. Local."""
    stock = DistributedDataParallel.__init__

    @functools.wraps(stock)
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _make_whole(module)
        stock(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _make_whole(model: nn.Module) -> None:
    """Collective if the model is prepared: DDP's constructor is. Raises `ModelError` for a model in training."""
    for part in prepared_in(model):
        if not made_ordinary(part, "DistributedDataParallel(model)"):
            raise ModelError(
                f"DistributedDataParallel({type(model).__name__}): the model is prepared by hf_dist and is in training. After "
                "training DDP, or a stock Trainer, can have it: delete the engine or the Trainer, or call "
                "hf_dist.unprepare(model) on every rank, first."
            )
    for param in model.parameters():
        make_readable(param)  # from its file; raises for a part of a prepared model
