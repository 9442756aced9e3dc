"""Finds out what kind of loss a model returns, by running the model: its signature does not tell.

HF's Trainer assumes that any model with `**kwargs` in its forward divides a sum by `num_items_in_batch`. It then multiplies
the loss by the number of ranks and does not divide by the accumulation steps. But many classes (all heads with a plain
`CrossEntropyLoss`) take `**kwargs` and return a mean. Their loss and gradient would grow with the number of ranks and
microbatches. Others return a plain sum (CTC), which HF's arithmetic adds up as one process would.
"""

from __future__ import annotations

import inspect
import math
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_dist.dist import collectives
from hf_dist.log import say_once
from hf_dist.parallel.experts.router_loss import has_coefficient
from hf_dist.tensors import pytree

__all__ = [
    "MEANS_OF_LABELS",
    "LossKind",
    "kind_of_loss",
    "loss_kind_matters",
]

_RELATIVE = 1e-3
_ROUNDING = 3e-7
"""Relative, of a mean in fp32."""
_LOSSES = {
    f for name, f in vars(functional).items() if name.endswith(("_loss", "cross_entropy", "with_logits", "kl_div"))
}
LABELS = "labels"
IGNORED = -100
"""The label of what counts for nothing; HF pads labels with it."""


class LossKind(IntEnum):
    """What the loss of a model is; of what several ranks found, the largest counts, for which there is most evidence."""

    NONE = 0
    """These rows ask for no loss: no labels."""
    UNDECIDED = 1
    """These rows cannot tell: nothing in them is labelled, or the loss is zero or not a number."""
    MEAN_ALONE = 2
    """The same, but what these rows leave is a mean of them, the part of a loss beside that of labels. Decides nothing."""
    MEAN = 3
    """The same for any `num_items_in_batch` and any number of rows."""
    LABELLED = 4
    """The mean over the labelled tokens or rows of the batch, whatever `num_items_in_batch` is."""
    SHIFTED = 5
    """The same without the first token of each row, which no token predicts."""
    SUM = 6
    """A sum over the rows, whatever `num_items_in_batch` is."""
    COUNTED = 7
    """A sum over `num_items_in_batch`."""
    MIXED = 8
    """The same beside a term that is a mean, such as the z-loss of Bamba: counted once for every microbatch of every rank."""


MEANS_OF_LABELS = (LossKind.LABELLED, LossKind.SHIFTED)
_OF_LABELS = (
    "returns the mean over the labels of a batch, whatever num_items_in_batch is: the losses of microbatches and ranks are "
    "weighted by their numbers of labels, as one process weights the rows of a batch"
)
_SAID = {
    LossKind.MEAN: "returns mean losses and ignores num_items_in_batch: they are averaged over microbatches and ranks; nothing "
    "to do, unless microbatches count different numbers of tokens (then pass compute_loss_func)",
    LossKind.LABELLED: _OF_LABELS,
    LossKind.SHIFTED: _OF_LABELS,
    LossKind.SUM: "returns the sum of its rows' losses, whatever num_items_in_batch is: they are added up over microbatches "
    "and ranks, as one process adds up the rows of a batch",
    LossKind.MIXED: "adds a mean to a loss that counts items: the mean is averaged over microbatches and ranks, as in one "
    "process that runs all rows at once (transformers adds it up over microbatches)",
}
"""What the log says, behind the class's name."""


def loss_kind_matters(trainer: Any) -> bool:
    """Whether microbatches or ranks of several losses become one, so that it counts what the loss is. The same on every rank.

    False for TRL's trainers: they compute the loss from logits themselves, and some generate while they prepare a batch. False
    where a class of the user computes a loss for a model that does not say that it counts items, or says how it is scaled.
    """
    return bool(
        (trainer.model_accepts_loss_kwargs or not _overrides(trainer, "compute_loss", "training_step"))
        and not any(c.__module__.startswith("trl.") and "compute_loss" in vars(c) for c in type(trainer).__mro__)
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and not getattr(trainer, "loss_is_scaled_for_ga", None)
        and (trainer.accelerator.num_processes > 1 or trainer.args.gradient_accumulation_steps > 1)
    )


def kind_of_loss(trainer: Any, model: nn.Module, inputs: Any) -> LossKind:
    """What the loss of the model is, as far as the batches of all ranks can tell. Every rank of the job calls it.

    Up to seven forwards without gradient, in evaluation mode, if any rank has labels. Draws no random numbers.
    """
    axis = trainer.dist_engine.mesh.control
    asks = any(inputs.get(name) is not None for name in (*(trainer.label_names or ()), LABELS, "return_loss"))
    # A class whose forward takes `*args, **kwargs` names no labels, and may still return a loss: of training, it has to.
    own = _overrides(trainer, "compute_loss", "training_step")
    asks = asks and not (own and _is_foreign(model, inputs))
    may = asks or (model.training and not own)
    # A forward is collective: all ranks run it, or none.
    asked, tried = (max(found) for found in zip(*collectives.all_gather_object(axis, (asks, may)), strict=True))
    if not tried:
        return LossKind.NONE
    kind = LossKind(max(collectives.all_gather_object(axis, int(_found(trainer, model, inputs)))))
    if kind <= LossKind.MEAN_ALONE and not asked:
        return LossKind.NONE
    if kind in _SAID and (kind != LossKind.MEAN or trainer.model_accepts_loss_kwargs):
        say_once(f"{type(model).__name__} {_SAID[kind]}")
    return kind


