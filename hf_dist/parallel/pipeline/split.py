"""A model that runs as stages: its own forward, with stand-ins for earlier stages, received tensors and an early exit.

A stage calls the whole model's forward on the whole batch. Blocks of earlier stages pass their input through. Other modules
with parameters that run before the stage return zeros of the right shape. At the stage's first block, the received tensors
replace these stand-ins. The call of the next stage's first block ends the forward; its arguments are sent. So masks,
positions, heads and losses remain the model's own code, and parameters keep their names. See [Note: what must travel] in
README.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import (
    tree_leaves,
)

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline.intercept import intercept
from hf_dist.parallel.pipeline.meta import meta_twin
from hf_dist.parallel.pipeline.placeholder import Placeholders
from hf_dist.parallel.pipeline.probe import SameAs
from hf_dist.parallel.pipeline.stage_pass import Alignment, StageExit, StagePass
from hf_dist.parallel.pipeline.stage_plan import StagePlan
from hf_dist.parallel.pipeline.standin import StandIn
from hf_dist.tensors import pytree

__all__ = ["StageOutput", "StagedModel"]


@dataclass(frozen=True)
class StageOutput:
    """Result of a stage's forward."""

    sent: tuple[torch.Tensor, ...] | None
    """Tensors for the next stage, with their graph; None on the last stage."""
    result: Any = None
    """On the last stage, the result of the given function."""


class StagedModel:
    """Stages of one model on this rank. Changes `model` in place: parameters of other stages are dropped."""

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        stages: Iterable[int],
        compute_dtype: Callable[[str, torch.dtype], torch.dtype] = lambda name, dtype: dtype,
        visit: Callable[[str], AbstractContextManager[None]] | None = None,
        mark: Callable[[torch.Tensor, str], None] = lambda placeholder, name: None,
    ) -> None:
        """Keep only `stages` (several if interleaved) of `model`, which may be on meta. Local.

        `compute_dtype(name, dtype)`: compute dtype of a parameter, used for stand-ins. `visit(path)`: context manager that
        fetches the parameters of a module for a call outside a pass. The model keeps calling it even after this object is gone.
        `mark(placeholder, name)` is called with what stands in the place of each parameter that is not kept.

        Kept parameters keep their object, name and aliases. The others are no longer parameters of the model, so
        `named_parameters`, `state_dict` and an engine that shards the model see only those of the stages.
        """
        self.model = model
        self.plan = plan
        self.stages = tuple(stages)
        self.pass_: StagePass | None = None
        self.visit = visit
        self.alignments: dict[int, Alignment] = {}
        """Index of a block call -> its latest alignment with the example's call."""
        self.continues: Callable[[str, object, object], None] = lambda path, args, kwargs: None
        """Called with the path and the arguments of a later stage's first block, before received tensors replace stand-ins.
        Stand-ins have whole sequences; ranks that split a model may send parts of them."""
        model.register_forward_pre_hook(self._see_inputs(), with_kwargs=True)
        model.register_forward_hook(self._see_output())
        self._check(model)
        self.stand_ins = {}
        for path in self._with_twin():
            twin = meta_twin(model.get_submodule(path))
            for name, param in twin.named_parameters():
                param.data = param.data.to(compute_dtype(f"{path}.{name}", param.dtype))
            self.stand_ins[path] = StandIn(twin)
        self.placeholders = Placeholders(model, self._own_params(model), compute_dtype, mark)
        for path in plan.blocks:
            intercept(model.get_submodule(path), self._handler(path, is_block=True))
        for path in plan.outside:
            intercept(model.get_submodule(path), self._handler(path, is_block=False))

    def forward(
        self, stage: int, run: Callable[[nn.Module], object], received: Sequence[torch.Tensor] = ()
    ) -> StageOutput:
        """Run `stage` of one microbatch. `run(model)` must call the model once, on the whole microbatch. Local.

        `received`: the tensors sent by stage - 1, in the plan's order. Raises `ModelError` if the model's block calls differ
        from those in the probe.
        """
        self.placeholders.follow()
        self.pass_ = self.pass_of(stage, received)
        return self._run(run, stage)

    def pass_of(
        self, stage: int, received: Sequence[torch.Tensor], kind: Callable[..., StagePass] = StagePass
    ) -> StagePass:
        """The state of one forward of `stage`. `kind`: the class, or what makes one of a class derived from it."""
        return kind(
            self.plan,
            self.stand_ins,
            stage,
            received,
            alignments=self.alignments,
            continues=self.continues,
            device=self.placeholders.device,
            model_name=type(self.model).__name__,
        )

    @property
    def passes_over(self) -> bool:
        """Whether code of an earlier stage is running, whose results nobody uses: it may compute with placeholders."""
        return self.pass_ is not None and self.pass_.before_start and not self.pass_.inside

    @property
    def recomputes(self) -> bool:
        """Whether HF's activation checkpointing is on."""
        return any(
            getattr(module, "gradient_checkpointing", False) and module.training for module in self.model.modules()
        )

    def _run(self, run: Callable[[nn.Module], object], stage: int) -> StageOutput:
        assert self.pass_ is not None
        stage_pass = self.pass_
        try:
            result = run(self.model)
        except StageExit as leave:
            return StageOutput(tuple(leave.sent))
        finally:
            self.pass_ = None
        if stage_pass.next_block != len(self.plan.calls) or stage + 1 < self.plan.num_stages:
            raise ModelError(
                f"{type(self.model).__name__}: stage {stage} ended after {stage_pass.next_block} block calls instead of "
                f"{min(stage_pass.stop + 1, len(self.plan.calls))}; with this batch, the model runs differently "
                f"than with the example that it was split with"
            )
        return StageOutput(None, result)

    def _see_inputs(self) -> Callable[..., None]:
        me = weakref.ref(self)

        def hook(module: nn.Module, args: object, kwargs: object) -> None:
            staged = me()
            if staged is not None and staged.pass_ is not None:
                staged.pass_.begin([x for x in pytree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)])

        return hook

    def _see_output(self) -> Callable[..., object]:
        me = weakref.ref(self)

        def hook(module: nn.Module, args: object, output: object) -> object:
            staged = me()
            return None if staged is None or staged.pass_ is None else staged.pass_.finish(output)

        return hook

    def _own_params(self, model: nn.Module) -> set[int]:
        params = dict(model.named_parameters())
        return {id(params[name]) for stage in self.stages for name in self.plan.names_of(stage)}

    def _with_twin(self) -> set[str]:
        unknown = {c.module for c in self.plan.calls if any(x == SameAs(None) for x in tree_leaves(c.result))}
        return set(self.plan.outside) | unknown

    def _check(self, model: nn.Module) -> None:
        missing = set(self.plan.owners) - {name for name, _ in model.named_parameters()}
        if missing:
            raise ModelError(
                f"the plan was made for another model: {type(model).__name__} has no parameter {min(missing)} "
                f"({len(missing)} are missing)"
            )

    def _handler(self, path: str, is_block: bool) -> Callable[..., object]:
        # Weak: the model's modules hold this handler, and a cycle would keep the weights until the cyclic collector runs.
        me, visit = weakref.ref(self), self.visit

        def handler(call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            staged = me()
            stage_pass = staged.pass_ if staged is not None else None
            if stage_pass is None and visit is not None:
                with visit(path):
                    return call(*args, **kwargs)
            if stage_pass is None or stage_pass.inside:
                return call(*args, **kwargs)
            if is_block:
                return stage_pass.block(path, call, args, kwargs)
            return stage_pass.outside(path, call, args, kwargs)

        return handler
