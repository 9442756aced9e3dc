"""What a GPU runs as one kernel is traced in one piece, and is the same function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_dist.tensors import one_kernel as module
from hf_dist.tensors.codecs import CODECS
from hf_dist.tensors.one_kernel import one_kernel
from tests.covering import some_of

SENDERS, ROWS, BLOCKS, BLOCK = 10, 2, 3, 64


def traced(function: Callable[..., Any], *args: Any) -> Any:
    """`function` as `compiled` would hand it to Inductor, without Inductor."""
    return torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.parametrize("name", some_of(CODECS, "int4"))
def test_codecs_are_traced_in_one_piece_and_give_the_same_bytes_and_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = CODECS[name](BLOCK)
    values = torch.randn(SENDERS, ROWS * BLOCKS * BLOCK, generator=torch.Generator().manual_seed(0))
    wire, plain = (torch.empty(SENDERS, ROWS * codec.nbytes(BLOCKS * BLOCK), dtype=torch.uint8) for _ in range(2))
    out, expected = torch.empty(2, ROWS, BLOCKS * BLOCK)
    rows = values.view(SENDERS * ROWS, -1)
    codec.encode(rows, plain.view(len(rows), -1))
    codec.decode_sum(plain.view(SENDERS, ROWS, -1), expected, 0.25)
    monkeypatch.setattr("hf_dist.tensors.codecs.codec.one_kernel", traced)
    monkeypatch.setattr("hf_dist.tensors.codecs.codec._in_chunks", lambda tensor: False)
    codec.encode(rows, wire.view(len(rows), -1))
    assert torch.equal(wire, plain)
    codec.decode_sum(wire.view(SENDERS, ROWS, -1), out, 0.25)
    assert torch.equal(out, expected)


class OnGpu:
    """Stands for a tensor on a GPU."""

    device = torch.device("cuda")


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Callable[..., Any]) -> Callable[..., Any]:
        raise RuntimeError("no Triton")

    monkeypatch.setattr(module, "compiled", fails)
    monkeypatch.setattr(module, "_failed", set())
    assert [one_kernel(id, OnGpu()) > 0 for _ in range(2)] == [True, True]
    assert module._failed == {id}
