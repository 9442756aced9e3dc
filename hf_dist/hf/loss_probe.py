"""Checks whether a model's own loss honours `num_items_in_batch`, by running the model: its signature does not tell.

HF's Trainer assumes that any model with `**kwargs` in its forward divides a sum by `num_items_in_batch`. It then multiplies
the loss by the number of ranks and does not divide by the accumulation steps. But many classes
(BertForSequenceClassification, all heads with a plain `CrossEntropyLoss`) take `**kwargs` and return a mean. Their loss and
gradient then grow with the number of ranks and microbatches, and differ from one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_dist.engine import Engine
from hf_dist.log import say_once


def counts_on_num_items(trainer: Any) -> bool:
    """Whether the Trainer will rely on `num_items_in_batch` in a layout where that matters.

    False for TRL's trainers: they compute the loss from logits themselves, and some generate while they prepare a batch.
    """
    return bool(
        trainer.model_accepts_loss_kwargs
        and not any(c.__module__.startswith("trl.") and "compute_loss" in vars(c) for c in type(trainer).__mro__)
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and (trainer.accelerator.num_processes > 1 or trainer.args.gradient_accumulation_steps > 1)
    )


def ignores_num_items(trainer: Any, model: nn.Module, inputs: Any) -> bool:
    """Whether the loss of this batch stays the same for another `num_items_in_batch`. Every rank calls it.

    Runs two forwards without gradient, in evaluation mode, at the first microbatch of a run. Draws no random numbers.
    """
    prepared = trainer._prepare_inputs(dict(inputs))
    was_training = model.training
    model.eval()
    try:
        count = torch.tensor(7.0, device=trainer.args.device)
        losses = [_loss_for(trainer.dist_engine, prepared, n) for n in (count, 2 * count)]
    finally:
        model.train(was_training)
    if losses[0] is None or losses[1] is None or not torch.isclose(losses[0].float(), losses[1].float(), rtol=1e-3):
        return False
    say_once(
        f"{type(model).__name__} returns mean losses and ignores num_items_in_batch: they are averaged over microbatches and "
        "ranks; nothing to do, unless microbatches count different numbers of tokens (then pass compute_loss_func)"
    )
    return True


def _loss_for(engine: Engine, prepared: Any, count: torch.Tensor) -> torch.Tensor | None:
    return engine.evaluate(prepared, lambda model, batch: _loss(model(**batch, num_items_in_batch=count)))


def _loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output[0]
    return loss if isinstance(loss, torch.Tensor) else None
