"""Layers that mix positions by other means than attention, and the heads or channels of them that a rank takes.

State space models, delta rules, linear attention and short convolutions work on each head or channel separately between their
projections. They are found by their attributes, not by class; `verify.py` checks that the results are the model's.
Sources: Mamba arXiv 2312.00752, Mamba 2 2405.21060, gated delta nets 2412.06464, Kimi's 2510.26692, RG-LRU 2402.19427,
lightning attention 2401.04658, as transformers 5 implements them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError

Index = torch.Tensor
"""(c,) int64: channels, rows or heads."""


@dataclass(frozen=True)
class Share:
    """What one rank takes of a layer, by the layer's own attribute names."""

    sends: dict[str, Index]
    """Projections of the layer's input: which of their outputs this rank needs, for all positions."""
    back: tuple[str, ...] = ()
    """Modules that read all channels of a position: their inputs are first returned to the ranks of the positions."""
    rows: dict[str, Index] = field(default_factory=dict)
    """Convolutions and products of which this rank computes only these rows."""
    slices: dict[str, tuple[int, Index]] = field(default_factory=dict)
    """Parameters and buffers: dimension, and entries."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Counts as the layer's code should see them."""
    local: tuple[str, ...] = ()
    """Projections of the layer's input that stay with their positions."""
    narrow: tuple[str, ...] = ()
    """Products over all channels with few outputs, which every rank needs for every position."""
    inside: dict[str, Share] = field(default_factory=dict)
    """Submodules that get a view of the same kind."""


def share_of(module: nn.Module, rank: int, ranks: int) -> Share | None:
    """What `rank` of `ranks` takes of `module`; None for another kind of module.

    Raises `ModelError` if the heads do not divide.
    """
    for kind in _KINDS:
        if all(hasattr(module, name) for name in kind.has):
            return kind.share(module, rank, ranks)
    return None


# ---- kinds


def _mamba2(m: Any, rank: int, ranks: int) -> Share:
    heads = _part(m, "num_heads", rank, ranks)
    groups = _groups(heads, m.num_heads, m.n_groups)
    inner, state = m.num_heads * m.head_dim, m.ssm_state_size
    grouped = m.n_groups * state

    def mixed(at: int) -> list[Index]:
        return [
            _units(heads, m.head_dim, at),
            _units(groups, state, at + inner),
            _units(groups, state, at + inner + grouped),
        ]

    projected = [_units(heads, m.head_dim), *mixed(inner), heads + 2 * (inner + grouped)]
    slices = {name: (0, heads) for name in ("A_log", "dt_bias", "D")}
    if hasattr(m, "mup_vector"):
        slices["mup_vector"] = (2, torch.cat(projected))
    return Share(
        {"in_proj": torch.cat(projected)},
        ("norm", "out_proj") if any(True for _ in m.norm.parameters()) else ("out_proj",),
        {"conv1d": torch.cat(mixed(0))},
        slices,
        {
            "num_heads": len(heads),
            "n_groups": len(groups),
            "intermediate_size": len(heads) * m.head_dim,
            "conv_dim": len(heads) * m.head_dim + 2 * len(groups) * state,
        },
    )


def _mamba(m: Any, rank: int, ranks: int) -> Share:
    own = _part(m, "intermediate_size", rank, ranks)
    return Share(
        {"in_proj": torch.cat([own, own + m.intermediate_size])},
        ("out_proj",),
        {"conv1d": own, "dt_proj": own},
        {"A_log": (0, own), "D": (0, own)},
        {"intermediate_size": len(own)},
        narrow=("x_proj",),
    )


def _mamba_of_heads(m: Any, rank: int, ranks: int) -> Share:
    heads = _part(m, "n_mamba_heads", rank, ranks)
    names = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
    return Share(
        {"in_proj": _units(heads, 2 * m.mamba_head_dim)},  # each channel next to its gate
        ("out_proj",),
        {"conv1d": _units(heads, m.mamba_head_dim)},
        {name: (0, heads) for name in names},
        {"n_mamba_heads": len(heads)},
    )


def _delta_net(m: Any, rank: int, ranks: int) -> Share:
    heads = _part(m, "num_v_heads", rank, ranks)
    keys = _groups(heads, m.num_v_heads, m.num_k_heads)
    dk, dv = m.head_k_dim, m.head_v_dim
    of_keys, of_values = _units(keys, dk), _units(heads, dv)
    mixed = torch.cat([of_keys, of_keys + m.key_dim, of_values + 2 * m.key_dim])
    if hasattr(m, "in_proj_qkvz"):
        sends = _fused_delta_net(m, keys, heads)
    elif hasattr(m, "in_proj_qkv"):
        sends = {"in_proj_qkv": mixed, "in_proj_z": of_values, "in_proj_b": heads, "in_proj_a": heads}
    else:
        sends = {"q_proj": of_keys, "k_proj": of_keys, "v_proj": of_values}
        sends |= {"a_proj": heads, "b_proj": heads, "g_proj": of_values}
    sizes = {"num_v_heads": len(heads), "num_k_heads": len(keys), "key_dim": len(keys) * dk}
    sizes |= {"value_dim": len(heads) * dv, "conv_dim": len(mixed)}
    back = "out_proj" if hasattr(m, "out_proj") else "o_proj"
    return Share(sends, (back,), {"conv1d": mixed}, {"A_log": (0, heads), "dt_bias": (0, heads)}, sizes)


