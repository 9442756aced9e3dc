"""A tiny random copy of a Hugging Face model, from the names of its config's fields.

Choices of the config stay: biases, norms of queries and keys, kinds of layers, tied embeddings. Sizes shrink, and divide
over the ranks like the model's: as many heads of keys and values, or fewer than ranks.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

VOCAB = 128
LAYERS = 4
IMAGE = 64

FIXED: list[tuple[str, Any]] = [
    (r"(.*_)?dropout(_.*)?|.*_pdrop|.*drop_rate|.*drop_path.*|layer_?drop|.*_layerdrop|.*dropout_prob", 0.0),
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"(num_)?(hidden_|encoder_|decoder_|n_)?layers?|n_layers?|num_(hidden|encoder|decoder)_layers", LAYERS),
    (r"depth|num_blocks", LAYERS),
    (r"(num_|n_)?(attention_|query_)?heads?|(encoder|decoder)_attention_heads|num_attention_heads|n_head", 4),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|num_key_value_groups", 2),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|embedding_size|word_embed_proj_dim|emb_dim|pooler_hidden_size", 32),
    (
        r"intermediate_size|ffn_dim|d_ff|n_inner|(encoder|decoder)_ffn_dim|ffn_hidden_size|hidden_dim|d_inner|mlp_dim",
        64,
    ),
    (r"(moe|shared_expert|expert)_?.*intermediate_size|moe_ffn_hidden_size", 24),
    (r"head_dim|d_kv|attention_head_size|v_head_dim|qk_(rope|nope)_head_dim|kv_channels|d_head|attention_head_dim", 8),
    (r"global_head_dim|linear_((key|value)_)?head_dim|mamba_d_head|mamba_head_dim", 8),
    (r"linear_num_((key|value)_)?heads|mamba_n_heads|mamba_num_heads", 8),
    (r"q_lora_rank|kv_lora_rank", 16),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_top_?k|experts_per_token|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_groups", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_source_positions|max_target_positions|max_seq_len|seq_length", 64),
    (r"sliding_window|attention_window|local_attention|window_size", 8),
    (r"image_size", IMAGE),
    (r"patch_size", 16),
    (r"bos_token_id|cls_token_id", 1),
    (r"eos_token_id|sep_token_id", 2),
    (r"pad_token_id", 0),
    (r"decoder_start_token_id", 2),
    (r"forced_(bos|eos)_token_id", 2),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r"mamba_expand|expand", 2),
    (r"mamba_d_ssm", 64),
    (r"use_cache", False),
    (r"output_router_logits", True),
    (r"index_topk", 4),
    (r"(router|input)_jitter_noise", 0.0),
    (r"mask_(time|feature)_prob", 0.0),
    (r"rotary_dim", 4),
    (r"index_n_heads", 2),
    (r"index_head_dim", 16),
]
VARIANTS: list[dict[str, object]] = [
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4, "n_kv_heads": 4},
    {"+head_dim": 8},
    {"+head_dim": 8, "num_key_value_heads": 4},
    {"+head_dim": 8, "head_dim": 8, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    {"+layer_types": ["full_attention"] * LAYERS},
    {"+layer_types": ["full_attention"] * LAYERS, "+num_key_value_heads": 2, "+num_attention_heads": 4},
    {"+num_key_value_heads": 2, "+head_dim": 8},
    {"+decoder_start_token_id": 0},
    {"+is_decoder": True},
    {"+rotary_dim": 4},
    {"+attention_types": [[["global", "local"], 2]], "num_hidden_layers": LAYERS, "num_layers": LAYERS},
    {"+default_language": "en_XX", "+languages": ["en_XX"]},
    {"hidden_size": 64, "n_embd": 64, "d_model": 64, "embed_dim": 64},
    {"head_dim": 16, "num_key_value_heads": 4},
    {"head_dim": ...},
    {"num_experts": ..., "num_local_experts": ..., "n_routed_experts": ..., "moe_num_experts": ...},
    {"mamba_n_heads": ..., "mamba_num_heads": ..., "mamba_d_head": ..., "mamba_head_dim": ..., "num_heads": 8,
     "head_dim": 8},
    {"num_hidden_layers": 6},
    {"num_hidden_layers": ..., "num_layers": ...},
    {"hidden_size": ..., "embed_dim": ..., "hidden_sizes": ..., "embed_dims": ..., "dim": ..., "d_model": ...},
    {"patch_size": ...},
    {"image_size": ..., "patch_size": ...},
    {"depths": ..., "hidden_sizes": ..., "embed_dims": ..., "num_attention_heads": ..., "num_heads": ...},
]  # fmt: skip
"""Changes to try in turn: `...` leaves a field at its default, `+` sets one that has no rule."""
SCALED = r"conv_dim|hidden_sizes|embed_dims?|embedding_dims|out_channels|dims|hidden_channels|encoder_hidden_sizes"
MAX_NUMEL = 30_000_000


def tiny_fields(config: object) -> dict[str, object]:
    """Config overrides that make it tiny; nested configs as dicts."""
    fields: dict[str, object] = {}
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            fields[name] = tiny_fields(value)
            continue
        for pattern, tiny in FIXED:
            if re.fullmatch(pattern, name):
                simple = isinstance(value, bool) == isinstance(tiny, bool) and isinstance(
                    value, int | float | type(None)
                )
                if simple and (value is not None or "token_id" in name):
                    fields[name] = type(value)(tiny) if isinstance(value, int | float) else tiny
                break
        if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            if re.search("depth|layers|num_blocks", name):
                fields[name] = type(value)(2 for _ in value)
            elif name == "image_size":
                fields[name] = type(value)(IMAGE for _ in value)
            elif re.fullmatch(SCALED, name) and min(value) > 8:
                fields[name] = type(value)(max(8, v * 16 // min(value) // 8 * 8) for v in value)
    return fields


def varied(fields: Mapping[str, object], variant: Mapping[str, object], top: bool = True) -> dict[str, object]:
    """`fields` with the changes of one of `VARIANTS`."""
    result = {k: varied(v, variant, False) if isinstance(v, dict) else v for k, v in fields.items()}
    known = {k: v for k, v in variant.items() if k in fields or (top and k.startswith("+"))}
    result.update({k.removeprefix("+"): v for k, v in known.items()})
    return {k: v for k, v in result.items() if v is not ...}


def tiny_model(model_class: Any, config: object) -> nn.Module:
    """A random fp32 model in training mode, equal on every call. Raises `ValueError` if it is not tiny."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if numel > MAX_NUMEL:
        raise ValueError("still too large after shrinking the fields it knows")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model: nn.Module = model_class(copy.deepcopy(config))
        with torch.no_grad():
            for p in model.parameters():
                if not p.any() and p.is_floating_point():
                    p.normal_(std=0.02)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0  # some classes drop by a rate that is no field of their config
    return model.float().train()


