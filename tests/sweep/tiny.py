"""Tiny configs and batches for any class of the HF mappings, by the names of the config's fields."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

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
    (r"use_cache", False),
    (r"output_router_logits", True),
    (r"index_topk", 4),
    (r"(router|input)_jitter_noise", 0.0),
    (r"rotary_dim", 4),
    (r"index_n_heads", 2),
    (r"index_head_dim", 16),
]
VARIANTS: list[dict[str, Any]] = [
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
"""Changes to try, one after the other: `...` leaves a field as it is by default, `+` sets one that has no rule."""
SCALED = r"hidden_sizes|embed_dims?|embedding_dims|out_channels|dims|hidden_channels|encoder_hidden_sizes"


def tiny_fields(config: Any) -> dict[str, Any]:
    """Overrides for a default config that make it tiny; nested configs as dicts."""
    fields: dict[str, Any] = {}
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
            elif re.fullmatch(SCALED, name) and min(value) > 8:
                fields[name] = type(value)(max(8, v * 16 // min(value) // 8 * 8) for v in value)
    return fields


def builders(model_class: Any) -> Iterator[Callable[[], nn.Module]]:
    """Functions that build the same tiny random model on every call; the next one when a model does not build or run."""
    fields = tiny_fields(model_class.config_class())
    for variant in VARIANTS:
        yield functools.partial(tiny_model, model_class, _vary(fields, variant, True))
    yield functools.partial(tiny_model, model_class, {k: v for k, v in fields.items() if not isinstance(v, dict)})


def _vary(fields: dict[str, Any], variant: dict[str, Any], top: bool) -> dict[str, Any]:
    varied = {k: _vary(v, variant, False) if isinstance(v, dict) else v for k, v in fields.items()}
    known = {k: v for k, v in variant.items() if k in fields or (top and k.startswith("+"))}
    varied.update({k.removeprefix("+"): v for k, v in known.items()})
    return {k: v for k, v in varied.items() if v is not ...}


def tiny_model(model_class: Any, fields: dict[str, Any]) -> nn.Module:
    """A random fp32 model in training mode; attributes that the config refuses as arguments are left out."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in model_class(model_class.config_class(**fields)).parameters())
    if numel > 30_000_000:
        raise ValueError("still too large after shrinking the fields it knows")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields))
    with torch.no_grad():
        for p in model.parameters():
            if not p.any() and p.is_floating_point():
                p.normal_(std=0.02)
    return model.float().train()


def tiny_batches(task: str, model: Any) -> list[dict[str, torch.Tensor]]:
    """Two microbatches of different shapes (of equal ones for images)."""
    g = torch.Generator().manual_seed(3)
    config, batches = model.config, []
    for rows, length in ((2, 12), (2, 10)):
        if task == "image":
            vision = getattr(config, "vision_config", config)
            size = getattr(vision, "image_size", None) or IMAGE
            size = tuple(size) if isinstance(size, list | tuple) else (size, size)
            images = torch.randn(rows, getattr(vision, "num_channels", 3), *size, generator=g)
            batches.append({"pixel_values": images, "labels": torch.randint(0, 2, (rows,), generator=g)})
            continue
        ids = torch.randint(
            4, min(VOCAB, getattr(config, "vocab_size", VOCAB) or VOCAB) - 8, (rows, length), generator=g
        )
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, length - 3 :] = 0
        pad = getattr(config, "pad_token_id", None) or 0
        batch = {"input_ids": torch.where(mask == 0, pad, ids), "attention_mask": mask}
        if task == "classification":
            eos = getattr(config, "eos_token_id", None)
            if isinstance(eos, int) and eos < VOCAB:  # encoder-decoders classify at the end of the sentence
                batch["input_ids"][torch.arange(rows), mask.sum(1) - 1] = eos
            batch["labels"] = torch.randint(0, 2, (rows,), generator=g)
        else:
            batch["labels"] = ids.masked_fill(mask == 0, -100)
        batches.append(batch)
    return batches
