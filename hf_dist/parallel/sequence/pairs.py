"""An encoder and a decoder: each is cut by its own length, and the decoder's queries attend to the keys of the whole encoder.

Hooks of both tell which of the two forwards is running; masks and attention know the rest (`attention.py`). Biases by
relative position (T5) are computed for the whole row, and this rank's heads and rows of them are passed on.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.sequence.forward import SequenceAxes, current, enter, in_backward
from hf_dist.parallel.sequence.inputs import Arguments, Cut, cut_inputs

_KEY = "sequence_parallel_size"
_PART = Arguments(("input_ids", "attention_mask", "inputs_embeds", "labels"), takes_any=False, shifts=False)
_ENCODER = {"input_ids": "input_ids", "inputs_embeds": "inputs_embeds", "attention_mask": "attention_mask"}
_DECODER = {
    "decoder_input_ids": "input_ids",
    "decoder_inputs_embeds": "inputs_embeds",
    "decoder_attention_mask": "attention_mask",
    "labels": "labels",
}
_DecoderIds = Callable[[torch.Tensor], torch.Tensor]


def is_pair(model: nn.Module) -> bool:
    """Whether a model is a text encoder with a text decoder."""
    config: object = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def hold_pair(model: Any, axes: SequenceAxes) -> None:
    """Tell each forward whether it is in the encoder or the decoder. Local. Raises `ModelError` if it cannot be split."""
    name = type(model).__name__
    if getattr(model, "main_input_name", "") != "input_ids" or not hasattr(
        model, "prepare_decoder_input_ids_from_labels"
    ):
        raise ModelError(
            f"{_KEY}: {name} cannot be split over ranks: it has an encoder and a decoder, and is not known to "
            "make the decoder's ids of labels (prepare_decoder_input_ids_from_labels) from text. Remove the key."
        )
    if axes.layout.is_ring:
        raise ModelError(
            f"hf_dist.sequence_parallel: {name} attends from a decoder to an encoder of another length, which a ring cannot. "
            'Use "auto" instead.'
        )
    encoder, decoder = model.get_encoder(), model.get_decoder()
    encoder.register_forward_pre_hook(_enter_source)
    encoder.register_forward_hook(_leave_source, always_call=True)
    assert encoder is not decoder
    for module in model.modules():
        if hasattr(module, "compute_bias") and hasattr(module, "relative_attention_bias"):
            module.compute_bias = types.MethodType(_bias_of(type(module), weakref.ref(axes)), module)


def cut_pair(model: Any, given: Mapping[str, object], axes: SequenceAxes) -> Cut:
    """`given`: arguments of a forward on whole rows. Raises `ModelError` for arguments that cannot be cut. Local."""
    given = dict(given)
    labels = given.get("labels")
    if given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
        if labels is None:
            raise ModelError(
                f"{_KEY}: {type(model).__name__} was called without decoder_input_ids, and without labels."
            )
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    rest = {name: value for name, value in given.items() if name not in (*_ENCODER, *_DECODER)}
    other = [n for n, value in rest.items() if isinstance(value, torch.Tensor) and value.dim() > 1]
    if other:
        raise ModelError(f"{_KEY}: {other[0]} was given, and only text is split over ranks. Remove the key.")
    first = _half(given, _ENCODER, axes)
    second = _half(given, _DECODER, axes)
    kwargs = {**rest, **_named(first, _ENCODER), **_named(second, _DECODER), "use_cache": False}
    second.forward.source = first.forward
    return replace(second, kwargs=kwargs)


def _half(given: Mapping[str, object], names: Mapping[str, str], axes: SequenceAxes) -> Cut:
    return cut_inputs(
        _PART, {own: given[name] for name, own in names.items() if given.get(name) is not None}, axes, None
    )


def _named(cut: Cut, names: Mapping[str, str]) -> dict[str, object]:
    return {name: cut.kwargs[own] for name, own in names.items() if cut.kwargs.get(own) is not None}


def _enter_source(module: nn.Module, args: object) -> None:
    forward = current()
    if forward is not None and forward.source is not None:
        forward.source.target = weakref.ref(forward)
        enter(forward.source)


def _leave_source(module: nn.Module, args: object, output: object) -> None:
    forward = current()
    if forward is not None and forward.target is not None:
        enter(forward.target())


def _bias_of(cls: Any, axes_of: weakref.ref[SequenceAxes]) -> Any:
    own = cls.compute_bias

    def compute_bias(
        self: nn.Module, query_length: int, key_length: int, *args: object, **kwargs: object
    ) -> torch.Tensor:
        axes = axes_of()
        if axes is None or (current() is None and not in_backward()):
            whole: torch.Tensor = own(self, query_length, key_length, *args, **kwargs)
            return whole
        whole = own(self, query_length * axes.cp.size, key_length * axes.cp.size, *args, **kwargs)
        mine = whole.chunk(axes.ulysses.size, dim=1)[axes.ulysses.rank]
        return mine.chunk(axes.outer.size, dim=2)[axes.outer.rank]

    return compute_bias
