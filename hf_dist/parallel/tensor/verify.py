"""Verifies a plan: compares a tiny copy of the model, split over threads of this process, with the same copy unsplit.

A wrong state of an activation raises no error; it gives a gradient that is off by a factor. So a plan is used only if
loss and every gradient of the split copy equal those of the unsplit one. One repair is tried: if only gradients of whole
parameters are off, these lie between a column and a row product and each rank has a part of their gradient, so it is summed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.tensor.peers import ThreadPeers, run_threads
from hf_dist.parallel.tensor.plan import SplitPlan, pattern_of
from hf_dist.parallel.tensor.split import SplitModel
from hf_dist.parallel.tensor.tiny import tiny_copies
from hf_dist.parallel.tensor.trial import Batch, trial_batches
from hf_dist.tensors import pytree
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["Difference", "Unsplit", "unsplit", "verified"]

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""Relative to the largest element of each gradient, or to a thousandth of the largest of all if that is more."""
Blocks = Callable[[nn.Module], Mapping[str, nn.Module]]


class Difference(ModelError):
    """A plan that gives different numbers."""


@dataclass(frozen=True)
class Unsplit:
    """A tiny model and its results on one rank."""

    model: nn.Module
    batches: list[Batch]
    losses: list[float]
    gradients: Mapping[str, torch.Tensor]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The model's own next-token loss, or else a number to which every output contributes."""
    if _is_language_model(model) and "input_ids" in batch:
        labels, mask = batch["input_ids"], batch.get("attention_mask")
        labels = labels if mask is None else labels.masked_fill(mask == 0, -100)
        loss: Any = model(**batch, labels=labels).loss
        if loss is not None:
            return loss
    output = model(**batch)
    tensors = [t for t in pytree.leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


def _is_language_model(model: nn.Module) -> bool:
    name = type(model).__name__
    return name.endswith(("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel", "LMHead"))


def unsplit(model: nn.Module, size: int) -> Unsplit:
    """The first tiny copy of `model` that builds, runs, and computes the same twice. Local, on the CPU.

    Raises `ModelError` if there is none.
    """
    problem, tried = "its config is not one of transformers", ""
    for build in tiny_copies(model, size):
        try:
            return compute(build())
        except ModelError:
            raise
        except NoTrial as error:
            problem, tried = str(error), f"; tried: {error.tried}"
        except Exception as error:
            problem = _short(error)
    raise ModelError(
        f"tensor_parallel: no tiny copy of {type(model).__name__} can be made and run, and without one no plan can be verified "
        f"({problem[:300]}{tried})"
    )


class NoTrial(ValueError):
    """No batch of ours runs through a model. `tried`: the inputs of each."""

    tried = ""


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def compute(model: nn.Module, batches: list[Batch] | None = None) -> Unsplit:
    """Loss and gradients of a tiny model, on the first of `trial_batches` that runs, or on `batches`.

    Raises `ValueError` if its loss differs between calls or is not finite, or (`NoTrial`) no batch runs; `ModelError` if its
    forward replaces modules.
    """
    if batches is not None:
        return _computed(model, batches)
    first: NoTrial | None = None
    tried = []
    for trial in trial_batches(model):
        try:
            return _computed(model, trial)
        except ModelError:
            raise
        except Exception as error:
            model.zero_grad()
            tried.append(", ".join(trial[0]))
            first = first or NoTrial(_short(error))
    assert first is not None, "at least one trial is made"
    first.tried = "; ".join(tried)
    raise first


def _computed(model: nn.Module, batches: list[Batch]) -> Unsplit:
    losses, before = [], dict(model.named_modules())
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
    if replaced := next((n for n, m in model.named_modules() if before.get(n) is not m), None):
        raise ModelError(
            f"tensor_parallel: {type(model).__name__} replaces {replaced} in its forward, by a module with the sizes of the "
            "whole model. BigBird does so for short rows unless its config has attention_type original_full. Set that, or use "
            "ZeRO-3 or pipeline.stages."
        )
    again = [loss_of(model, batch).item() for batch in batches]
    if any(a != b for a, b in zip(losses, again, strict=True)) or not all(abs(x) < 1e9 for x in losses):
        raise ValueError(f"its loss is {losses}, then {again} on the same rows: it draws random numbers")
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Unsplit(model, batches, losses, gradients)


def verified(plan: SplitPlan, reference: Unsplit, size: int, blocks: Blocks) -> SplitPlan:
    """`plan`, perhaps with more parameters whose gradients are summed. Local, on the CPU, takes at most a second.

    Raises `Difference` if the loss or a gradient differs, and the plan's own errors if it cannot be used.
    """
    for attempt in range(2):
        off, wrong = _differences(plan, reference, size, blocks)
        if off <= LOSS_TOLERANCE and not wrong:
            return plan
        worst = max(wrong, key=lambda name: wrong[name], default="")
        is_cut = any(pattern_of(name) in plan.params for name in wrong)
        if attempt or off > LOSS_TOLERANCE or is_cut:
            break
        plan = replace(plan, summed=plan.summed | {pattern_of(name) for name in wrong})
    text = f"the loss is off by {off:.0e}" if off > LOSS_TOLERANCE else f"the gradient of {worst} by {wrong[worst]:.0e}"
    raise Difference(f"{plan.source} on {size} ranks does not compute what one process does: {text}, relative")


def _differences(plan: SplitPlan, reference: Unsplit, size: int, blocks: Blocks) -> tuple[float, dict[str, float]]:
    """(relative difference of the losses, relative difference of each wrong gradient)."""
    copies = [_copy(reference.model) for _ in range(size)]
    outcomes: list[_OnRank] = run_threads(
        size, lambda peers: _compute_split(copies[peers.rank], plan, peers, reference.batches, blocks)
    )
    off = max(
        abs(mine - theirs) / max(abs(theirs), 1e-6)
        for outcome in outcomes
        for mine, theirs in zip(outcome.losses, reference.losses, strict=True)
    )
    if off != off:
        off = float("inf")
    largest = max((float(g.abs().max()) for g in reference.gradients.values() if g.numel()), default=0.0)
    wrong = {}
    for name, expected in reference.gradients.items():
        if not expected.numel():
            continue
        scale = max(float(expected.abs().max()), 1e-3 * largest, 1e-12)
        found = max(float((g - expected).abs().max()) / scale for g in _whole_gradients(name, expected, outcomes))
        if not found < GRADIENT_TOLERANCE:
            wrong[name] = found
    return off, wrong


def _copy(model: nn.Module) -> nn.Module:
    """A copy that shares the weights until they are cut: whole ones of each of 64 ranks would take gigabytes."""
    shared: dict[int, object] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, shared)


@dataclass(frozen=True)
class _OnRank:
    losses: list[float]
    split: SplitModel
    gradients: Mapping[str, torch.Tensor]


def _compute_split(
    model: nn.Module, plan: SplitPlan, peers: ThreadPeers, batches: list[Batch], blocks: Blocks
) -> _OnRank:
    def keep(param: nn.Parameter, held: TensorSlice) -> None:
        param.data = held.take(param.data).contiguous()

    split = SplitModel(model, plan, peers, keep=keep, blocks=blocks(model))
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return _OnRank(losses, split, gradients)


def _whole_gradients(name: str, like: torch.Tensor, outcomes: list[_OnRank]) -> list[torch.Tensor]:
    """The ranks' result for one parameter's gradient: one tensor, or one per rank if each should have the whole gradient."""
    split = outcomes[0].split
    grads = [outcome.gradients[name] for outcome in outcomes]
    if name not in split.kept:
        return [torch.stack(grads).sum(0)] if name in split.summed else grads
    whole = torch.zeros_like(like)
    for outcome in outcomes:
        held = outcome.split.kept[name].held
        there = torch.zeros_like(like)
        held.put(outcome.gradients[name], there)
        whole += there  # ranks that share a slice: their sum
    return [whole]
