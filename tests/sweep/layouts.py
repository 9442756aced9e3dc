"""One class in a layout of two ranks, without a job: what one call of the split model gives, outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_dist.errors import HfDistError
from hf_dist.tensors import pytree
from tests.sweep.pipeline import short
from tests.sweep.signature import Batch, Call

Gradients = dict[str, torch.Tensor]
BOUND = 1e4
"""Of an output in the objective: a masked logit is the least number of its type, whose square is infinite."""


@dataclass
class Found:
    """What one call of a model gives."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Outputs whose reading raises."""
    gradients: Gradients = field(default_factory=dict)


def objective(call: Call, model: Any, batch: Batch, found: Found, skip: frozenset[str] = frozenset()) -> torch.Tensor:
    """The loss and every other output, in one number; `found` gets them by name."""
    output = call(model, batch)
    pairs = output.items() if isinstance(output, dict) else ((str(i), x) for i, x in enumerate(output))
    total = torch.zeros(())
    for name, value in pairs:
        for number, leaf in enumerate(pytree.leaves(value)):
            at = f"{name}.{number}" if leaf is not value else name
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or name in skip:
                continue
            try:
                found.outputs[at] = leaf.detach().to(leaf.dtype, copy=True)
                if leaf.requires_grad:
                    total = total + (
                        leaf.mean() if leaf.dim() == 0 else leaf.float().clamp(-BOUND, BOUND).square().mean()
                    )
            except HfDistError as error:
                found.outputs.pop(at, None)
                found.refused[name] = short(error)
    return total


@contextmanager
def no_state(*models: Any) -> Iterator[None]:
    """Attributes that a forward leaves for the next one are forgotten: Qwen's `rope_deltas`, of the images of a batch."""
    before = [(module, dict(vars(module))) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and attributes.get(name) is not value:
                    setattr(module, name, attributes.get(name))


def plain(model: Any, call: Call, batch: Batch, skip: frozenset[str] = frozenset()) -> Found:
    """Of one process."""
    model.zero_grad()
    found = Found()
    with no_state(model):
        total = objective(call, model, copy.deepcopy(batch), found, skip)
        if total.requires_grad:
            total.backward()
    found.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


# ---- layouts: a function that is made once for a class, (call, batch) -> Found

Layout = Callable[[Call, Batch], Found]


def staged(build: Callable[[], Any], batch: Batch) -> Layout:
    """Two pipeline stages."""
    from hf_dist.parallel.pipeline import StagedModel, make_schedule, plan_stages
    from tests.parallel.pipeline.local import run_local, summed_gradients

    plan = plan_stages(build(), batch, 2).plan
    schedule = make_schedule("1f1b", 2, 2)

    models = [StagedModel(build(), plan, schedule.stages_of(rank)) for rank in range(2)]

    def run(call: Call, given: Batch) -> Found:
        for staged in models:
            staged.model.zero_grad()
        seen: list[Found] = []

        def function(model: Any, one: Batch) -> torch.Tensor:
            seen.append(Found())
            return objective(call, model, one, seen[-1]) / 2

        with no_state(*(staged.model for staged in models)):
            run_local(models, schedule, [given, copy.deepcopy(given)], function)  # models write into their inputs
        return Found(seen[-1].outputs, seen[-1].refused, summed_gradients(models))

    return run


def cut(build: Callable[[], Any], batch: Batch) -> Layout:
    """Two tensor ranks."""
    from hf_dist.parallel.tensor.choose import choose_plan
    from hf_dist.parallel.tensor.peers import run_threads
    from hf_dist.parallel.tensor.split import SplitModel
    from hf_dist.parallel.tensor.verify import _OnRank, _whole_gradients
    from hf_dist.sharding.units import find_unit_modules

    plan = choose_plan(build(), 2, find_unit_modules)

    whole = build()
    models = [build() for _ in range(2)]

    def keep(param: Any, held: Any) -> None:
        param.data = held.take(param.data).contiguous()

    def run(call: Call, given: Batch) -> Found:
        def on_rank(peers: Any) -> tuple[_OnRank, Found]:
            model, found = copy.deepcopy(models[peers.rank]), Found()
            split = SplitModel(model, plan, peers, keep=keep, blocks=find_unit_modules(model))
            total = objective(call, model, copy.deepcopy(given), found)
            if total.requires_grad:
                total.backward()
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
            return _OnRank([], split, grads), found

        ranks = run_threads(2, on_rank)
        outcomes = [outcome for outcome, _ in ranks]
        found = ranks[0][1]
        for name, like in whole.named_parameters():
            found.gradients[name] = _whole_gradients(name, like.detach(), outcomes)[0]
        return found

    return run


def parted(build: Callable[[], Any], batch: Batch, mesh: Any) -> Layout:
    """Two ranks of a split sequence, which both call this."""
    from hf_dist.dist import collectives
    from hf_dist.parallel.sequence.split import split_sequence
    from hf_dist.parallel.sequence.verify import verify

    model = build()
    split = split_sequence(model, mesh, "auto")
    assert split is not None
    verify(split, model, lambda tokens, function: function(model, tokens))

    def run(call: Call, given: Batch) -> Found:
        assert split.enabled  # and it lives as long as this function: the model's hooks do not hold it
        model.zero_grad()
        found = Found()
        with no_state(model):
            total = objective(call, model, copy.deepcopy(given), found)
            if total.requires_grad:
                total.backward()
        for name, param in model.named_parameters():
            mine = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
            collectives.all_reduce(mesh.cp, mine.view(-1), op="mean").wait()
            found.gradients[name] = mine
        return found

    return run
