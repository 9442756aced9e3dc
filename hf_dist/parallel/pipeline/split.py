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
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline import collected
from hf_dist.parallel.pipeline.intercept import intercept
from hf_dist.parallel.pipeline.meta import meta_twin
from hf_dist.parallel.pipeline.placeholder import Placeholders
from hf_dist.parallel.pipeline.probe import BlockCall, SameAs, is_leaf
from hf_dist.parallel.pipeline.stage_plan import StagePlan
from hf_dist.parallel.pipeline.standin import AbsentOutput, StandIn
from hf_dist.tensors import pytree

__all__ = ["StageExit", "StageOutput", "StagedModel"]

Leaves = list[Any]
_FIRST = "[0][0]"
"""The path of the first positional argument."""


@dataclass(frozen=True)
class Alignment:
    """How the arguments of a block call correspond to those of the example's call."""

    spec: TreeSpec
    order: list[int | None]
    """For each leaf of the example's call, its position in this call; None if absent."""
    new: dict[int, str]
    """Leaves that the example's call did not have: position -> path."""


class StageExit(Exception):
    """Exits the model's forward at the end of a stage. An `Exception`, so that `always_call` hooks run."""

    def __init__(self, sent: list[torch.Tensor]) -> None:
        super().__init__("the stage ends here; this is caught by hf_dist, not by the model")
        self.sent = sent


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
        self.continues: Callable[[str, Any, Any], None] = lambda path, args, kwargs: None
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
        self, stage: int, run: Callable[[nn.Module], Any], received: Sequence[torch.Tensor] = ()
    ) -> StageOutput:
        """Run `stage` of one microbatch. `run(model)` must call the model once, on the whole microbatch. Local.

        `received`: the tensors sent by stage - 1, in the plan's order. Raises `ModelError` if the model's block calls differ
        from those in the probe.
        """
        self.placeholders.follow()
        self.pass_ = StagePass(self, stage, received)
        return self._run(run, stage)

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

    def _run(self, run: Callable[[nn.Module], Any], stage: int) -> StageOutput:
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

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            staged = me()
            if staged is not None and staged.pass_ is not None:
                staged.pass_.begin([x for x in pytree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)])

        return hook

    def _see_output(self) -> Callable[..., Any]:
        me = weakref.ref(self)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
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

    def _handler(self, path: str, is_block: bool) -> Callable[..., Any]:
        # Weak: the model's modules hold this handler, and a cycle would keep the weights until the cyclic collector runs.
        me, visit = weakref.ref(self), self.visit

        def handler(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


class StagePass:
    """One running forward of one stage."""

    def __init__(self, staged: StagedModel, stage: int, received: Sequence[torch.Tensor]) -> None:
        self.plan = staged.plan
        self.stand_ins = staged.stand_ins
        self.alignments = staged.alignments
        self.continues = staged.continues
        self.device = staged.placeholders.device
        self.model_name = type(staged.model).__name__
        self.start, self.stop = self.plan.bounds[stage : stage + 2]
        self.is_last = self.stop == len(self.plan.calls)
        self.next_block = 0
        self.inputs: list[torch.Tensor] = []
        """Tensors among the arguments of the model's call."""
        self.inside = False
        """Whether a module of this stage is running; its submodules then run normally."""
        self._written: set[int] = set()
        boundary = self.plan.boundaries[stage - 1] if stage else None
        after = () if self.is_last else self.plan.boundaries[stage].values
        self._moved = frozenset(after if boundary is None else (*boundary.values, *after))
        """Numbers of the values that cross a boundary of the stage."""
        self._ends = {self.start, self.stop}
        """Calls whose arguments are always inspected."""
        expected = len(boundary.specs) if boundary else 0
        assert len(received) == expected, f"stage {stage} was given {len(received)} tensors instead of {expected}"
        self.held = dict(zip(boundary.values, received, strict=False)) if boundary else {}
        self._collected = list(received[len(self.held) :])
        self._layout = boundary.collected if boundary else ()
        self._replaced: dict[int, tuple[Any, torch.Tensor]] = {}
        self._stood_in: dict[int, Any] = {}
        """Values of earlier stages that nothing has replaced, by id; held, so that no other tensor gets the id."""

    def begin(self, inputs: list[torch.Tensor]) -> None:
        """A forward of the model begins, with these tensors."""
        if self.next_block == len(self.plan.calls) > 0:  # the one more of a cache: the first stages have left already
            raise self._other_path(f"that of another call of {self.model_name}", None)
        self.inputs = inputs

    @property
    def before_start(self) -> bool:
        """Whether the code that runs now belongs to an earlier stage."""
        return 0 < self.start >= self.next_block

    def block(self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a block call: skip it, run it with the received tensors, or end the stage."""
        index = self.next_block
        expected = self.plan.calls[index] if index < len(self.plan.calls) else None
        if expected is None or expected.module != path:
            raise self._other_path(path, expected)
        self.next_block += 1
        if index < self.start:
            return self._pass_over(index, args, kwargs)
        if index not in self._ends and self._moved.isdisjoint(expected.values):
            return self._run_block(expected, call, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_leaf)
        order = self._align(index, (args, kwargs), leaves, spec)
        if 0 < index == self.start:
            self.continues(path, args, kwargs)
        self._substitute(expected, leaves, order)
        if index == self.stop:
            raise StageExit(self._hand_over(index))
        if index == self.start:
            collected.restore(self._layout, self._collected)
        self.enter_block(expected, [None if place is None else leaves[place] for place in order])
        args, kwargs = tree_unflatten(leaves, spec)
        return self._run_block(expected, call, args, kwargs)

    def _run_block(
        self, expected: BlockCall, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = self._run(call, args, kwargs)
        if not self.is_last and not (isinstance(result, torch.Tensor) and isinstance(expected.result, SameAs)):
            # Later stages pass over this block and answer what it returned in the example: they would lack the others.
            found, known = (
                {keystr(where) for where, x in tree_flatten_with_path(tree, is_leaf=is_leaf)[0] if isinstance(x, kind)}
                for tree, kind in ((result, torch.Tensor), (expected.result, SameAs))
            )
            if new := min(found - known, default=None):
                raise ModelError(
                    f"{self.model_name}: {expected.module} returns a tensor at {new}, and did not for the example batch of the "
                    "plan, so later stages would lack it. Options (output_attentions) and optional inputs must be those of "
                    "training."
                )
        return result

    def outside(self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of another module with parameters: run it, or let its stand-in answer."""
        if self.before_start:
            return self.stand_in(self.stand_ins[path].answer(args, kwargs, self.device))
        return self._run(call, args, kwargs)

    def enter_block(self, call: BlockCall, leaves: Leaves) -> None:
        """Called before a block of this stage runs, with its arguments in the example's order. `verify` overrides it to check
        them."""

    def stand_in(self, value: Any) -> Any:
        """Called with every stand-in for a value of an earlier stage. `verify` overrides it to mark them."""
        if self.plan.in_place:
            value = tree_map(
                lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, value, is_leaf=is_leaf
            )
        self._stood_in.update((id(x), x) for x in pytree.leaves(value) if isinstance(x, torch.Tensor))
        return value

    def finish(self, output: Any) -> Any:
        """The model's output: stand-ins in it become the received tensors, or raise when they are read. A dict is changed."""
        if not isinstance(output, (dict, tuple, list)):
            return self._true(output)
        if not isinstance(output, dict):
            found = pytree.mapped(self._true, output)
            if not self.start or not self.plan.absent:
                return found
            # Without names: the loss and the logits come first, and what else is there cannot be told from an absent output.
            known = 1 + (isinstance(output[0], torch.Tensor) and not output[0].dim())
            values = [*found[:known], *pytree.mapped(self._absent, list(found[known:]))]
            return output._make(values) if hasattr(output, "_make") else type(output)(values)
        for key, value in output.items():
            if self.start and self._is_absent(key, value):
                one = isinstance(value, (tuple, list))  # a list may be shorter than the model's: none of it is read
                tensors = (x for x in pytree.leaves(value) if isinstance(x, torch.Tensor))
                output[key] = (
                    self._absent(next(tensors, torch.zeros(()))) if one else pytree.mapped(self._absent, value)
                )
            elif any(self._true(x) is not x for x in pytree.leaves(value)):
                output[key] = pytree.mapped(self._true, value)
        return output

    def _is_absent(self, key: str, value: Any) -> bool:
        """Whether an output is an earlier stage's. A list has a tensor per block (hidden states, memories): those of earlier
        blocks are made of stand-ins, or None, and the example may have had no such list in which to see it."""
        if key in self.plan.absent or self.plan.outputs is None or not isinstance(value, (tuple, list)):
            return key in self.plan.absent
        return key not in self.plan.outputs and key not in dict(self._layout)

    def _absent(self, value: Any) -> Any:
        return AbsentOutput.of(value, self.model_name) if isinstance(value, torch.Tensor) else value

    def _true(self, value: Any) -> Any:
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        return AbsentOutput.of(value, self.model_name) if id(value) in self._stood_in else value

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self.inside = False

    def _pass_over(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.plan.calls[index]
        if call.result == SameAs(0) and call.leaves[0] == _FIRST and args and isinstance(args[0], torch.Tensor):
            # The common block, without flattening its arguments. A view, for the input of a block is another value: where the
            # model returns one of them, it must not be taken for the one that was received.
            return self.stand_in(args[0].view_as(args[0]))
        if any(x == SameAs(None) for x in tree_leaves(call.result)):
            return self.stand_in(self.stand_ins[call.module].answer(args, kwargs, self.device))
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_leaf)
        order = self._align(index, (args, kwargs), leaves, spec)

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, SameAs):
                return leaf
            place = order[leaf.index or 0]
            if place is None:
                raise self._other_path(f"{call.module} without {call.leaves[leaf.index or 0]}", call)
            same = leaves[place]
            return same.view_as(same) if isinstance(same, torch.Tensor) else same

        return self.stand_in(tree_map(argument, call.result))

    def _align(self, index: int, inputs: Any, leaves: Leaves, spec: TreeSpec) -> list[int | None]:
        """For each leaf of the example's call, its position among the leaves of this call.

        Callers may omit arguments that depend on the batch alone, and add keywords of the model's own call
        (`num_items_in_batch`). Any other new tensor might be computed on another stage, from which the plan does not send it.
        """
        known, call = self.alignments.get(index), self.plan.calls[index]
        if known is None or known.spec != spec:
            paths = [keystr(where) for where, _ in tree_flatten_with_path(inputs, is_leaf=is_leaf)[0]]
            places = {path: i for i, path in enumerate(paths)}
            order = [places.get(path) for path in call.leaves]
            missing = [a.path for a in call.arguments if a.sources and order[a.index] is None]
            if missing:
                raise self._other_path(f"{call.module} without {missing[0]}", call)
            new = {i: path for path, i in places.items() if path not in call.leaves}
            known = self.alignments[index] = Alignment(spec, order, new)
        for place, path in known.new.items():
            leaf = leaves[place]
            if isinstance(leaf, torch.Tensor) and not any(leaf is given for given in self.inputs):
                raise self._other_path(f"{call.module} with {path}", call)
        return known.order

    def _other_path(self, found: str, expected: BlockCall | None) -> ModelError:
        wanted = f"{expected.module} with {', '.join(expected.leaves)}" if expected else "over"
        return ModelError(
            f"{self.model_name}: a block call is {found}, in the example batch it was {wanted}. Give the splitter an example "
            "batch like those of training, and run the model once per microbatch"
        )

    def _substitute(self, call: BlockCall, leaves: Leaves, order: list[int | None]) -> None:
        """Replace stand-ins by received tensors, and keep values that later stages need again."""
        for argument in call.arguments:
            place = order[argument.index]
            if place is None:  # an argument that depends on the batch alone, absent for this batch
                continue
            if argument.value in self.held:
                leaf = leaves[place]
                if self.plan.in_place:
                    if id(leaf) not in self._written:
                        leaf.copy_(self.held[argument.value])
                        self._written.add(id(leaf))
                        self._replaced[id(leaf)] = (leaf, leaf)
                    continue
                self._replaced[id(leaf)] = (leaf, self.held[argument.value])  # keeps the stand-in and so its id
                leaves[place] = self.held[argument.value]
            elif argument.value in self._moved:
                self.held[argument.value] = leaves[place]

    def _hand_over(self, cut: int) -> list[torch.Tensor]:
        boundary = self.plan.boundaries[self.plan.bounds.index(cut) - 1]
        layout, tensors = collected.flatten()
        if layout != boundary.collected:
            raise ModelError(
                f"{self.model_name}: at block call {cut} the model had collected {dict(layout)}, in the example batch "
                f"{dict(boundary.collected)}: options such as output_hidden_states must be the same as when the model was split"
            )
        missing = [p for v, p in zip(boundary.values, boundary.paths, strict=True) if v not in self.held]
        if missing:
            raise ModelError(f"{self.model_name}: block call {cut}: {missing[0]} is not known to the stage before it")
        return [*(self.held[value] for value in boundary.values), *tensors]
