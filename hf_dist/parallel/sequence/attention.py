"""HF's attention on a split sequence: a mask function and an attention function under hf_dist's own name.

HF makes masks and calls attention by the name in the model's config. Under `hf_dist_sdpa` (or eager, ...) it passes the rule
of the mask to hf_dist's mask function, which makes the mask of the whole sequence with HF's own function of the kernel
`sdpa`. So windows, chunks, sinks, soft-capping, padding and packing are as the model means them. Outside of a split forward
(generation) both functions are HF's. The model's code is untouched. Interfaces: transformers 5, `AttentionInterface`,
`AttentionMaskInterface`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers import masking_utils as hf_masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_dist.errors import ModelError
from hf_dist.parallel.sequence.exchange import gather_keys, to_heads, to_positions
from hf_dist.parallel.sequence.forward import SequenceMask, SplitForward, current, is_silent
from hf_dist.parallel.sequence.ring import ring_attention
from hf_dist.tensors import host_read

PREFIX = "hf_dist_"


_packing: tuple[torch.Tensor, list[bool]] | None = None


@contextmanager
def packing_seen(start: int, device: torch.device) -> Iterator[list[bool]]:
    """Inside, each mask of whole rows records whether it hides from position `start` the one before it (another document).

    `device`: that of the batch, which a rule may index by rows (Llama 4's chunks).
    """
    global _packing
    found: list[bool] = []
    _packing = (torch.full((1, 1, 1, 1), start, dtype=torch.long, device=device), found)
    try:
        yield found
    finally:
        _packing = None


def register(kernel: str) -> str:
    """Register both functions around HF's `kernel` ("sdpa", "eager", "flash_attention_2", ...). Returns their name."""
    name = PREFIX + kernel
    AttentionInterface.register(name, partial(_attend, kernel))
    hf_masks.AttentionMaskInterface.register(name, partial(_mask, kernel))
    return name


def documents_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """(B, S) numbers of packed documents, as HF derives them from the positions; None if each row is one document."""
    return hf_masks.find_packed_sequence_indices(position_ids)


# ---- masks


def _mask(
    kernel: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = hf_masks.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> object:
    make = hf_masks.ALL_MASK_ATTENTION_FUNCTIONS[kernel]
    forward = current()
    if forward is None:
        if _packing is not None:
            start, zero = _packing[0], torch.zeros_like(_packing[0])
            _packing[1].append(not bool(mask_function(zero, zero, start, start - 1).any()))
        return make(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            **kwargs,
        )
    if use_vmap:
        raise ModelError(
            "sequence_parallel_size: the model adds a mask function of its own to HF's (images, blocks of tokens?), which "
            "knows the part of the sequence only. Remove the key."
        )
    kwargs.pop("q_offset", None)
    device = forward.position_ids.device
    is_cross = forward.source is not None and mask_function is hf_masks.bidirectional_mask_function
    keys = forward.source if forward.source is not None and is_cross else forward
    rule, whole = mask_function, keys.attention_mask
    if forward.documents is not None:
        ids = forward.position_ids.expand(batch_size, -1)
        rule = _of_documents(rule, ids, forward.documents)
        kwargs["allow_is_causal_skip"] = False
    if whole is not None:  # it hides something: HF need not ask the device
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    elif _reaches_padding(rule, keys, device):
        whole = (torch.arange(keys.length, device=device) < keys.real_length).expand(batch_size, -1)
    seen = rule if whole is None else hf_masks.and_masks(rule, hf_masks.padding_mask_function(whole))
    made = partial(
        _without_added,
        make,
        keys.real_length,
        batch_size=batch_size,
        kv_length=keys.length,
        mask_function=rule,
        attention_mask=whole,
        **kwargs,
    )
    is_causal = seen is hf_masks.causal_mask_function
    return SequenceMask(forward, seen, made, is_causal=is_causal, is_cross=is_cross)


def _of_documents(rule: Callable[..., Any], positions: torch.Tensor, documents: torch.Tensor) -> Callable[..., Any]:
    """`rule` inside documents, as HF's masks of whole rows have it: by positions in a document (transformers 5.23), or by
    places in the row (5.17)."""
    made = getattr(hf_masks, "packed_sequence_compatibility_function", None)
    if made is not None:
        return cast(Callable[..., Any], made(rule, positions, documents))
    return hf_masks.and_masks(rule, hf_masks.packed_sequence_mask_function(documents))


def _without_added(make: Callable[..., object], real_length: int, *, q_length: int, **kwargs: object) -> object:
    """A mask in which no query sees the keys added to make the length divide.

    A mask that is added to the scores hides with a large number: a query without keys (the last padding before a row that is
    padded on the left, which predicts the first token) attends to all keys of one process alike, so it must not know of more.
    """
    if q_length == 1:  # HF takes a single query for the last one, which sees every key, and makes no mask
        kwargs["allow_is_causal_skip"] = False
    mask = make(q_length=q_length, **kwargs)
    if isinstance(mask, torch.Tensor) and mask.is_floating_point() and mask.shape[-1] > real_length:
        mask = mask.clone()
        mask[..., real_length:] = -torch.inf
    return mask


def _reaches_padding(rule: Callable[..., Any], forward: SplitForward, device: torch.device) -> bool:
    """Whether a token may attend to those added to make the length divide."""
    if forward.length == forward.real_length or rule is hf_masks.causal_mask_function:
        return False
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    query = torch.arange(forward.real_length, device=device)[None, None, :, None]
    key = torch.arange(forward.real_length, forward.length, device=device)[None, None, None, :]
    return bool(host_read.on_host(rule(zero, zero, query, key).any()))


# ---- attention


def _attend(
    kernel: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """HF's attention function. (B, H, s, D) each -> ((B, s, H, D'), None)."""
    function = _kernel_function(kernel, module)
    if not isinstance(attention_mask, SequenceMask):
        if current() is not None:
            raise ModelError(
                f"sequence_parallel_size: {type(module).__name__} attends without a mask of HF's making, so what its tokens "
                "may see of the other ranks' is not known. Remove the key."
            )
        if is_silent():
            return value.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None
        view = _AsSeen(module, kernel, getattr(module, "num_key_value_groups", 1), slice(None))
        return function(view, query, key, value, attention_mask, **kwargs)
    forward = attention_mask.forward
    forward.num_calls += 1
    if attention_mask.is_cross:  # T5 makes zeros for this rank's part of both
        kwargs = {name: value for name, value in kwargs.items() if name != "position_bias"}
    axes = forward.axes
    query = _retuned(module, query, forward)
    n, heads = axes.ulysses.size, query.shape[1]
    if heads % n:
        raise ModelError(
            f"sequence_parallel_size: {type(module).__name__} has {heads} heads, which {n} ranks cannot share. Use a divisor "
            f'of {heads}, or "hf_dist": {{"sequence_parallel": "gather"}}.'
        )
    key, value = (_copied(x, heads, n) for x in (key, value))
    query, key, value = to_heads(axes.ulysses, query, key, value)
    mine = slice(axes.ulysses.rank * query.shape[1], (axes.ulysses.rank + 1) * query.shape[1])
    if axes.layout.is_ring:
        out = _round(module, query, key, value, attention_mask, kwargs)
    else:
        mask = attention_mask.whole()
        if axes.outer.size > 1:
            key, value = gather_keys(axes.outer, key), gather_keys(axes.outer, value)
            mask = attention_mask.rows(axes.outer.rank * query.shape[2], query.shape[2])
            if "flash" in kernel:
                key, value, mask = _up_to_mine(module, query, (key, value, mask), forward, kwargs)
        view = _AsSeen(module, kernel, query.shape[1] // key.shape[1], mine)
        out, _ = function(view, query, key, value, mask, **_of_the_whole(forward, kwargs, mine))
        out = out.transpose(1, 2)
    return to_positions(axes.ulysses, out).transpose(1, 2).contiguous(), None


def _up_to_mine(
    module: object, query: torch.Tensor, seen: tuple[Any, Any, Any], forward: SplitForward, kwargs: Mapping[str, object]
) -> tuple[Any, Any, object]:
    """Keys, values and padding mask up to what this rank's queries see, because flash attention assumes that the last query and
    the last key have the same position."""
    if forward.documents is not None:
        raise ModelError(
            f"hf_dist.sequence_parallel: {type(module).__name__} attends by flash attention to packed rows, which "
            'gathered keys cannot. Use "ulysses" with a divisor of the heads, or attn_implementation="sdpa".'
        )
    is_causal = kwargs.get("is_causal")
    key, value, mask = seen
    end = (forward.axes.outer.rank + 1) * query.shape[2]
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        # The order of keys does not matter there, but HF takes the padding of queries from the end of the mask.
        return seen if mask is None else (key.roll(-end, 2), value.roll(-end, 2), mask.roll(-end, 1))
    return key[:, :, :end], value[:, :, :end], mask if mask is None else mask[:, :end]


def _retuned(module: Any, query: torch.Tensor, forward: SplitForward) -> torch.Tensor:
    """Scale the queries by the position in the whole row. Llama 4 scales those of layers without positions by the logarithm of
    a position counted from the first token it sees. Source: arXiv 2501.19399, transformers `Llama4TextAttention`."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def scale(positions: torch.Tensor) -> torch.Tensor:
        steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    seen = torch.arange(query.shape[2], device=query.device)
    return (query * (scale(forward.own) / scale(seen)).view(1, 1, -1, 1)).to(query.dtype)


def _copied(x: torch.Tensor, heads: int, ranks: int) -> torch.Tensor:
    """Keys or values with each head copied until `ranks` can share them. Autograd sums the gradients of the copies."""
    own = x.shape[1]
    if own % ranks == 0:
        return x
    return x.repeat_interleave(ranks // own if ranks % own == 0 else heads // own, dim=1)


def _of_the_whole(forward: SplitForward, kwargs: Mapping[str, Any], heads: slice) -> dict[str, object]:
    """Keyword arguments of HF's function for these heads of the whole sequence."""
    changed = dict(kwargs)
    if changed.get("position_ids") is not None:
        changed["position_ids"] = forward.position_ids
    if changed.get("s_aux") is not None:
        changed["s_aux"] = changed["s_aux"][heads]
    return changed


def _round(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    for name in ("softcap", "s_aux", "cu_seq_lens_q", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(
                f"hf_dist.sequence_parallel: {type(module).__name__} attends with {name}, which a ring cannot. "
                'Use "auto" instead.'
            )
    if kwargs.get("dropout"):
        raise ModelError(
            "hf_dist.sequence_parallel: a ring has no dropout of attention. Set attention_dropout of the model's config to 0, "
            'or use "auto" instead.'
        )
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return ring_attention(query, key, value, mask, scale)


def _kernel_function(kernel: str, module: nn.Module) -> Callable[..., Any]:
    if kernel == "eager":  # the one in the model's own file
        found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if found is None:
            raise ModelError(
                f"sequence_parallel_size: {type(module).__module__} has no eager_attention_forward. Load the model with "
                'attn_implementation="sdpa".'
            )
        return found
    return ALL_ATTENTION_FUNCTIONS[kernel]


class _AsSeen:
    """An attention module as HF's kernels see it: with this rank's heads, and the kernel's own name in the config."""

    def __init__(self, module: nn.Module, kernel: str, groups: int, heads: slice) -> None:
        own: dict[str, object] = {"_module": module, "num_key_value_groups": groups}
        if hasattr(module, "config"):
            own["config"] = _Named(module.config, kernel)
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            own["sinks"] = module.sinks[heads]  # type: ignore[index]
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_module"], name)


class _Named:
    """A config that names another attention implementation."""

    def __init__(self, config: object, kernel: str) -> None:
        self.__dict__.update(_config=config, _attn_implementation=kernel)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_config"], name)