def _found(trainer: Any, model: nn.Module, inputs: Any) -> LossKind:
    """What this rank's rows tell. Every rank runs the same forwards."""
    prepared = trainer._prepare_inputs(dict(inputs))
    axis = trainer.dist_engine.mesh.control
    count = torch.tensor(7.0, device=trainer.args.device)
    was_training = model.training
    model.eval()
    try:
        once, half = (_value(trainer, prepared, n) for n in (count, 2 * count))
        counted = math.isfinite(once + half) and not math.isclose(once, half, rel_tol=_RELATIVE)
        # Rows that are there twice double a sum. Only if no rank has seen that the number of items counts, and if on all of
        # them every tensor has its rows first: lengths of packed sequences, say, cannot be repeated with them.
        seen, in_rows = zip(*collectives.all_gather_object(axis, (counted, _in_rows(prepared))), strict=True)
        if any(seen):
            kind = _counted(trainer, prepared if all(in_rows) else None, once, half)
            return kind if counted else LossKind.UNDECIDED
        doubled = {key: _twice(value) for key, value in prepared.items()}
        twice = _value(trainer, doubled, count) if all(in_rows) else once
        over_labels = _mean_of_labels(trainer, prepared, once, count)
    finally:
        model.train(was_training)
    labels = [prepared.get(name) for name in trainer.label_names or [LABELS]]
    if once == 0 or not math.isfinite(once):
        return LossKind.UNDECIDED
    if any(_is_empty(label) for label in labels):
        is_mean = all(in_rows) and math.isclose(twice, once, rel_tol=_RELATIVE) and not _has_router_loss(trainer)
        return LossKind.MEAN_ALONE if is_mean else LossKind.UNDECIDED
    if abs(twice - 2 * once) < abs(twice - once):
        return LossKind.SUM
    return over_labels or LossKind.MEAN


def _counted(trainer: Any, prepared: Any, once: float, half: float) -> LossKind:
    """What a loss is that is `half` for twice as many items: whether a mean of the rows stays. Every rank runs it.

    What is doubled by rows that are there twice is added up like the sum; `prepared` is None for rows that cannot be.
    """
    rest = 2 * half - once
    if _has_router_loss(trainer):
        rest = 0.0
    has_rest = math.isfinite(rest) and abs(rest) > _RELATIVE * abs(once)
    if prepared is None or not any(collectives.all_gather_object(trainer.dist_engine.mesh.control, has_rest)):
        return LossKind.COUNTED
    doubled = {key: _twice(value) for key, value in prepared.items()}
    count = torch.tensor(7.0, device=trainer.args.device)
    twice, of_more = (_value(trainer, doubled, n) for n in (count, 2 * count))
    return LossKind.MIXED if has_rest and math.isclose(2 * of_more - twice, rest, rel_tol=0.1) else LossKind.COUNTED


def _has_router_loss(trainer: Any) -> bool:
    """A mixture's: `hf_dist.router_loss` says how that term is counted."""
    return has_coefficient(getattr(trainer.model, "config", None))


def _mean_of_labels(trainer: Any, prepared: Any, once: float, count: torch.Tensor) -> LossKind | None:
    """Whether the loss is that of two parts of the labels, weighted by how many each has, the first of each row among them or
    not. Every rank runs the same forwards."""
    labels = prepared.get(LABELS)
    can_be_masked = (
        isinstance(labels, torch.Tensor)
        and not labels.is_floating_point()
        # Labels of rows may be used as indices, so only where one is left out already.
        and (labels.ndim == 2 or bool((labels == IGNORED).any()))
        and [name for name in trainer.label_names or [LABELS] if prepared.get(name) is not None] == [LABELS]
        and not _overrides(trainer, "compute_loss")
    )
    of_tokens = can_be_masked and isinstance(labels, torch.Tensor) and labels.ndim == 2
    everyone = collectives.all_gather_object(trainer.dist_engine.mesh.control, (can_be_masked, of_tokens))
    if not all(can for can, _ in everyone):
        return None
    assert isinstance(labels, torch.Tensor)

    def value(of: torch.Tensor) -> float:
        return _value(trainer, {**prepared, LABELS: of}, count)

    # Ranks whose labels differ in shape run as many forwards all the same.
    with_first, without = (
        (value(of) for of in _first_and_last(labels)) if all(tokens for _, tokens in everyone) else (0, 1)
    )
    shifted = with_first == without
    counted = labels.ne(IGNORED)
    if shifted:
        counted[:, 0] = False
    first = _first_third(counted)
    values = [value(labels.masked_fill(counted & ~kept, IGNORED)) for kept in (first, ~first)]
    sizes = [int((counted & kept).sum()) for kept in (first, ~first)]
    if not sizes[0] or not all(map(math.isfinite, values)):
        return None
    joined = sum(size * v for size, v in zip(sizes, values, strict=True)) / sum(sizes)
    # Little in a fresh model, to which all tokens are as likely, and 0 for a loss that does not look at labels.
    apart = abs(values[0] - values[1])
    if not apart or abs(joined - once) > 0.05 * apart + _ROUNDING * abs(once):
        return None
    return LossKind.SHIFTED if shifted else LossKind.LABELLED


