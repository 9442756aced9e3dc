"""Where elements go: copies are followed, runs cover every interval, files are laid out as safetensors does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save

from hf_dist.checkpoint.pieces import Piece
from hf_dist.checkpoint.provenance import Provenance, UntraceableError
from hf_dist.checkpoint.weight_plan import SAFETENSORS_DTYPES, StoredTensor, WeightFile, WeightPlan
from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.hf.naming import weight_plan_for

from .families import FAMILIES, make_model

CONVERSIONS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "experts": (lambda a: [x.squeeze(0) for c in a.chunk(2, 1) for x in c.contiguous().chunk(4, 0)], {"a": (4, 6, 5)}),
    "transpose": (lambda a: a.transpose(1, 2).contiguous(), {"a": (4, 6, 5)}),
    "part of a transposed copy": (lambda a: a.t().contiguous().view(-1)[3:17], {"a": (6, 5)}),
    "concatenation": (lambda a, b: torch.cat([a, b], 1), {"a": (3, 4), "b": (3, 5)}),
    "concatenation, negative dim": (lambda a, b: torch.cat([a, b], -1), {"a": (3, 4), "b": (3, 5)}),
    "transposed concatenation": (lambda a, b: torch.cat([a, b], 1).t().contiguous(), {"a": (3, 4), "b": (3, 5)}),
    "interleaved": (
        lambda a, b: torch.cat([a, b], 1).reshape(3, 2, 4).transpose(1, 2).reshape(3, 8), {"a": (3, 4), "b": (3, 4)}
    ),
    "stack": (lambda a, b: torch.stack([a, b], 0).transpose(0, 1).contiguous(), {"a": (3, 4), "b": (3, 4)}),
    "part of a stack": (lambda a, b: torch.stack([a, b], -1).reshape(-1)[2:9], {"a": (3, 4), "b": (3, 4)}),
    "rope": (lambda a: a.view(4, 2, 3, 10).transpose(1, 2).reshape(24, 10), {"a": (24, 10)}),
    "copy of part of a copy": (lambda a: a.view(4, 2, 3).transpose(1, 2).reshape(24)[5:20].clone(), {"a": (24,)}),
    "scalar": (lambda a: a.clone(), {"a": ()}),
    "empty": (lambda a: a.t().contiguous(), {"a": (0, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSIONS)
def test_pieces_and_runs_put_every_element_where_the_conversion_puts_it(name: str) -> None:
    function, shapes = CONVERSIONS[name]
    meta = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    real = {
        key: torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * number
        for number, (key, shape) in enumerate(shapes.items())
    }
    wanted = function(**real)
    with Provenance(meta) as provenance:
        found = function(**meta)
    for expected, tensor in zip(*((x if isinstance(x, list) else [x]) for x in (wanted, found)), strict=True):
        boxes, runs = (torch.full((expected.numel(),), -1) for _ in range(2))
        for piece in provenance.pieces(tensor):
            source = real[piece.param].reshape(-1)
            into = boxes.as_strided(piece.sizes, piece.target_strides, piece.target_offset)
            into.copy_(source.as_strided(piece.sizes, piece.strides, piece.offset))
            for start, stop in ((0, 7), (7, 8), (8, 10**6)):
                for run in piece.runs(start, stop):
                    assert start <= run.source and run.source + run.numel <= stop
                    runs[run.target : run.target + run.numel] = source[run.source : run.source + run.numel]
        assert torch.equal(boxes.view(expected.shape), expected)
        assert torch.equal(runs.view(expected.shape), expected)


@pytest.mark.parametrize("function", [lambda a: a + 1, lambda a: a.to(torch.float64), lambda a: torch.zeros_like(a)])
def test_computed_values_have_no_pieces(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    a = torch.empty(3, device="meta")
    with Provenance({"a": a}) as provenance:
        out = function(a)
    with pytest.raises(UntraceableError):
        provenance.pieces(out)


def test_headers_are_those_of_safetensors_for_every_dtype_and_odd_names() -> None:
    shapes = {'quote"é\\': (2, 3), "scalar": (), "empty": (0, 3)}
    state = {n: torch.zeros(s) for n, s in shapes.items()}
    state |= {str(dtype): torch.zeros(3, dtype=torch.float32).to(dtype) for dtype in SAFETENSORS_DTYPES}
    tensors = [StoredTensor(n, tuple(t.shape), t.dtype, (Piece.whole(n, t.numel()),)) for n, t in state.items()]
    assert save(state, metadata={"format": "pt"}).startswith(WeightFile.of("f", tensors).header)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_survives_json(family: str) -> None:
    plan = weight_plan_for(make_model(family), {}, 4000)
    assert WeightPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_newer_plan_is_refused() -> None:
    with pytest.raises(CheckpointError, match="Upgrade"):
        WeightPlan.from_json({"version": 99, "files": {}, "indexes": {}})


def test_a_size_that_is_none_is_refused() -> None:
    tensor = StoredTensor("w", (3,), torch.float32, (Piece.whole("w", 3),))
    with pytest.raises(ConfigError, match="max_shard_size"):
        WeightPlan.pack([tensor], max_shard_size="large")


def test_undeclared_ties_are_refused_as_by_save_pretrained() -> None:
    model: Any = make_model("llama")
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    with pytest.raises(CheckpointError, match=r"up_proj"):
        weight_plan_for(model, {})
