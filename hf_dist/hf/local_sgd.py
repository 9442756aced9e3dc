"""accelerate's `LocalSGD` on `DistAccelerator`: the loop decides when replicas average, and the engine averages them.

The stock class averages `param.data` of DDP's copies. Here a copy may be sharded, so the outer step of `local_sgd` does it.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

from accelerate.local_sgd import LocalSGD

from hf_dist.engine.engine import Engine
from hf_dist.errors import ConfigError, Problem

__all__ = ["let_local_sgd_work"]


@functools.cache  # once per process
def let_local_sgd_work() -> None:
    """Make accelerate's `LocalSGD` call the engine if the model has one. Local."""
    enter, leave, average = LocalSGD.__enter__, LocalSGD.__exit__, LocalSGD._sync_and_avg_model_params

    @functools.wraps(enter)
    def __enter__(self: Any) -> object:
        engine = _engine_of(self)
        if engine is None:
            return enter(self)
        if engine.outer is None and engine.mesh.axes.size("dp") > 1:
            raise ConfigError(
                Problem(
                    "local_sgd.every",
                    "",
                    "is missing, and all ranks train together: LocalSGD has no replicas to average",
                    f'Add "local_sgd": {{"every": {self.local_sgd_steps}}} (and at stages 1 to 3 '
                    '"zero_optimization.mics_shard_size", the ranks of a replica).',
                )
            )
        if engine.outer is not None:
            self._every, engine.outer.every = engine.outer.every, 0  # the loop counts
        self.model_sync_obj = nullcontext()
        return self

    @functools.wraps(leave)
    def __exit__(self: Any, kind: object, error: object, trace: object) -> object:
        engine = _engine_of(self)
        if engine is not None and engine.outer is not None:
            engine.outer.every = self._every
            if kind is not None:
                return None  # a failed rank must not start a collective
        return leave(self, kind, error, trace)

    @functools.wraps(average)
    def _sync_and_avg_model_params(self: object) -> None:
        engine = _engine_of(self)
        if engine is None:
            average(self)
        else:
            engine.synchronize_replicas()

    LocalSGD.__enter__, LocalSGD.__exit__ = __enter__, __exit__
    LocalSGD._sync_and_avg_model_params = _sync_and_avg_model_params


def _engine_of(context: Any) -> Engine | None:
    """The engine of the context's model; None if the context is disabled or belongs to another accelerator."""
    if not context.enabled:
        return None
    find = getattr(context.accelerator, "engine_of", None)
    engine: Engine | None = find(context.model) if find is not None else None
    return engine
