"""The loss in chunks of the logits is HF's own to the last bit, and the logits stay there for whoever reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist.memory.loss import TiledLoss, chunks
from hf_dist.memory.loss.lazy_logits import LazyLogits, Use, marked
from tests.memory.activation.families import FAMILIES, LENGTH, VOCAB, make_batch, make_model

ROWS_PER_CHUNK = 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(chunks.CHUNK_BYTES, "cpu", 4 * VOCAB * ROWS_PER_CHUNK)
    yield


def chunked(model: Any) -> TiledLoss:
    return TiledLoss(model, model.get_output_embeddings(), tiles=False)


def computed(hidden: torch.Tensor) -> torch.Tensor:
    return marked(hidden, Use(lambda name: None, tiles=False))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return named


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def nodes_behind(loss: torch.Tensor) -> set[str]:
    """Names of the graph's nodes a few steps back: the loss may be scaled, cast, or joined by another."""
    found: set[str] = set()
    nodes: list[Any] = [loss.grad_fn]
    for _ in range(5):
        found.update(type(node).__name__ for node in nodes)
        nodes = [following for node in nodes for following, _ in node.next_functions if following is not None]
    return found


class WideRows(TorchDispatchMode):
    """The most rows over the vocabulary that an fp32 tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float32 or leaf.is_meta:
                continue
            if leaf.shape[-1:] == (VOCAB,):
                stored = leaf.untyped_storage().nbytes() // (4 * VOCAB)  # none of a tensor that waits
                self.rows = max(self.rows, min(stored, leaf.numel() // VOCAB))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("items", [None, torch.tensor(77)], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_logits_are_those_of_transformers(
    family: str, items: torch.Tensor | None, dtype: torch.dtype
) -> None:
    batch: dict[str, Any] = make_batch()
    if items is not None and family not in ("t5", "bert"):  # these two do not take it
        batch["num_items_in_batch"] = items
    model = make_model(family).to(dtype)
    expected = model(**batch)
    expected.loss.backward()
    wanted = gradients(model)
    chunked(model)
    output = model(**batch)
    assert "_LogProbabilityBackward" in nodes_behind(output.loss)
    assert output.loss.dtype == expected.loss.dtype and torch.equal(output.loss, expected.loss)
    output.loss.backward()
    assert same(gradients(model), wanted)
    assert torch.equal(output.logits + 0, expected.logits)
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))


def test_the_loss_really_goes_through_chunks_and_nothing_wide_is_whole() -> None:
    batch = make_batch()
    model = make_model("llama", tie_word_embeddings=False).bfloat16()
    with (plain := WideRows()):
        model(**batch).loss.backward()
    assert plain.rows == 6 * LENGTH
    chunked(model)
    with (seen := WideRows()):
        model(**batch).loss.backward()
    assert seen.rows == ROWS_PER_CHUNK


def test_a_batch_without_labels_gives_nan_and_gradients_of_zero() -> None:
    batch = make_batch(labelled=False)
    model = make_model("llama")
    model(**batch).loss.backward()
    wanted = gradients(model)
    chunked(model)
    loss = model(**batch).loss
    loss.backward()
    found = gradients(model)
    assert torch.isnan(loss) and same(found, wanted) and not any(g.any() for g in found.values())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_read_beside_the_loss_have_their_graph(family: str) -> None:
    batch = make_batch()
    model = make_model(family)

    def loss(output: Any) -> torch.Tensor:
        return output.loss + output.logits.pow(2).mean()  # type: ignore[no-any-return]

    loss(model(**batch)).backward()
    wanted = gradients(model)
    chunked(model)
    for _ in range(2):
        output = model(**batch)
        if family == "llama":
            assert type(output.logits) is torch.Tensor
        loss(output).backward()
        found = gradients(model)
        assert all(torch.allclose(found[n], wanted[n], rtol=1e-5, atol=1e-7) for n in wanted)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_model_without_labels_returns_plain_logits(return_dict: bool) -> None:
    batch = {k: v for k, v in make_batch().items() if k != "labels"}
    model = make_model("gemma2")
    expected = model(**batch, return_dict=return_dict)
    chunked(model)
    output = model(**batch, return_dict=return_dict)
    assert type(output) is type(expected) and type(output[0]) is torch.Tensor
    assert torch.equal(output[0], expected[0]) and output[0].grad_fn is not None


def test_an_evaluation_with_labels_is_chunked_too_and_one_without_is_left_alone() -> None:
    batch = make_batch()
    model = make_model("llama").eval().bfloat16()
    with torch.no_grad():
        expected = model(**batch)
        chunked(model)
        with (seen := WideRows()):
            output = model(**batch)
        assert torch.equal(output.loss, expected.loss) and torch.equal(output.logits, expected.logits)
        assert seen.rows == ROWS_PER_CHUNK
        assert type(model(input_ids=batch["input_ids"]).logits) is torch.Tensor


def test_a_kernel_that_takes_the_logits_past_python_sees_them() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            ctx.shape = logits.shape
            return logits.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.expand(ctx.shape)

    head, hidden = torch.nn.Linear(8, VOCAB), torch.randn(2, 3, 8)
    loss = Fused.apply(head(computed(hidden)))
    loss.backward()
    assert torch.equal(loss, head(hidden).sum()) and torch.equal(head.bias.grad, torch.full((VOCAB,), 6.0))


def test_a_model_that_changes_its_logits_in_place_is_followed() -> None:
    head, hidden, target = torch.nn.Linear(8, VOCAB), torch.randn(9, 8), torch.randint(7, VOCAB, (9,))

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[:, :5] = -1e4
        return functional.cross_entropy(logits.float(), target)

    wanted = loss(hidden)
    wanted.backward()
    grad, head.weight.grad = head.weight.grad, None
    found = loss(computed(hidden))
    found.backward()
    assert torch.equal(found, wanted) and torch.equal(head.weight.grad, grad) and not grad[:5].any()


def test_under_autocast_the_loss_is_what_torch_makes_of_it() -> None:
    head, hidden, target = torch.nn.Linear(8, VOCAB), torch.randn(90, 8), torch.randint(0, VOCAB, (90,))
    found = []
    for start in (hidden, computed(hidden)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(head(start), target)
        loss.backward()
        found.append((loss.detach(), head.weight.grad))
        head.weight.grad = None
    assert found[0][0].dtype == found[1][0].dtype
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_kept_graph_goes_backward_twice() -> None:
    head, hidden, target = torch.nn.Linear(8, VOCAB), torch.randn(90, 8), torch.randint(0, VOCAB, (90,))
    logits = head(computed(hidden))
    assert isinstance(logits, LazyLogits)
    loss = functional.cross_entropy(logits, target, ignore_index=int(target[0]))
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone()
    loss.backward()
    assert torch.equal(head.weight.grad, 2 * once)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_whatever_label_is_to_be_ignored_is(reduction: str) -> None:
    head, hidden, target = torch.nn.Linear(8, VOCAB), torch.randn(90, 8), torch.randint(0, 4, (90,))
    found = []
    for start in (hidden, computed(hidden)):
        loss = functional.cross_entropy(head(start), target, ignore_index=2, reduction=reduction)
        found.append((loss, *torch.autograd.grad(loss, list(head.parameters()))))
    assert all(torch.equal(got, wanted) for got, wanted in zip(*found, strict=True))


def test_a_target_that_is_no_word_is_refused() -> None:
    head = torch.nn.Linear(8, VOCAB)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        functional.cross_entropy(head(computed(torch.randn(3, 8))), torch.tensor([1, VOCAB, 2]))
