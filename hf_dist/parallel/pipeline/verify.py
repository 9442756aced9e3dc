"""Runs each stage alone on meta and refuses a plan whose stages would not compute the same as the whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline.meta import MetaTrace, meta_twin, on_meta, to_meta
from hf_dist.parallel.pipeline.probe import BlockCall, is_leaf
from hf_dist.parallel.pipeline.split import StagedModel, StageOutput
from hf_dist.parallel.pipeline.stage_pass import Leaves, StagePass
from hf_dist.parallel.pipeline.stage_plan import StagePlan
from hf_dist.parallel.pipeline.standin import AbsentOutput

__all__ = ["verify"]

_STAND_IN = frozenset({0})
"""The mark of all values computed from a stand-in."""
_WATCHED = ("loss", "logits")


def verify(
    model: nn.Module,
    plan: StagePlan,
    batch: Mapping[str, object],
    run: Callable[[nn.Module, object], object] | None = None,
    *,
    real: bool = False,
) -> StagePlan:
    """Raise `ModelError`, naming stage and place, if `plan` is wrong. Local; allocates nothing.

    Returns the plan with the names of the outputs that the last stage computes, and of those that it does not have.

    Checked for every stage: no value of a stand-in reaches a block of the stage, the tensors it sends, the loss or the logits;
    every tensor argument of its blocks requires grad exactly if it does in the whole model; Python reads no value that depends
    on a stand-in. Arguments as in `probe`.
    """
    named, plan = plan, replace(plan, outputs=None)
    for stage in range(plan.num_stages):
        twin = meta_twin(model, real=real)
        absent, outputs = _verify_stage(_CheckedModel(twin, plan, stage, real), batch, run or (lambda m, b: m(**b)))
        named = replace(plan, absent=absent, outputs=outputs)
    return named


def _verify_stage(
    staged: _CheckedModel, batch: Mapping[str, object], run: Callable[[nn.Module, Any], object]
) -> tuple[frozenset[str], frozenset[str]]:
    try:
        with on_meta(staged.trace):
            received = staged.received()
            for tensor in staged.placeholders.tensors:
                staged.trace.mark(tensor, _STAND_IN)
            staged.pass_ = staged.pass_of(staged.stage, received, functools.partial(_CheckedPass, staged))
            output = staged._run(lambda m: run(m, to_meta(batch, real=staged.trace.real)), staged.stage)
            return staged.check_output(output)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(staged.model).__name__} cannot be split: stage {staged.stage} alone fails with {type(error).__name__}: "
            f"{error}"
        ) from error


class _CheckedModel(StagedModel):
    """One stage of a model on meta, with a trace of the values that depend on stand-ins."""

    def __init__(self, twin: nn.Module, plan: StagePlan, stage: int, real: bool) -> None:
        super().__init__(twin, plan, (stage,))
        self.stage = stage
        self.device = self.placeholders.device
        self.returned: object = None
        """What the model returned. A training step may keep the loss of it, and an evaluation read the rest."""
        nothing = frozenset[int]()
        self.trace = MetaTrace(
            list(twin.parameters()),
            read=lambda param: nothing,
            decide=self._decide,
            drawn=self._drawn,
            real=real,
        )

    def received(self) -> list[torch.Tensor]:
        """Zeros shaped like the tensors that the previous stage would send."""
        if self.stage == 0:
            return []
        specs = self.plan.boundaries[self.stage - 1].specs
        return [torch.zeros(s.shape, dtype=s.dtype, device=self.device, requires_grad=s.requires_grad) for s in specs]

    def refuse(self, what: str) -> ModelError:
        """The error for this stage."""
        start, stop = self.plan.bounds[self.stage : self.stage + 2]
        first, last = self.plan.calls[start].module, self.plan.calls[stop - 1].module
        return ModelError(
            f"{type(self.model).__name__} cannot be split into {self.plan.num_stages} stages at blocks "
            f"{list(self.plan.bounds[1:-1])}: in stage {self.stage} ({first} to {last}) {what}"
        )

    def is_tainted(self, value: object) -> bool:
        """Whether a value depends on a stand-in."""
        return isinstance(value, AbsentOutput) or (isinstance(value, torch.Tensor) and bool(self.trace.sources(value)))

    def check_output(self, output: StageOutput) -> tuple[frozenset[str], frozenset[str]]:
        """Raise `ModelError` if what leaves the stage depends on stand-ins. Of the last stage: outputs that do, that do not."""
        if output.sent is not None:
            boundary = self.plan.boundaries[self.stage]
            labels = [*boundary.paths, *(f"collected {name}" for name, n in boundary.collected for _ in range(n))]
            for label, tensor, spec in zip(labels, output.sent, boundary.specs, strict=True):
                if self.is_tainted(tensor):
                    raise self.refuse(f"what it sends to the next stage as {label} depends on an earlier stage")
                if tensor.requires_grad != spec.requires_grad:
                    raise self.refuse(f"what it sends as {label} loses its gradient")
            return frozenset(), frozenset()
        found = dict(self.returned) if isinstance(self.returned, dict) else {}
        found |= output.result if isinstance(output.result, dict) else {"loss": output.result}
        absent = frozenset(key for key, value in found.items() if self._is_absent(value))
        for key in _WATCHED:
            if key in absent:
                raise self.refuse(f"the model's {key} depends on values of an earlier stage that do not pass a block")
        return absent, frozenset(found.keys() - absent)

    def _is_absent(self, output: object) -> bool:
        """None stands in a list for what an earlier stage's block returns."""
        is_list = isinstance(output, (tuple, list))
        return any(self.is_tainted(x) or (is_list and x is None) for x in tree_leaves(output))

    def _decide(self, sources: frozenset[int]) -> None:
        if sources:
            raise self.refuse("the forward asks for a value (an `if` or `.item()`) that depends on an earlier stage")

    def _drawn(self) -> frozenset[int]:
        stage_pass = self.pass_
        return _STAND_IN if stage_pass is not None and stage_pass.before_start else frozenset()


class _CheckedPass(StagePass):
    """A forward that marks its stand-ins and checks the arguments of its blocks."""

    def __init__(self, staged: _CheckedModel, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staged = staged
        self._ends = set(range(len(self.plan.calls)))

    def stand_in(self, value: object) -> object:
        # Mark a new tensor: the passed-through value may be a user's input, which must stay unmarked.
        def mark(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return self._staged.trace.mark(torch.zeros_like(leaf.detach(), device=self._staged.device), _STAND_IN)

        return tree_map(mark, value, is_leaf=is_leaf)

    def finish(self, output: object) -> object:
        self._staged.returned = output
        return super().finish(output)

    def enter_block(self, call: BlockCall, leaves: Leaves) -> None:
        for argument in call.arguments:
            leaf = leaves[argument.index]
            if self._staged.is_tainted(leaf):
                raise self._staged.refuse(
                    f"{call.module} is given {argument.path}, made from an earlier stage's values"
                )
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad != argument.spec.requires_grad:
                raise self._staged.refuse(f"{call.module} is given {argument.path} without its gradient")
