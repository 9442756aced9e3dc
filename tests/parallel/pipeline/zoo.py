"""Tiny random models of the families a pipeline must split, and microbatches of different shapes for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 101
SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48)
CAUSAL: dict[str, Any] = dict(SMALL, vocab_size=VOCAB, use_cache=False, pad_token_id=0, num_key_value_heads=2)
NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MOE: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, output_router_logits=True)

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": CAUSAL,
    "Qwen2": CAUSAL,
    "Qwen3": dict(CAUSAL, head_dim=8),
    "Qwen3Moe": dict(CAUSAL, head_dim=8, decoder_sparse_step=1, **MOE),
    "Mistral": dict(CAUSAL, sliding_window=4),
    "Mixtral": dict(CAUSAL, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "Gemma2": dict(CAUSAL, head_dim=8, sliding_window=4),
    "Gemma3": dict(CAUSAL, head_dim=8, sliding_window=4, sliding_window_pattern=2),
    "Phi3": CAUSAL,
    "GPT2": dict(
        n_embd=32, n_layer=4, n_head=4, vocab_size=VOCAB, n_positions=32, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "GPTNeoX": dict(SMALL, vocab_size=VOCAB, use_cache=False, max_position_embeddings=32),
    "OPT": dict(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_dim=48, vocab_size=VOCAB, max_position_embeddings=32,
        word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0, use_cache=False,
    ),
    "Bloom": dict(hidden_size=32, n_layer=4, n_head=4, vocab_size=VOCAB, use_cache=False),
    "Falcon": dict(SMALL, vocab_size=VOCAB, use_cache=False, new_decoder_architecture=False),
    "SmolLM3": dict(CAUSAL, no_rope_layer_interval=2),
    "DeepseekV3": dict(
        CAUSAL, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
    ) | {"num_key_value_heads": 4},
    "GptOss": dict(CAUSAL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, output_router_logits=True),
    "Bert": dict(SMALL, vocab_size=VOCAB, max_position_embeddings=32, **NO_DROPOUT),
    "Roberta": dict(SMALL, vocab_size=VOCAB, max_position_embeddings=40, pad_token_id=0, **NO_DROPOUT),
    "ModernBert": dict(
        SMALL, vocab_size=VOCAB, max_position_embeddings=32, local_attention=4, pad_token_id=0, cls_token_id=1,
        sep_token_id=2, bos_token_id=1, eos_token_id=2, reference_compile=False,
    ),
    "DebertaV2": dict(
        SMALL, vocab_size=VOCAB, max_position_embeddings=32, relative_attention=True, position_buckets=4,
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], pooler_hidden_size=32, pooler_dropout=0.0,
        **NO_DROPOUT,
    ),
    "ViT": dict(SMALL, image_size=8, patch_size=4, num_labels=7, **NO_DROPOUT),
    "T5": dict(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    ),
    "Bart": dict(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCAB, dropout=0.0, max_position_embeddings=32, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    ),
}  # fmt: skip
CLASSIFIERS = ("Bert", "Roberta", "ModernBert", "DebertaV2")
SEQ2SEQ = ("T5", "Bart")
TIED_ALWAYS = ("GPT2", "T5", "Bart")
CLASSES = {"GPT2": "GPT2LMHeadModel", "ViT": "ViTForImageClassification"}


def make_model(
    family: str, tied: bool = False, checkpointing: bool = False, head: str = "", **changes: Any
) -> nn.Module:
    """The same weights on every call and every rank; no dropout; in training mode. `changes`: of the configuration."""
    import transformers as tf

    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    kind = head or (
        "SequenceClassification"
        if family in CLASSIFIERS
        else "ConditionalGeneration"
        if family in SEQ2SEQ
        else "CausalLM"
    )
    fields = {**CONFIGS[family], **changes}
    if kind == "CausalLM" and family not in TIED_ALWAYS:
        fields["tie_word_embeddings"] = tied
    torch.manual_seed(0)
    config = getattr(tf, config_class)(**fields)
    model = getattr(tf, CLASSES.get(family, f"{family}For{kind}"))(config)
    # A relative comparison needs weights that are not zero; attention key biases start at zero and their gradient is zero.
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def make_microbatches(family: str, count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of 2 and 3 rows and of different lengths, ragged, with masked labels."""
    g = torch.Generator().manual_seed(3)
    batches = []
    for i in range(count):
        rows, length = 2 + i % 2, 7 + 2 * (i % 3)
        if family == "ViT":
            images = torch.randn(rows, 3, 8, 8, generator=g)
            batches.append({"pixel_values": images, "labels": torch.randint(0, 7, (rows,), generator=g)})
            continue
        ids = torch.randint(3, VOCAB, (rows, length), generator=g)
        mask = (torch.arange(length)[None] < torch.randint(4, length + 1, (rows, 1), generator=g)).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask}
        if family in CLASSIFIERS:
            batches.append(batch | {"labels": torch.randint(0, 2, (rows,), generator=g)})
            continue
        labels = torch.where(torch.rand(rows, length, generator=g) < 0.25, -100, ids).masked_fill(mask == 0, -100)
        labels[:, 1] = ids[:, 1]
        batches.append(batch | {"labels": labels[:, :5].contiguous() if family in SEQ2SEQ else labels})
    return batches