def _fused_delta_net(m: Any, keys: Index, heads: Index) -> dict[str, Index]:
    """Qwen3-Next's projections: for each key head its query, key, values and gates, then the scalars."""
    dk, dv, ratio = m.head_k_dim, m.head_v_dim, m.num_v_heads // m.num_k_heads
    block = 2 * dk + 2 * ratio * dv
    wide, few = [], []
    for key, its in zip(keys.tolist(), heads.view(len(keys), -1), strict=True):
        values = _units(its - key * ratio, dv, key * block + 2 * dk)
        wide += [torch.arange(2 * dk) + key * block, values, values + ratio * dv]
        few += [its + key * ratio, its + key * ratio + ratio]
    return {"in_proj_qkvz": torch.cat(wide), "in_proj_ba": torch.cat(few)}


def _kimi_delta(m: Any, rank: int, ranks: int) -> Share:
    heads = _part(m, "num_heads", rank, ranks)
    own = _units(heads, m.head_dim)
    decay: Any = m.forget_gate.A_log
    gate = Share(
        {"f_b_proj": own},
        slices={"dt_bias": (0, own), "A_log": (list(decay.shape).index(m.num_heads), heads)},
        sizes={"num_heads": len(heads), "qkv_dim": len(own)},
        local=("f_a_proj",),
    )
    return Share(
        {"q_proj": own, "k_proj": own, "v_proj": own, "b_proj": heads, "g_b_proj": own},
        ("o_proj",),
        {"conv1d": torch.cat([own + i * m.qkv_dim for i in range(3)])},
        sizes={"num_heads": len(heads), "qkv_dim": len(own), "conv_dim": 3 * len(own)},
        local=("g_a_proj",),
        inside={"forget_gate": gate},
    )


def _lightning(m: Any, rank: int, ranks: int) -> Share:
    heads = _part(m, "num_attention_heads", rank, ranks)
    return Share(
        {"qkv_proj": _units(heads, 3 * m.head_dim)},
        ("norm",),
        slices={
            **{name: (0, heads) for name in ("slope_rate", "query_decay", "key_decay")},
            "diagonal_decay": (1, heads),
        },
        sizes={"num_attention_heads": len(heads)},
        local=("output_gate",),
    )


def _gated_recurrence(m: Any, rank: int, ranks: int) -> Share:
    unit: Any = m.rg_lru
    heads = _part(unit, "num_attention_heads", rank, ranks)
    own = _units(heads, unit.block_width)
    gates = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias")
    inner = Share(
        {},
        slices={"recurrent_param": (0, own), **{name: (0, heads) for name in gates}},
        sizes={"num_attention_heads": len(heads)},
    )
    return Share({"linear_x": own, "linear_y": own}, ("linear_out",), {"conv_1d": own}, inside={"rg_lru": inner})


def _short_convolution(m: Any, rank: int, ranks: int) -> Share | None:
    conv: object = m.conv
    if not isinstance(conv, nn.Conv1d) or conv.groups != conv.out_channels or m.in_proj.out_features != 3 * conv.groups:
        return None
    own = _part(conv, "out_channels", rank, ranks)
    return Share({"in_proj": torch.cat([own + i * conv.out_channels for i in range(3)])}, ("out_proj",), {"conv": own})


@dataclass(frozen=True)
class _Kind:
    share: Callable[[object, int, int], Share | None]
    has: tuple[str, ...]


_KINDS = (
    _Kind(_mamba2, ("in_proj", "conv1d", "A_log", "dt_bias", "n_groups", "ssm_state_size", "num_heads")),
    _Kind(_mamba, ("in_proj", "conv1d", "A_log", "x_proj", "dt_proj", "time_step_rank")),
    _Kind(_mamba_of_heads, ("in_proj", "conv1d", "A_log", "x_proj_weight", "n_mamba_heads")),
    _Kind(_delta_net, ("conv1d", "A_log", "dt_bias", "num_v_heads", "num_k_heads", "key_dim")),
    _Kind(_kimi_delta, ("conv1d", "forget_gate", "qkv_dim", "g_b_proj")),
    _Kind(_lightning, ("qkv_proj", "slope_rate", "diagonal_decay", "output_gate")),
    _Kind(_gated_recurrence, ("linear_x", "linear_y", "linear_out", "conv_1d", "rg_lru")),
    _Kind(_short_convolution, ("in_proj", "conv", "out_proj", "conv_kernel_size")),
)


# ---- indices


def _part(module: object, name: str, rank: int, ranks: int) -> Index:
    """The equal part of heads or channels for `rank`."""
    count = int(getattr(module, name))
    if count % ranks:
        raise ModelError(
            f"sequence_parallel_size: {ranks} ranks cannot share the {count} heads or channels ({name}) of "
            f"{type(module).__name__}, which mixes positions by them. Use a divisor of {count}."
        )
    return torch.arange(count).chunk(ranks)[rank]


def _groups(heads: Index, all_heads: int, all_groups: int) -> Index:
    """The groups (or key heads) that `heads` share evenly, in order; one for each head if they do not share evenly."""
    of_each = heads * all_groups // all_heads
    distinct, counts = torch.unique_consecutive(of_each, return_counts=True)
    return distinct if len(set(counts.tolist())) == 1 else of_each


def _units(numbers: Index, width: int, at: int = 0) -> Index:
    """The elements of units of width `width`, starting at `at`."""
    return (numbers[:, None] * width + torch.arange(width) + at).flatten()
