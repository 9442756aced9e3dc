"""The states of the full weights: every legal walk keeps what each state promises, every other transition raises."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_dist.dist.collectives import Handle
from hf_dist.sharding.full_weights import ALLOWED, FullWeights, WeightState
from hf_dist.sharding.guard import is_guarded, set_owner
from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.param_slice import held_slice

OPERATIONS = ("gather", "wait", "hide", "outdate", "free")
ILLEGAL = [(first, then) for first, then in itertools.product(WeightState, WeightState) if then not in ALLOWED[first]]


class Walk:
    """Two parameters, and what was gathered last."""

    def __init__(self) -> None:
        params = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in (("a", (2, 3)), ("b", (4,)))]
        layout = FlatLayout.pack([(name, held_slice(p)) for name, p in params], 1)
        self.full = FullWeights([p for _, p in params], layout, torch.zeros(layout.numel), writable=True)
        for index, (name, p) in enumerate(params):
            set_owner(p, lambda: None, name)
            p.data = self.full.view(index)
        self.params = [p for _, p in params]
        self.stepped, self.gathered, self.running = 0.0, 0.0, False

    def fill(self) -> Handle:
        """As a collective: the values are there when somebody has waited."""
        values, self.running = self.stepped, True

        def arrive() -> None:
            self.full.values.fill_(values)
            self.gathered, self.running = values, False

        return Handle([], arrive)

    def do(self, operation: str) -> None:
        """One operation; a step comes before weights are out of date."""
        if operation == "gather":
            if not self.full.is_current:
                self.full.gather(self.fill)
        else:
            self.stepped += operation == "outdate"
            getattr(self.full, operation)()

    def check(self) -> None:
        """What each state promises."""
        full, state = self.full, self.full.state
        assert [is_guarded(p) for p in self.params] == [state is not WeightState.READABLE] * 2
        assert full.is_allocated == (state is not WeightState.SHARDED)
        assert self.running == (state is WeightState.GATHERING)
        if state in (WeightState.READABLE, WeightState.HIDDEN):
            assert self.gathered == self.stepped
            assert full.values.eq(self.stepped).all()
        if state is WeightState.READABLE:
            assert [tuple(p.shape) for p in self.params] == [(2, 3), (4,)]
            assert all(p.eq(self.stepped).all() for p in self.params)


def is_legal(state: WeightState, operation: str) -> bool:
    """Whether somebody may do it: weights that nobody gathers are not waited for."""
    if operation == "wait":
        return state not in (WeightState.SHARDED, WeightState.STALE)
    if operation == "outdate":
        return state is not WeightState.SHARDED
    return operation != "free" or state not in (WeightState.STALE, WeightState.HIDDEN)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(OPERATIONS), max_size=30))
def test_every_legal_walk_keeps_what_the_states_promise(operations: list[str]) -> None:
    walk = Walk()
    for operation in operations:
        if is_legal(walk.full.state, operation):
            walk.do(operation)
        else:
            stepped = walk.stepped
            with pytest.raises(AssertionError, match=f"{walk.full.state.value} -> "):
                walk.do(operation)
            walk.stepped = stepped
        walk.check()


@pytest.mark.parametrize(("first", "then"), ILLEGAL, ids=lambda state: state.value)
def test_any_other_transition_raises(first: WeightState, then: WeightState) -> None:
    full = Walk().full
    full.state = first
    with pytest.raises(AssertionError, match=f"a: {first.value} -> {then.value}"):
        full._become(then)


def test_every_state_is_reached_and_left() -> None:
    assert set(ALLOWED) == set(WeightState) == {then for states in ALLOWED.values() for then in states}
