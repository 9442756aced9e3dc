"""Any torch optimizer on sharded parameters: it steps *fragments*, 1-D views of the fp32 master weights.

There is one fragment per parameter and rank, without elements if the rank holds none (`stand_in.py`). So weight decay,
learning-rate groups, freezing and LoRA stay per parameter, and a parameter without a gradient on any rank is skipped exactly as
in one process (no decay, no momentum). Alternative considered: one flat tensor per group. It needs one kernel instead of many
but also steps unused parameters, and torch's fused AdamW runs a hundred tensors as fast as one flat tensor.

An optimizer that must see whole tensors gets the tensors that this rank owns instead of fragments (`whole_step.py`). Muon's
matrices are fragments too, stepped separately (`muon_step.py`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.memory.offload.host import threads
from hf_dist.memory.offload.resting import Sliceable, Tier
from hf_dist.optim.compound import leaves
from hf_dist.optim.compressed import Compressed
from hf_dist.optim.fragment import Fragment, Used, make_fragments
from hf_dist.optim.fused_kernel import handed_on
from hf_dist.optim.initial_states import cut_state, recalled, remembered
from hf_dist.optim.known_by import follow
from hf_dist.optim.low_precision_states import RoundedBatch, Rounding
from hf_dist.optim.muon_step import MuonStep
from hf_dist.optim.sent_momentum import SentMomentum
from hf_dist.optim.stand_in import OwnCalls, StandIn
from hf_dist.optim.step_batch import Narrowed, StepBatch, make_batches, prefer_fused, restored
from hf_dist.optim.step_scaling import StepScaling, takes_scaling
from hf_dist.optim.stepping import Sight, Stepping
from hf_dist.optim.whole_step import WholeStep
from hf_dist.sharding.consistency import check_same_params
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import check_still_frozen
from hf_dist.sharding.precision import MASTER_DTYPE
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.unit import ShardUnit

First = tuple[ShardUnit, Callable[[ShardUnit], None]]


class FragmentedOptimizer:
    """Binds an optimizer to a sharded model: replaces its parameters by fragments and lends them gradients for the step."""

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        *,
        one_by_one: bool = False,
        sight: Sight,
        rounding: Rounding | None = None,
    ) -> None:
        """Replace the parameters in `optimizer.param_groups` in place; the optimizer object stays the user's own.

        `one_by_one`: allow stepping each group separately (`step_group`). `sight`: what the optimizer must see. `rounding`:
        how to round states that rest in bf16.

        State that the optimizer already has (Adagrad makes its sums at construction) is cut like its parameters.
        Collective over world. Raises `ModelError` if the optimizer has parameters of another model, or if ranks differ.
        """
        self.sharded = sharded
        self.optimizer = optimizer
        self.calls = OwnCalls()
        """Marked while this object calls the optimizer, to distinguish our calls from those of user code."""
        stepping = sight.stepping
        # Half-precision gradients are lent in fp32, for one group at a time to save memory.
        # An optimizer computes in the dtype of its gradient: bf16 ones would round every update of the fp32 masters.
        casts = stepping is Stepping.FRAGMENTS and sharded.precision.reduced.itemsize < MASTER_DTYPE.itemsize
        self._one_by_one = one_by_one or rounding is not None or casts
        self._of_group = functools.partial(RoundedBatch, rounding=rounding) if rounding is not None else None
        self._whole = WholeStep(self._step_tensors, self.calls) if stepping is Stepping.WHOLE else None
        self._all_in_place = sight.keeps_places or sight.skips_missing
        self._narrowing = functools.partial(Narrowed, optimizer, keeps_places=sight.keeps_places)
        # An optimizer that must see whole tensors (Shampoo, SOAP) has them at owners, so no fragments beside them.
        everything = [] if self._whole else make_fragments(sharded.trainable_groups, self.calls)
        self._by_owner = {(id(f.group), f.index): f for f in everything}
        self._muon = MuonStep(optimizer, self._by_owner) if stepping is Stepping.MUON else None
        # By identity: equal parameters are common (zeros), and comparing tensors compares elements.
        self._positions = {id(p): (g, i) for g in sharded.groups for i, p in enumerate(g.params)}
        self.param_names: list[list[str]] = []
        """Full names of each param group's parameters, on all ranks, in the optimizer's original order."""
        self.stands: dict[int, StandIn] = {}
        """id of a parameter of the model -> its stand-in in the param groups."""
        self.sent: SentMomentum | None = None
        """Messages that some steps send in place of gradients; None for an ordinary optimizer."""
        if isinstance(optimizer, Compressed):
            self.sent = SentMomentum(sharded, optimizer, self._by_owner, self.stands)
        self._find_owners(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._cut_group(group)
        # Groups that differ between ranks would step one parameter with two learning rates, without an error.
        check_same_params(self.param_names, sharded.mesh)
        # Some optimizers keep lists of their own (SAM, Lookahead): those get the stand-ins, too.
        follow(optimizer, self.stands)
        everything = list(self._by_owner.values())
        # `start_anew` goes back to these: classes like Adagrad make states when they are made, and expect them.
        self._initial = {
            f: {key: remembered(value) for key, value in optimizer.state[f.tensor].items()}
            for f in everything
            if f.tensor in optimizer.state
        }
        # Parameters that are in no group stay as they are, as in torch.
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.fragments = [f for f in everything if id(f.tensor) in stepped]
        self.batches = self._batched(self.fragments)
        self._written = (-1, -1)  # writes of elements, as torch counts them; changes of their groups
        self._stepped: set[int] = set()  # ids of batches that `step_group` has stepped in this window
        self._narrowed: Narrowed | None = None  # of this window; has the options of param groups before its first step
        self._open: deque[StepBatch] = deque()  # fetched, perhaps still being written to disk
        self._batch_of = {id(f): batch for batch in self.batches for f in batch.fragments}
        self._rest_states()

    def _rest_states(self) -> None:
        # States on the host are stepped by the CPU, where one fused kernel reads every state once.
        # Only if the user has not chosen: `fused=False` and `foreach=True` stay.
        if self.sharded.mesh.device.type != "cpu" and not self.on_device:
            prefer_fused(self.optimizer)
        for batch in self.batches:
            if any(f.tensor in self.optimizer.state for f in batch.fragments):
                with self.opened(batch):  # moves existing states to the tier where new ones will rest
                    pass

    def _find_owners(self, groups: Sequence[dict[str, Any]]) -> None:
        """Assign owners to tensors that must be whole; `groups`: the optimizer's last param groups. Local."""
        first = len(self.optimizer.param_groups) - len(groups)
        known = [[self._positions[id(p)] for p in group["params"] if id(p) in self._positions] for group in groups]
        held = [[(flat, index) for flat, index in places if flat.trainable] for places in known]
        if self._whole is not None:  # all at once, to balance owners over all groups
            tensors = self._whole.add(place for places in held for place in places)
            self._by_owner |= {(id(t.group), t.index): t for t in tensors}
        if self._muon is not None:
            for number, places in enumerate(held):
                self._muon.add(first + number, places)

    def _cut_group(self, group: dict[str, Any]) -> list[Fragment]:
        """Replace the parameters of a param group by their stand-ins, and return this rank's fragments among those."""
        own: list[Fragment] = []
        names: list[str] = []
        stands: list[StandIn] = []
        for p in group["params"]:
            # By the parameter object, before its place is taken: the state's key would be gone.
            state = self.optimizer.state.pop(p, None)
            fragment, name = self._fragment_of(p)
            names.append(name)
            if fragment is None:
                # Of no elements, so that the param groups have as many entries on every rank, in the model's order.
                stand = StandIn.of(p, torch.empty(0, device=self.sharded.mesh.device), self.calls, is_stepped=False)
            else:
                stand = fragment.tensor
                own.append(fragment)
                if state:
                    self.optimizer.state[stand] = {k: cut_state(k, v, fragment) for k, v in state.items()}
            self.stands[id(p)] = stand
            stands.append(stand)
        group["params"] = stands
        self.param_names.append(names)
        return own

    def _fragment_of(self, p: nn.Parameter) -> tuple[Fragment | None, str]:
        """This rank's fragment of a parameter, if it steps one, and the parameter's name. Raises `ModelError`."""
        if id(p) in self._positions:
            flat, index = self._positions[id(p)]
            return self._by_owner.get((id(flat), index)), flat.layout.slots[index].name
        elsewhere = self.sharded.pipeline.name_elsewhere(p) if self.sharded.pipeline else None
        if elsewhere is None:
            raise ModelError(
                f"the optimizer holds a parameter of shape {tuple(p.shape)} that is not in the model. Create the "
                "optimizer from the parameters of the model that you prepare with it."
            )
        return None, elsewhere  # another pipeline stage steps it

    def add_group(self) -> None:
        """Start to step the parameters of the optimizer's newest param group (gradual unfreezing). Local.

        Raises `ModelError` for parameters of another model or parameters that were frozen when the model was prepared, and
        `ValueError` for a parameter that another group has.
        """
        group = self.optimizer.param_groups[-1]
        known = {name for names in self.param_names for name in names}
        found = [self._positions[id(p)] for p in group["params"] if id(p) in self._positions]
        twice = [flat.layout.slots[i].name for flat, i in found if flat.layout.slots[i].name in known]
        if twice:
            # torch refuses before it adds the group; ours looks after torch has added it.
            self.optimizer.param_groups.pop()
            raise ValueError(f"some parameters appear in more than one parameter group, the first is {twice[0]}")
        check_still_frozen(flat for flat, _ in found if not flat.trainable)
        self._find_owners([group])
        added = self._cut_group(group)
        follow(self.optimizer, self.stands)
        self.fragments += added
        # One batch means one kernel for all parameters, so the new ones join it.
        if self.on_device and not self._one_by_one:
            self.batches = self._batched(self.fragments)
        else:  # existing batches may have states on loan or on disk
            self.batches += self._batched(added)
        self._narrowed = None
        self._batch_of = {id(f): batch for batch in self.batches for f in batch.fragments}

    def _batched(self, fragments: Sequence[Fragment]) -> list[StepBatch]:
        groups = self.sharded.trainable_groups
        return make_batches(groups, fragments, one_by_one=self._one_by_one, of_group=self._of_group)

    @contextmanager
    def _stepping(self, scaling: StepScaling | None = None) -> Iterator[None]:
        # For this call only, also after an error: torch's kernels read both from the optimizer, and would at the next step.
        with self.calls.marked(), (scaling or StepScaling()).given_to(self.optimizer):
            yield

    @property
    def sees_whole(self) -> bool:
        """Whether states belong to whole tensors, at their owners."""
        return self._whole is not None

    @property
    def on_device(self) -> bool:
        """Whether all stepped tensors and states are on the device."""
        return all(batch.on_device for batch in self.batches)

    def take_writes(self) -> bool:
        """Whether user code has written elements of the param groups since the last step (SAM does); they are taken. Local.

        Every rank makes the same writes. Call `weights_changed()` if True. Not of tensors that are whole for the step only.
        """
        before = self._written
        self.note_written()
        # torch counts writes of a tensor in its version. A sum over all stand-ins is one number to compare in each forward.
        # What writes masters by itself counts its changes.
        if self._whole is not None or self._written[0] == before[0] or self._written[1] != before[1]:
            return False
        for group in self.sharded.trainable_groups:
            group.masters_changed()
            group.write_back()
        self.note_written()
        return True

    def note_written(self) -> None:
        """Take the elements as they are for those of the last step. Local."""
        # Of all stand-ins, also those without elements here: ranks have to agree.
        versions = sum(stand._version for stand in self.stands.values())
        self._written = versions, sum(group.rest.version for group in self.sharded.trainable_groups)

    def step(self, used: Used, scaling: StepScaling | None = None, first: First | None = None) -> None:
        """Lend every used fragment its gradient, step as `scaling` says, take the gradients back.

        `first`: a unit to step before the others, and a function to call with it then. Used for torch's own fused Adam without
        hooks, where two calls of `step` cannot be told from one.

        Local; collective over the shard axes for an optimizer that sees whole tensors. Calls the optimizer's `step` once if all
        states stay on the device, else once per batch, while other states are read from and written to disk: see
        [Note: stepping in batches].
        """
        # Owners step whole tensors and send the parts back, so the masters of every rank have changed, also where it owns none.
        if self._whole is not None:
            self._whole.step(used)
            self._deliver()
            self.end_window()
            return
        if self._muon is not None:
            muon, any_used = self._muon, used
            muon.step(any_used)
            self._step_fragments(lambda f: not muon.takes(f) and any_used(f), scaling)
            self._deliver()  # for groups with only matrices, and ranks that step nothing else
            return
        if self.sends:
            assert self.sent is not None
            self.sent.exchange(used)
        self._step_fragments(used, scaling, first)

    @property
    def sends(self) -> bool:
        """Whether the next step sends something else than the gradient, which then ends in the step. Equal on all ranks."""
        return self.sent is not None and self.sent.is_next

    def _deliver(self) -> None:
        for group in self.sharded.trainable_groups:
            group.masters_changed()
            group.write_back()

    def _step_tensors(self, tensors: Sequence[Fragment]) -> None:
        # Once per window: options that user code sets between two batches of one step would hold for some of them only.
        if self._narrowed is None:
            self._narrowed = self._narrowing()
        with self._narrowed.to(tensors), self._stepping():
            self.optimizer.step()

    def _step_fragments(self, used: Used, scaling: StepScaling | None, first: First | None = None) -> None:
        if len(self.batches) == 1 and self.batches[0].on_device and not self._stepped:
            if first is not None and takes_scaling(self.optimizer):
                narrowed = self._narrowing()
                # The unit that is read first is stepped first: its gather then runs beside the step of the others.
                for part in self.batches[0].parted(first[0].trainable):
                    with narrowed.to(part.fragments), handed_on(part, self.optimizer, used), self._stepping(scaling):
                        self.optimizer.step()
                    if part.groups == first[0].trainable:
                        first[1](first[0])
                return
            only = nullcontext() if self._all_in_place else self._narrowing().to(self.batches[0].fragments)
            with only, handed_on(self.batches[0], self.optimizer, used), self._stepping(scaling):
                self.optimizer.step()
            return
        left = [batch for batch in self.batches if id(batch) not in self._stepped]
        for k, batch in enumerate(left):
            # One batch ahead: its states come from disk while this one is stepped (memory for two batches).
            if k + 1 < len(left):
                self._read_ahead(left[k + 1])
            self._step_batch(batch, used, scaling)
        self.end_window()

    def switch(self, mode: str) -> None:
        """Call the optimizer's method `mode` (train, eval), which may write weights. Local; then call `weights_changed()`."""
        # Schedule-free optimizers move all weights between two points: states on disk have to come to memory for it, too.
        narrowed = self._narrowing()
        for batch in self.batches:
            with self.opened(batch), narrowed.to(batch.fragments), self.calls.marked():
                getattr(self.optimizer, mode)()

    def will_step(self, group: FlatGroup) -> None:
        """Start to read states of `group` from disk, because `step_group` follows. Local."""
        for batch in self._batches_of(group):
            self._read_ahead(batch)

    def step_group(self, group: FlatGroup) -> None:
        """Step `group` now; all its parameters must have gradients. `step` then skips it. Local."""
        for batch in self._batches_of(group):
            self._stepped.add(id(batch))
            self._step_batch(batch, lambda fragment: True)

    def end_window(self) -> None:
        """End the window: the next `step` steps all groups again. Local."""
        self._stepped.clear()
        self._narrowed = None

    def _batches_of(self, group: FlatGroup) -> list[StepBatch]:
        """The batch of `group`, or none if this rank holds none of its optimized elements."""
        return [batch for batch in self.batches if batch.groups == [group]]

    def _read_ahead(self, batch: StepBatch) -> None:
        if self.sharded.storage.reads_beside:
            self._make_room()
            self._open.append(batch)
            batch.fetch()

    def _step_batch(self, batch: StepBatch, used: Used, scaling: StepScaling | None = None) -> None:
        storage = self.sharded.storage
        if batch not in self._open:
            self._make_room()
            self._open.append(batch)
        batch.swap_in(self.optimizer)
        if self._narrowed is None:
            self._narrowed = self._narrowing()
        narrowed = self._narrowed.to(batch.fragments)
        count = torch.get_num_threads() if batch.on_device else storage.num_threads
        with narrowed, threads(count), handed_on(batch, self.optimizer, used), self._stepping(scaling):
            self.optimizer.step()
        # Without `pipeline_write`, as in DeepSpeed, the disk is done with one batch before the next is read.
        if not storage.writes_beside:
            batch.wait()

    def _make_room(self) -> None:
        """Keep fewer than `optim_depth` batches in memory: wait until the oldest ones are back on disk."""
        while len(self._open) >= self.sharded.storage.optim_depth:
            self._open.popleft().wait()

    # --------------------------------------------------------------------- states

    @contextmanager
    def opened(self, batch: StepBatch) -> Iterator[None]:
        """Inside, `optimizer.state` has the states of `batch` and memory its masters, readable and writable. Local."""
        # Not through `_open`: nobody steps, so nothing is read ahead.
        batch.swap_in(self.optimizer)
        try:
            yield
        finally:
            batch.swap_out(self.optimizer)
            batch.wait()
            batch.runs = None
            self.sharded.storage.link.wait_device()

    def forget(self, batch: StepBatch) -> None:
        """Reset the states of `batch` to those the optimizer was created with (usually none). Call inside `opened`. Local."""
        if self.sent is not None:
            self.sent.forget()
        for f in batch.fragments:
            self.optimizer.state.pop(f.tensor, None)
            if f in self._initial:
                self.optimizer.state[f.tensor] = {key: recalled(value) for key, value in self._initial[f].items()}

    def start_anew(self) -> None:
        """Forget all states. Local."""
        for batch in self.batches:
            with self.opened(batch):
                self.forget(batch)

    def states(self, fragment: Fragment) -> Iterator[tuple[str, Sliceable]]:
        """(key, 1-D elements) of the element-wise states of `fragment`; states on disk are read only on access. Local."""
        return self._batch_of[id(fragment)].states(fragment, self.optimizer)

    def scalars(self, fragment: Fragment) -> Iterator[tuple[str, object]]:
        """(key, value) of the states that belong to `fragment` as a whole, such as its step. Local."""
        for key, value in leaves(self.optimizer.state.get(fragment.tensor, {})):
            if not fragment.is_like(value):
                yield key, value

    def structure(self, fragment: Fragment) -> dict[str, object]:
        """A state of `fragment` as a first step creates it, to be filled with loaded values. Local."""
        assert self._whole is not None, "states of fragments are tensors and numbers"
        narrowed = self._narrowing().to([fragment])
        random = torch.random.fork_rng()
        with self._whole.trial(fragment), restored(self.optimizer), self._stepping(), random, narrowed:
            self.optimizer.step()
        made: dict[str, object] = self.optimizer.state[fragment.tensor]
        return made

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes of the optimizer's states at rest, by tier, without master weights, which the groups count. Local."""
        held = dict.fromkeys(Tier, 0)
        for batch in self.batches:
            for tier, nbytes in batch.nbytes(self.optimizer).items():
                held[tier] += nbytes
        return held

    def state_dict(self) -> dict[str, object]:
        """State of this rank's fragments by parameter name, with the options of each param group. Local."""
        state = {}
        for f in self.fragments:
            shaped = {key: value[:] for key, value in self.states(f)}
            if own := {**shaped, **dict(self.scalars(f))}:
                state[f.name] = own
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"state": state, "param_groups": options}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank and layout. Local. Raises `ModelError` if numbers of param groups differ."""
        if len(saved["param_groups"]) != len(self.optimizer.param_groups):
            raise ModelError(
                f"the checkpoint's optimizer has {len(saved['param_groups'])} param groups, this one has "
                f"{len(self.optimizer.param_groups)}; resume with the same optimizer settings"
            )
        # Before the new states, the old ones go: a class that the checkpoint lacks a state of must not step with the old one.
        for batch in self.batches:
            with self.opened(batch):
                self.forget(batch)
                for f in batch.fragments:
                    if f.name in saved["state"]:
                        self.optimizer.state[f.tensor] = dict(saved["state"][f.name])
        for group, options in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(options)
