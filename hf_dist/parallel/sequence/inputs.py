"""Cuts a model's arguments: takes whole rows, passes this rank's positions on, and keeps what other code needs of the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_dist.errors import ModelError
from hf_dist.model_config import text_config
from hf_dist.parallel.sequence.forward import SequenceAxes, SplitForward
from hf_dist.tensors import host_read

IGNORED = -100
"""The label of a token without a label."""
_KEY = "sequence_parallel_size"
_HANDLED = frozenset(
    {"labels", "shift_labels", "attention_mask", "position_ids", "num_items_in_batch", "logits_to_keep"}
)
OTHER_KINDS = ("pixel_values", "input_features", "input_values", "decoder_input_ids", "encoder_outputs")
"""Arguments that are no text, refused by their names."""


@dataclass(frozen=True)
class Arguments:
    """How a model is called, and how it derives missing arguments."""

    names: tuple[str, ...]
    """Names of its parameters, in order."""
    takes_any: bool
    """Whether it accepts `**kwargs`."""
    shifts: bool
    """Whether its loss compares a token with the next token's label, and accepts labels that are already shifted."""
    positions: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Whole ids -> whole positions, for a model that counts from its padding."""
    first_of_embeds: int = 0
    """Position of the first token of a row that is given as `inputs_embeds`, for such a model."""
    counts_mask: bool = False
    """Whether it derives positions from the attention mask."""
    caches: bool = False
    """Whether it accepts `use_cache`."""
    chunked: bool = False
    """Whether some of its layers attend in chunks."""

    @classmethod
    def of(cls, called: nn.Module, model: nn.Module) -> Arguments:
        """`called`: the module whose forward gets the arguments; `model`: the HF model in it (itself, or under adapters)."""
        parameters = inspect.signature(called.forward).parameters
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
            parameters = inspect.signature(model.forward).parameters
        positions, first = None, 0
        for module in model.modules():
            make = getattr(module, "create_position_ids_from_input_ids", None)
            if make is not None and isinstance(getattr(module, "padding_idx", None), int):
                positions = _counted_from_padding(make, module.padding_idx)  # type: ignore[arg-type]
                first = int(module.padding_idx) + 1  # type: ignore[arg-type]
        from_mask = any(
            isinstance(m, nn.Embedding) and "attention_mask" in inspect.signature(m.forward).parameters
            for m in model.modules()
        )
        config: object = getattr(model, "config", None)
        text = text_config(config)
        named = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            tuple(named),
            any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
            getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss",
            positions,
            first,
            from_mask,
            hasattr(text, "use_cache"),
            "chunked_attention" in (getattr(text, "layer_types", None) or ()),
        )

    def takes(self, name: str) -> bool:
        """Whether it accepts a keyword argument of that name."""
        return self.takes_any or name in self.names


def _counted_from_padding(make: Callable[..., Any], padding_idx: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: make(ids, padding_idx)


@dataclass(frozen=True)
class Cut:
    """A call of the model on a part of each row."""

    kwargs: dict[str, object]
    forward: SplitForward
    share: torch.Tensor | None
    """This rank's share of the labelled tokens, 0 to 1; None without labels."""
    kept: object
    """The caller's `logits_to_keep`."""
    shifted: bool
    """Whether labels were shifted here instead of inside the model."""


def bound(arguments: Arguments, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """All arguments, by name."""
    return {**dict(zip(arguments.names, args, strict=False)), **kwargs}


def cut_inputs(
    arguments: Arguments, given: Mapping[str, Any], axes: SequenceAxes, documents_of: Callable[..., object] | None
) -> Cut:
    """`given`: arguments of a forward on whole rows. Raises `ModelError` for arguments that cannot be cut.

    `documents_of`: packed documents from positions; None if one process looks for none (it makes a cache). Local.
    """
    ids = given.get("input_ids")
    ids = given.get("inputs_embeds") if ids is None else ids
    _check(given, ids)
    assert isinstance(ids, torch.Tensor)
    rows, length = ids.shape[:2]
    padded = axes.layout.padded(length)
    mask = given.get("attention_mask")
    is_full, begins_full = _filled(mask)
    if not begins_full:
        _refuse_left(arguments, is_given=given.get("position_ids") is not None)
    positions, documents = _positions(arguments, given, mask, (rows, length, padded), documents_of)
    mask = None if mask is None or is_full else _padded(mask.bool(), padded - length, False)
    forward = SplitForward(axes, padded, length, mask, positions, documents)
    own = forward.own
    kwargs = dict(given)
    for key, value in given.items():
        if key not in _HANDLED and isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length:
            kwargs[key] = _padded(value, padded - length, 0)[:, own]
    share = _cut_labels(arguments, kwargs, own, (rows, length), padded)
    if arguments.takes("attention_mask"):  # otherwise HF would look for packing in the positions of a part
        seen = (own < length).expand(rows, -1) if mask is None else mask[:, own]
        kwargs["attention_mask"] = seen.long()
    if arguments.takes("position_ids"):
        kwargs["position_ids"] = positions[:, own]
    if arguments.caches:
        kwargs["use_cache"] = False
    kept = kwargs.get("logits_to_keep")
    if kept is not None:
        kwargs["logits_to_keep"] = 0
    return Cut(kwargs, forward, share, kept, given.get("shift_labels") is None and "shift_labels" in kwargs)


def _check(given: Mapping[str, Any], ids: Any) -> None:
    for name in OTHER_KINDS:
        if given.get(name) is not None:
            raise ModelError(f"{_KEY}: {name} was given, and only text is split over ranks. Remove the key.")
    if isinstance(given.get("input_ids"), torch.Tensor) and ids.dim() != 2:
        raise ModelError(
            f"{_KEY}: input_ids is {tuple(ids.shape)}, not (rows, tokens): several sequences in a row (multiple choice) are "
            "not split over ranks. Remove the key."
        )
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2:
        raise ModelError(f"{_KEY}: the model was called without input_ids or inputs_embeds of whole rows.")
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape != ids.shape[:2]):
        found = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ModelError(
            f"{_KEY}: attention_mask is {found}, not one entry for each of the {tuple(ids.shape[:2])} tokens. Custom "
            "masks cannot be split over ranks; pass packed rows with position_ids instead."
        )
    positions = given.get("position_ids")
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != ids.shape[1]):
        raise ModelError(f"{_KEY}: position_ids is {tuple(positions.shape)}, not (1 or rows, {ids.shape[1]}).")
    if given.get("output_attentions"):
        raise ModelError(f"{_KEY}: output_attentions asks for attention over whole rows, which no rank has.")


