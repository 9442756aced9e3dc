"""The gradient that autograd made serves as the flat buffer where it is the whole of it; else it is copied into one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.window_gradient import WindowGradient
from hf_dist.tensors.tensor_slice import TensorSlice


def window(params: list[nn.Parameter], shards: int, wire: torch.dtype = torch.float32) -> WindowGradient:
    layout = FlatLayout.pack([(str(i), TensorSlice.all(tuple(p.shape))) for i, p in enumerate(params)], shards)
    made = WindowGradient(params, layout, torch.device("cpu"), accumulated=torch.float32, wire=wire, divisor=2)
    made.begin_backward(True, torch.float32)
    return made


@pytest.mark.parametrize(
    ("shapes", "wire", "is_taken_over"),
    [
        ([(8, 16)], torch.float32, True),
        ([(8, 16)], torch.bfloat16, False),  # the wire has another dtype
        ([(8, 15)], torch.float32, False),  # the layout is padded
        ([(8, 16), (8, 16)], torch.float32, False),  # two share a buffer
    ],
)
def test_a_gradient_that_is_the_whole_buffer_is_not_copied(
    shapes: list[tuple[int, ...]], wire: torch.dtype, is_taken_over: bool
) -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    made = window(params, 1, wire)
    grads = [torch.full(shape, 4.0) for shape in shapes]
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        p.grad = grad
        made.add(i)
    taken = made.take()
    assert (taken.data_ptr() == grads[0].data_ptr()) == is_taken_over
    assert made.used == [True] * len(params)
    assert all(p.grad is None for p in params)
    assert taken.dtype == wire
    for slot in made._layout.slots:
        assert torch.all(taken[slot.offset : slot.stop] == 2.0), "divided once"


def test_later_gradients_of_a_window_are_added_to_the_one_taken_over() -> None:
    p = nn.Parameter(torch.zeros(64))
    made = window([p], 1)
    for value in (4.0, 6.0):  # two backwards of a unit in one window, as with reentrant checkpointing
        p.grad = torch.full((64,), value)
        made.add(0)
    assert torch.equal(made.take(), torch.full((64,), 5.0))
