"""Batches of any kind are read alike: dicts, and the mappings that are none, such as a tokenizer's `BatchEncoding`."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, BatchFeature

from hf_dist.engine.engine import _to_device
from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline.communication import Channel
from hf_dist.parallel.pipeline.meta import to_meta
from hf_dist.parallel.pipeline.p2p import ChannelEnds, P2PTransport
from hf_dist.parallel.pipeline.probe import TensorSpec
from hf_dist.parallel.pipeline.runtime import signature
from hf_dist.tensors import pytree


class Attributes(dict[str, Any]):
    """A dict with attributes beside its keys."""


class Frozen(Mapping[str, Any]):
    """A mapping of a user's own: nothing can be put into it."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


KINDS = (dict, OrderedDict, UserDict, BatchEncoding, BatchFeature, Attributes, Frozen)


def batch_of(kind: Any, length: int = 5) -> Any:
    """A batch with a nested mapping, a list and values that are no tensors."""
    ids = torch.arange(2 * length).view(2, length)
    inner = kind({"mask": torch.ones(2, length, requires_grad=True), "names": ["a", "b"]})
    return kind({"input_ids": ids, "more": [inner, (ids + 1, None)], "scale": 0.5})


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_of_other_shapes_have_other_signatures(kind: Any) -> None:
    assert signature(batch_of(kind, 5)) == signature(batch_of(dict, 5))
    assert signature(batch_of(kind, 5)) != signature(batch_of(kind, 6))
    assert signature({"inside": [batch_of(kind, 5)]}) != signature({"inside": [batch_of(kind, 6)]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "move", [lambda batch: _to_device(batch, torch.device("meta")), to_meta], ids=["engine", "plan"]
)
def test_every_tensor_moves_and_the_batch_keeps_its_class(kind: Any, move: Any) -> None:
    batch = batch_of(kind)
    moved = move(batch)
    assert type(moved) is kind and type(moved["more"][0]) is kind and moved["more"][1][1] is None
    assert list(moved) == list(batch) and moved["scale"] == 0.5 and moved["more"][0]["names"] == ["a", "b"]
    tensors = [moved["input_ids"], moved["more"][0]["mask"], moved["more"][1][0]]
    assert all(t.is_meta for t in tensors)
    assert [t.shape for t in tensors] == [(2, 5)] * 3
    assert [
        t for t in pytree.leaves(moved) if isinstance(t, torch.Tensor)
    ] == tensors  # the same objects, in their order
    before = [batch["input_ids"], batch["more"][0]["mask"], batch["more"][1][0]]
    assert not any(t.is_meta for t in before), "the loader's own batch is as it was"


def test_a_copy_keeps_what_is_beside_the_keys() -> None:
    batch = Attributes(batch_of(dict))
    batch.source = "a file"  # type: ignore[attr-defined]
    for other in (pytree.mapped(lambda leaf: leaf, batch), pytree.copied(batch), to_meta(batch)):
        assert other.source == "a file"
    encoding = BatchEncoding({"input_ids": torch.zeros(1, 2)}, n_sequences=2)
    assert _to_device(encoding, torch.device("meta")).n_sequences == 2


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not Frozen])
def test_what_is_removed_from_a_copy_stays_in_the_batch(kind: Any) -> None:
    batch = batch_of(kind)
    copy = pytree.copied(batch)
    assert type(copy) is kind
    copy.pop("input_ids")
    assert "input_ids" in batch
    assert pytree.copied(None) is None and pytree.copied(batch["more"]) is batch["more"]


def test_other_shapes_between_stages_are_said_with_those_of_the_microbatch() -> None:
    channel = Channel(0, 1, "F")
    transport = P2PTransport({}, torch.device("cpu"))
    transport.channels[channel] = ChannelEnds(None, 0, 1)  # type: ignore[arg-type]
    key = (0, True, signature(batch_of(BatchEncoding)))
    transport._known[channel, key] = [TensorSpec((2, 7, 8), torch.float32, True)]
    with pytest.raises(ModelError) as error:
        transport.send(channel, key, [torch.zeros(2, 9, 8, dtype=torch.bfloat16)])
    assert str(error.value).startswith(
        "what stage 0 sends changed from [2x7x8 float32] to [2x9x8 bfloat16 without gradient] for microbatches of the same "
        "shapes, [2x5 int64, 2x5 float32, 2x5 int64]. The shapes"
    )