def _filled(mask: torch.Tensor | None) -> tuple[bool, bool]:
    """Whether all tokens, and all first tokens, may be attended to. The host waits once."""
    if mask is None:
        return True, True
    every, first = host_read.on_host(torch.stack([mask.bool().all(), mask[:, :1].bool().all()])).tolist()
    return every, first


def _refuse_left(arguments: Arguments, *, is_given: bool) -> None:
    """`is_given`: whether the caller gave positions."""
    if arguments.chunked or (arguments.counts_mask and not is_given):
        raise ModelError(
            f"{_KEY}: rows are padded on the left, and this model counts from there. Pad on the right "
            '(tokenizer.padding_side = "right").'
        )


def _positions(
    arguments: Arguments,
    given: Mapping[str, Any],
    mask: torch.Tensor | None,
    sizes: tuple[int, int, int],
    documents_of: Callable[..., Any] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(1 or B, padded) positions and packed documents of whole rows; `sizes`: number of rows, length, padded length."""
    rows, length, padded = sizes
    ids, positions = given.get("input_ids"), given.get("position_ids")
    is_given, documents = positions is not None, None
    device = (given["inputs_embeds"] if ids is None else ids).device
    if positions is None and arguments.positions is not None and ids is not None:
        positions = arguments.positions(ids)
    if positions is None and arguments.counts_mask and mask is not None:
        positions = mask.long().cumsum(1) * mask.long() - 1  # OPT's: padding has a position of its own
    if positions is None:
        first = arguments.first_of_embeds if ids is None else 0
        positions = torch.arange(first, first + length, device=device)[None]
    if is_given and mask is None and documents_of is not None:
        documents = documents_of(positions.expand(rows, -1))
    if padded > length:
        # After packed documents one more document; otherwise clamped to the row, because learned positions may end there.
        tail = torch.arange(padded - length, device=device)[None].expand(positions.shape[0], -1)
        tail = positions[:, -1:].expand(-1, padded - length) if documents is None else tail
        positions = torch.cat([positions, tail], dim=1)
        if documents is not None:
            documents = torch.cat([documents, documents[:, -1:].expand(-1, padded - length) + 1], dim=1)
    return positions, documents


def _cut_labels(
    arguments: Arguments, kwargs: dict[str, object], own: torch.Tensor, shape: tuple[int, int], padded: int
) -> torch.Tensor | None:
    labels: Any = kwargs.get("labels")
    shifted: Any = kwargs.get("shift_labels")
    if labels is None and shifted is None:
        return None
    for name, value in (("labels", labels), ("shift_labels", shifted)):
        if value is not None and tuple(value.shape) != shape:
            raise ModelError(f"{_KEY}: {name} is {tuple(value.shape)}, not one for each of the {shape} tokens.")
    added = padded - shape[1]
    if shifted is None and arguments.shifts:  # HF's own shift inside its loss would shift within the part
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    targets = labels if shifted is None else shifted
    count = (targets != IGNORED).sum()
    mine = _padded(targets, added, IGNORED)[:, own]
    if labels is not None:
        kwargs["labels"] = _padded(labels, added, IGNORED)[:, own]
    if shifted is not None:
        kwargs["shift_labels"] = mine
    if kwargs.get("num_items_in_batch") is None and arguments.takes("num_items_in_batch"):
        kwargs["num_items_in_batch"] = count
    return (mine != IGNORED).sum() / count.clamp(min=1)


def _padded(x: torch.Tensor, added: int, value: float) -> torch.Tensor:
    """`x` with `added` more positions in its second dimension."""
    if not added:
        return x
    return torch.cat([x, x.new_full((x.shape[0], added, *x.shape[2:]), value)], dim=1)