def _first_third(counted: torch.Tensor) -> torch.Tensor:
    """The first third of the True ones, in each row, of which none loses all: MBart looks for the last label of each row."""
    rows = counted if counted.ndim == 2 else counted.reshape(1, -1)
    number, place = rows.sum(dim=1, keepdim=True), rows.cumsum(dim=1)
    most = torch.where(number > 1, (number // 3).clamp(min=1), 0)
    return (rows & (place <= most)).view(counted.shape)


def _first_and_last(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of tokens (rows, length): of each row that of the first token and the last one, and the last one alone.

    A loss of shifted labels is the same for both. Two labels a row, because among many a first one changes a fresh model's
    mean by less than fp32 tells. A row without a label behind its first token stays as it is in both. HF knows which classes
    shift by their names (`_loss_shifts_labels`), and is wrong for the decoders of pairs.
    """
    counted = labels.ne(IGNORED)
    counted[:, 0] = False
    place = counted * torch.arange(labels.shape[1], device=labels.device)
    last = counted & (place == place.amax(dim=1, keepdim=True))
    without = torch.where(counted.any(dim=1, keepdim=True), labels.masked_fill(~last, IGNORED), labels)
    both = without.clone()
    first = torch.where(labels[:, 0] == IGNORED, labels.amax(dim=1), labels[:, 0])
    both[:, 0] = torch.where(counted.any(dim=1), first, labels[:, 0])
    return both, without


def _overrides(trainer: object, *methods: str) -> bool:
    """Whether a class of the user, or of another library, has one of these methods, and so a way of its own to a loss."""
    owners = [cls.__module__ for cls in type(trainer).__mro__ if not vars(cls).keys().isdisjoint(methods)]
    return not all(module.startswith(("hf_dist.", "transformers.")) for module in owners)


def _is_foreign(model: nn.Module, inputs: Any) -> bool:
    """Whether the model cannot take this batch: its forward names none of the keys. A user's loss makes calls of them."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, each in inspect.signature(model.forward).parameters.items() if each.kind in kinds}
    return bool(named) and named.isdisjoint(inputs)


def _is_empty(label: object) -> bool:
    """Whether no token is labelled; an auxiliary loss that is left then tells nothing."""
    return isinstance(label, torch.Tensor) and not label.is_floating_point() and bool((label == -100).all())


def _value(trainer: Any, prepared: object, count: torch.Tensor) -> float:
    """The loss for so many items, if the model is one that may be told; NaN without a loss."""
    told = {"num_items_in_batch": count} if trainer.model_accepts_loss_kwargs else {}

    def forward(model: Any, batch: Any) -> torch.Tensor | None:
        with _WideLosses():
            return _loss(model(**batch, **told))

    loss = trainer.dist_engine.evaluate(prepared, forward)
    return math.nan if loss is None else float(loss)


class _WideLosses(TorchFunctionMode):
    """Inside, torch's losses are computed in fp32: one of 4.6 in bf16 is known to 0.02, which hides what is asked here."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func in _LOSSES:
            args, kwargs = _wide(args), {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> object:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return type(value)(map(_wide, value)) if type(value) in (tuple, list) else value


def _in_rows(batch: Any) -> bool:
    """Whether all tensors have as many rows, and all lists (the boxes of each image) as many entries."""
    return len({_num_rows(value) for value in batch.values()} - {None}) == 1


def _num_rows(value: object) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else None
    if isinstance(value, (list, tuple)):
        return len(value)
    return -1 if pytree.leaves(value) and any(isinstance(leaf, torch.Tensor) for leaf in pytree.leaves(value)) else None


def _twice(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value]) if value.ndim else value
    return type(value)([*value, *value]) if isinstance(value, (list, tuple)) else value


def _loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output[0]
    return loss if isinstance(loss, torch.Tensor) else None
