"""The Trainer over pipeline stages. One accumulation window is one pipeline batch; evaluation uses the stages, too.

HF's own `training_step` and `prediction_step` run on every stage. Losses, label smoothing and overrides of `compute_loss`
stay the Trainer's. `accelerator.backward` hands the loss to the schedule and ends the step on that stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_dist.checkpoint import random_state
from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.tensors import pytree

__all__ = ["PipelineMixin", "example_from"]

_ROWS = 2


class PipelineMixin:
    """Overrides of the Trainer for `pipeline.stages` above 1; part of `DistTrainerMixin`."""

    args: object
    accelerator: Any
    _microbatches: list[object]

    def _drop_microbatches(self) -> None:
        """Those that an interrupted training had collected."""
        self._microbatches = []
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        if engine is not None:
            engine.window.abandon()

    def _over_stages(
        self, step: Callable[..., torch.Tensor], model: nn.Module, inputs: object, num_items_in_batch: object
    ) -> torch.Tensor:
        """HF's `step`. Under a pipeline, collects the window's microbatches; the call for the last one runs and reports them
        all."""
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        if engine is None or not engine.runner.takes_windows:
            return step(model, inputs, num_items_in_batch)
        self._microbatches = [*self._microbatches, self._prepare_inputs(inputs)]  # type: ignore[attr-defined]
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=engine.device)
        window, self._microbatches = self._microbatches, []
        self.optimizer.train()  # type: ignore[attr-defined]
        # Copies: losses may remove labels from their batch, and a rank with several stages runs each batch several times.
        return engine.run_window(window, lambda model, batch: step(model, pytree.copied(batch), num_items_in_batch))

    def _evaluated_over_stages(
        self,
        step: Callable[..., object],
        model: nn.Module,
        inputs: object,
        prediction_loss_only: bool,
        *args: object,
        **kwargs: object,
    ) -> object:
        """HF's `step`. Under a pipeline, every rank gets the outputs of the last stage."""
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        if engine is None or not engine.runner.takes_windows or generates:
            return step(model, inputs, prediction_loss_only, *args, **kwargs)
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        return engine.evaluate(
            inputs, lambda model, batch: step(model, pytree.copied(batch), prediction_loss_only, *args, **kwargs)
        )


def example_from(loader: DataLoader[object] | None) -> Mapping[str, object]:
    """A small batch for planning: two rows of the dataset of `loader` through its collator. `loader` does not advance. Local.

    Restores the random states. Raises `ModelError` if there is no loader or it has no rows.
    """
    if loader is None:
        raise ModelError(
            "pipeline.stages is above 1, but no data loader is prepared before the model: the stages are planned with a batch "
            "of the data. Prepare the loader first, or in the same call."
        )
    before = random_state.capture()
    try:
        dataset: Any = loader.dataset
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            rows = [dataset[i] for i in range(min(_ROWS, len(dataset)))]
        else:
            rows = list(itertools.islice(iter(dataset), _ROWS))
        if not rows:
            raise ModelError("pipeline.stages is above 1, and the dataset is empty: nothing to plan the stages with")
        collate: Any = loader.collate_fn
        batch = collate(rows)
        return batch if isinstance(batch, Mapping) else dict(batch)
    finally:
        random_state.restore(before)