def tiny_copies(model: nn.Module, size: int) -> Iterator[Callable[[], nn.Module]]:
    """Functions that build a tiny copy of `model` (without adapters). Take the next one if a copy does not build or run.

    Sizes divide over `size` ranks like the model's.
    """
    config: object = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return
    fields = _like(config, tiny_fields(config), size)
    for variant in VARIANTS:
        yield functools.partial(_built, model, config, varied(fields, variant))
    yield functools.partial(_built, model, config, {})  # it may already be tiny


def _built(model: nn.Module, config: Any, fields: dict[str, object]) -> nn.Module:
    given = _merged(config.to_dict(), fields)
    for key in ("dtype", "torch_dtype", "quantization_config", "architectures"):
        given.pop(key, None)
    copied = tiny_model(type(model), type(config)(**given))
    choose = getattr(copied, "set_experts_implementation", None)
    if choose is not None and any("experts" in name for name, _ in copied.named_modules()):
        choose("eager")  # grouped products do not accept tiny slices
    return copied


def _merged(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, object]:
    result = dict(given)
    for key, value in fields.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result


_HEADS = re.compile(FIXED[4][0])
_KV_HEADS = re.compile(FIXED[5][0])
_DIM_OF_HEAD = 8


def _like(config: object, fields: dict[str, object], size: int) -> dict[str, object]:
    """`fields` with head counts that divide like those of `config`, and layer lists cut to the tiny number of layers."""
    result: dict[str, object] = {}
    heads = math.lcm(4, size)
    for name, value in fields.items():
        nested = vars(config).get(name)  # configs whose layers differ may refuse attributes
        if isinstance(value, dict):
            result[name] = _like(nested, value, size)
        elif _KV_HEADS.fullmatch(name) and isinstance(nested, int) and name != "num_key_value_groups":
            all_heads = next((vars(config).get(n) for n in fields if _HEADS.fullmatch(n)), nested)
            shared = nested if size % nested == 0 else size
            result[name] = heads if nested == all_heads else max(shared, 2) if nested % size == 0 else shared
        elif _HEADS.fullmatch(name) and value == 4:
            result[name] = heads
        elif value == 32 and heads > 4:  # head widths x 8
            result[name] = heads * _DIM_OF_HEAD
        elif value == 24:
            result[name] = 12 * size  # experts
        elif value == 64 and re.fullmatch(FIXED[7][0], name):
            result[name] = 16 * math.lcm(4, size)
        else:
            result[name] = value
    return {**result, **_layers(config, fields)}


def _layers(config: object, fields: Mapping[str, object]) -> dict[str, object]:
    """Lists with one entry per layer, cut to a few layers that cover every combination of entries."""
    count = vars(config).get("num_hidden_layers")
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count and not name.startswith("_")
    }
    if not lists or "num_hidden_layers" not in fields or not isinstance(count, int):
        return {}
    rows = [repr([value[i] for value in lists.values()]) for i in range(count)]
    first = sorted({row: i for i, row in reversed(list(enumerate(rows)))}.values())
    chosen = sorted(first + [i for i in range(count) if i not in first][: max(0, LAYERS - len(first))])
    return {"num_hidden_layers": len(chosen), **{name: [value[i] for i in chosen] for name, value in lists.items()}}
