"""The tiled loss equals HF's own loss on HF's own models, never holds the logits, and gives way to code that reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist.errors import ModelError
from hf_dist.memory.loss import TiledLoss, tiles
from hf_dist.memory.loss.lazy_logits import LazyLogits, Use, marked
from tests.memory.activation.families import FAMILIES, LENGTH, VOCAB, make_batch, make_model

RTOL = 1e-6
ROWS_PER_TILE = 40
NO_GRADIENT = ("k_proj.bias", "key.bias")  # zero in exact arithmetic: softmax does not see what is added to every key


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "TILE_BYTES", tiles.BYTES_PER_LOGIT * VOCAB * ROWS_PER_TILE)
    yield


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp(min=1e-30))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {n: g for n, g in named.items() if not n.endswith(NO_GRADIENT)}


def exact_gradients(family: str, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Those of transformers in double precision: how far those in single precision are from them is rounding."""
    model = make_model(family).double()
    model(**batch).loss.backward()
    return gradients(model)


def tiled(model: Any) -> TiledLoss:
    return TiledLoss(model, model.get_output_embeddings())


class Largest(TorchDispatchMode):
    """The most rows over the vocabulary that any tensor had memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.logits_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.dim() and leaf.shape[-1] == VOCAB:
                stored = leaf.untyped_storage().nbytes() // (leaf.element_size() * VOCAB)
                self.logits_rows = max(self.logits_rows, min(stored, leaf.numel() // VOCAB))
        return result


@pytest.mark.parametrize("items", [None, torch.tensor(77)], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_transformers(family: str, items: torch.Tensor | None) -> None:
    batch: dict[str, Any] = make_batch()
    if items is not None and family not in ("t5", "bert"):  # these two do not take it
        batch["num_items_in_batch"] = items
    model = make_model(family)
    expected = model(**batch).loss
    expected.backward()
    wanted = gradients(model)
    switch = tiled(model)
    output = model(**batch)
    assert isinstance(output.logits, LazyLogits)
    output.loss.backward()
    assert type(output.loss.grad_fn).__name__ != "NllLossBackward0"
    found = gradients(model)
    assert switch.tiles
    assert output.loss.dtype == expected.dtype and relative(output.loss, expected) < RTOL
    assert found.keys() == wanted.keys()
    exact = exact_gradients(family, batch)
    # Two orders of summation may be as far from each other as one is from the exact sum, on either side of it.
    limits = {n: max(RTOL, 2 * relative(wanted[n], exact[n])) for n in wanted}
    assert {n: relative(found[n], wanted[n]) for n in wanted if relative(found[n], wanted[n]) >= limits[n]} == {}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_batch_without_labels_gives_what_transformers_gives(family: str) -> None:
    batch = make_batch(labelled=False)
    model = make_model(family)
    expected = model(**batch).loss
    expected.backward()
    wanted = gradients(model)
    tiled(model)
    loss = model(**batch).loss
    loss.backward()
    assert torch.isnan(expected) and torch.isnan(loss)
    found = gradients(model)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted) and not any(g.any() for g in found.values())
    batch["num_items_in_batch"] = torch.tensor(5)  # other microbatches of the window have labels
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == 0 and not any(g.any() for g in gradients(model).values())


def test_the_logits_are_never_all_in_memory() -> None:
    batch = make_batch()
    rows = batch["labels"].numel()
    model = make_model("llama", tie_word_embeddings=True)
    plain = Largest()
    with plain:
        model(**batch).loss.backward()
    assert plain.logits_rows == rows == 6 * LENGTH
    tiled(model)
    seen = Largest()
    with seen:
        model(**batch).loss.backward()
    assert seen.logits_rows == ROWS_PER_TILE


def test_an_evaluation_is_tiled_only_where_the_loss_alone_is_read() -> None:
    batch = make_batch()
    model = make_model("llama").eval()
    switch = tiled(model)
    with torch.no_grad():
        plain = model(**batch)
        assert type(plain.logits) is torch.Tensor
        with switch.only_loss_is_read():
            seen = Largest()
            with seen:
                output = model(**batch)
        again = model(**batch)
    assert type(again.logits) is torch.Tensor and torch.equal(again.logits, plain.logits)
    assert relative(output.loss, plain.loss) < RTOL and seen.logits_rows == ROWS_PER_TILE
    with pytest.raises(ModelError, match="logits were read after backward, and they were not kept"):
        output.logits.argmax(-1)


def test_in_bf16_it_is_no_further_from_fp32_than_transformers_is() -> None:
    errors: dict[str, list[float]] = {"ours": [], "stock": []}
    for family in ("llama", "gemma2"):
        for seed, items in ((0, None), (1, torch.tensor(123)), (2, None), (3, torch.tensor(97))):
            batch: dict[str, Any] = {**make_batch(rows=16, seed=seed), "num_items_in_batch": items}
            exact = make_model(family, tie_word_embeddings=False)
            exact(**batch).loss.backward()
            truth = gradients(exact)
            half = make_model(family, tie_word_embeddings=False).bfloat16()
            for kind in ("stock", "ours"):
                half(**batch).loss.backward()
                found = gradients(half)
                assert found.keys() == truth.keys() and found["lm_head.weight"].dtype == torch.bfloat16
                errors[kind].append(sum(relative(found[n], truth[n]) for n in truth) / len(truth))
                tiled(half)
    assert sum(errors["ours"]) <= sum(errors["stock"]), errors


def test_a_frozen_head_has_no_gradient_and_its_input_has() -> None:
    batch = make_batch()
    model = make_model("llama", tie_word_embeddings=False)
    model.lm_head.weight.requires_grad_(False)
    model(**batch).loss.backward()
    wanted = gradients(model)
    tiled(model)
    model(**batch).loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys() and "lm_head.weight" not in found
    assert all(relative(found[n], wanted[n]) < RTOL for n in wanted)


def test_logits_that_are_read_beside_the_loss_are_right_and_end_the_tiling(caplog: pytest.LogCaptureFixture) -> None:
    batch = make_batch()
    model = make_model("llama")
    expected = model(**batch)
    switch = tiled(model)
    with caplog.at_level("INFO", logger="hf_dist"):
        output = model(**batch)
        assert output.logits.shape == expected.logits.shape and output.logits.requires_grad and switch.tiles
        assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    assert not switch.tiles
    assert "argmax reads the logits of LlamaForCausalLM, so they are computed in full from now on" in caplog.text
    (output.loss + output.logits.pow(2).mean()).backward()
    found = gradients(model)
    (expected.loss + expected.logits.pow(2).mean()).backward()
    wanted = gradients(model)
    assert all(relative(found[n], wanted[n]) < RTOL for n in wanted)
    assert type(model(**batch).logits) is torch.Tensor


def test_logits_read_after_backward_are_an_error_that_names_the_switch() -> None:
    model = make_model("llama")
    tiled(model)
    output = model(**make_batch())
    output.loss.backward()
    with pytest.raises(ModelError, match=re.escape('set "hf_dist": {"tiled_loss": false}')):
        output.logits.softmax(-1)
    assert output.logits.shape[-1] == VOCAB


@pytest.mark.parametrize("return_dict", [True, False])
def test_without_labels_the_output_is_what_it_always_was(return_dict: bool) -> None:
    batch = {k: v for k, v in make_batch().items() if k != "labels"}
    model = make_model("gemma2")
    expected = model(**batch, return_dict=return_dict)
    switch = tiled(model)
    output = model(**batch, return_dict=return_dict)
    assert type(output) is type(expected) and type(output[0]) is torch.Tensor
    assert torch.equal(output[0], expected[0]) and output[0].grad_fn is not None
    assert switch.tiles
    assert isinstance(model(**make_batch()).logits, LazyLogits)


def test_a_kernel_that_takes_the_logits_past_python_is_refused_in_backward() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.expand(20, 30, VOCAB)

    head = torch.nn.Linear(8, VOCAB)
    loss = Fused.apply(head(marked(torch.randn(20, 30, 8), Use(lambda name: None))))
    with pytest.raises(ModelError, match="custom autograd Function"):
        loss.backward()


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., :-1, :].contiguous()


READS = {
    "shift": (shifted, True),
    "rows by a mask": (lambda z: z[torch.arange(LENGTH)[None].expand(6, -1) > 3], True),
    "rows by a slice": (lambda z: z[:, 2:5], True),
    "scaled from the left": (lambda z: 0.5 * z, True),
    "reshape": (lambda z: torch.reshape(z, (-1, VOCAB)), True),
    "cast": (lambda z: z.to(torch.float64), True),
    "one row": (lambda z: z[0], False),
    "part of the vocabulary": (lambda z: z[..., :5], False),
    "softmax": (lambda z: z.softmax(-1), False),
    "transpose": (lambda z: z.transpose(1, 2), False),
    "joined": (lambda z: torch.cat([z, z]), False),
    "times a tensor": (lambda z: z * torch.ones(VOCAB), False),
}


@pytest.mark.parametrize("name", READS)
def test_every_function_of_the_logits_gives_what_it_gives_for_a_plain_tensor(name: str) -> None:
    function, stays_lazy = READS[name]
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, VOCAB), torch.randn(6, LENGTH, 8)
    expected = function(head(hidden))
    result = function(head(marked(hidden, Use(lambda name: None))))
    assert isinstance(result, LazyLogits) == stays_lazy
    assert result.shape == expected.shape and result.dtype == expected.dtype
    assert relative(result + 0, expected) < RTOL


@pytest.mark.parametrize("changes", [{"label_smoothing": 0.1}, {"reduction": "none"}, {"weight": torch.ones(VOCAB)}])
def test_other_kinds_of_cross_entropy_are_computed_from_the_logits(changes: dict[str, Any]) -> None:
    head, hidden, target = torch.nn.Linear(8, VOCAB), torch.randn(90, 8), torch.randint(0, VOCAB, (90,))
    read: list[str] = []
    loss = torch.nn.functional.cross_entropy(head(marked(hidden, Use(read.append))), target, **changes)
    assert torch.equal(loss, torch.nn.functional.cross_entropy(head(hidden), target, **changes))
    assert read == ["cross_entropy"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_whatever_label_is_to_be_ignored_is(reduction: str) -> None:
    head, hidden, target = torch.nn.Linear(8, VOCAB), torch.randn(90, 8), torch.randint(0, 4, (90,))
    found = []
    for start in (hidden, marked(hidden, Use(lambda name: None))):
        logits = head(start)
        loss = torch.nn.functional.cross_entropy(logits, target, ignore_index=2, reduction=reduction)
        found.append((loss, *torch.autograd.grad(loss, list(head.parameters()))))
    assert isinstance(logits, LazyLogits)
    assert all(relative(got, wanted) < RTOL for got, wanted in zip(*found, strict=True))


def test_where_tiles_would_take_more_memory_the_logits_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = make_model("llama")
    expected = model(**make_batch())
    switch = tiled(model)
    output = model(**make_batch())
    assert torch.equal(output.loss, expected.loss)
    output.loss.backward()
    assert type(output.logits) is torch.Tensor and torch.equal(output.logits, expected.logits) and switch.tiles


def test_a_kept_graph_goes_backward_twice() -> None:
    head, hidden, target = torch.nn.Linear(8, VOCAB), torch.randn(90, 8), torch.randint(0, VOCAB, (90,))
    loss = torch.nn.functional.cross_entropy(head(marked(hidden, Use(lambda name: None))), target)
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone()
    loss.backward()
    assert torch.equal(head.weight.grad, 2 * once)
