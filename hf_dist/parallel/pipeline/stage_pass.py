"""One running forward of one stage: block by block, what is passed over, run, substituted, kept and handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from hf_dist.parallel.pipeline.probe import BlockCall, SameAs, is_leaf
from hf_dist.parallel.pipeline.stage_plan import StagePlan
from hf_dist.parallel.pipeline.standin import AbsentOutput, StandIn
from hf_dist.tensors import pytree

__all__ = ["Alignment", "Leaves", "StageExit", "StagePass"]

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


class StagePass:
    """One running forward of one stage."""

    def __init__(
        self,
        plan: StagePlan,
        stand_ins: Mapping[str, StandIn],
        stage: int,
        received: Sequence[torch.Tensor],
        *,
        alignments: dict[int, Alignment],
        continues: Callable[[str, object, object], None],
        device: torch.device,
        model_name: str,
    ) -> None:
        """`alignments`, `continues`: of the `StagedModel`, for all its passes. `received`: as in its `forward`."""
        self.plan = plan
        self.stand_ins = stand_ins
        self.alignments = alignments
        self.continues = continues
        self.device = device
        self.model_name = model_name
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
        self._replaced: dict[int, tuple[object, torch.Tensor]] = {}
        self._stood_in: dict[int, object] = {}
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

    def block(
        self, path: str, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
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
        self, expected: BlockCall, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
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

    def outside(
        self, path: str, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Handle a call of another module with parameters: run it, or let its stand-in answer."""
        if self.before_start:
            return self.stand_in(self.stand_ins[path].answer(args, kwargs, self.device))
        return self._run(call, args, kwargs)

    def enter_block(self, call: BlockCall, leaves: Leaves) -> None:
        """Called before a block of this stage runs, with its arguments in the example's order. `verify` overrides it to check
        them."""

    def stand_in(self, value: object) -> object:
        """Called with every stand-in for a value of an earlier stage. `verify` overrides it to mark them."""
        if self.plan.in_place:
            value = tree_map(
                lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, value, is_leaf=is_leaf
            )
        self._stood_in.update((id(x), x) for x in pytree.leaves(value) if isinstance(x, torch.Tensor))
        return value

    def finish(self, output: object) -> object:
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

    def _is_absent(self, key: str, value: object) -> bool:
        """Whether an output is an earlier stage's. A list has a tensor per block (hidden states, memories): those of earlier
        blocks are made of stand-ins, or None, and the example may have had no such list in which to see it."""
        if key in self.plan.absent or self.plan.outputs is None or not isinstance(value, (tuple, list)):
            return key in self.plan.absent
        return key not in self.plan.outputs and key not in dict(self._layout)

    def _absent(self, value: object) -> object:
        return AbsentOutput.of(value, self.model_name) if isinstance(value, torch.Tensor) else value

    def _true(self, value: Any) -> object:
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        return AbsentOutput.of(value, self.model_name) if id(value) in self._stood_in else value

    def _run(self, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self.inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self.inside = False

    def _pass_over(self, index: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        call = self.plan.calls[index]
        if call.result == SameAs(0) and call.leaves[0] == _FIRST and args and isinstance(args[0], torch.Tensor):
            # The common block, without flattening its arguments. A view, for the input of a block is another value: where the
            # model returns one of them, it must not be taken for the one that was received.
            return self.stand_in(args[0].view_as(args[0]))
        if any(x == SameAs(None) for x in tree_leaves(call.result)):
            return self.stand_in(self.stand_ins[call.module].answer(args, kwargs, self.device))
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_leaf)
        order = self._align(index, (args, kwargs), leaves, spec)

        def argument(leaf: object) -> object:
            if not isinstance(leaf, SameAs):
                return leaf
            place = order[leaf.index or 0]
            if place is None:
                raise self._other_path(f"{call.module} without {call.leaves[leaf.index or 0]}", call)
            same = leaves[place]
            return same.view_as(same) if isinstance(same, torch.Tensor) else same

        return self.stand_in(tree_map(argument, call.result))

    def _align(self, index: int, inputs: object, leaves: Leaves, spec: TreeSpec) -> list[int | None]:
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
