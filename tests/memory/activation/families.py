"""Tiny language models whose heads and losses differ, and ragged batches for them."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 211
LENGTH = 24
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
FAMILIES = (
    *("llama", "qwen2", "gemma2", "gpt2", "mixtral", "opt", "phi3", "granite", "cohere", "t5", "bert", "bloom"),
)


def make_model(family: str, **changes: Any) -> Any:
    """The same fp32 weights on every call, in training mode, without dropout unless `changes` ask for it."""
    import transformers as tf

    torch.manual_seed(0)
    model: Any
    if family == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, **changes}))
    elif family == "qwen2":
        model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, **changes))
    elif family == "gemma2":
        model = tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0, **changes))
    elif family == "gpt2":
        off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        sizes = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64)
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**{**sizes, **off, **changes}))
    elif family == "mixtral":
        routed = dict(num_local_experts=4, output_router_logits=True, experts_implementation="eager")
        model = tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, **routed, **changes))
    elif family == "opt":
        sizes = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
        model = tf.OPTForCausalLM(tf.OPTConfig(**sizes, ffn_dim=56, word_embed_proj_dim=32, dropout=0.0, **changes))
    elif family == "phi3":
        model = tf.Phi3ForCausalLM(tf.Phi3Config(**SIZES, **changes))
    elif family == "granite":
        model = tf.GraniteForCausalLM(tf.GraniteConfig(**SIZES, logits_scaling=4.0, **changes))
    elif family == "cohere":
        model = tf.CohereForCausalLM(tf.CohereConfig(**SIZES, logit_scale=0.25, **changes))
    elif family == "bloom":
        off = dict(hidden_dropout=0.0, attention_dropout=0.0)
        model = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **off))
    elif family == "t5":
        model = tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
                        decoder_start_token_id=0)
        )  # fmt: skip
    elif family == "bert":
        sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
        model = tf.BertForMaskedLM(
            tf.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)
        )
    else:
        raise ValueError(family)
    return model.train()


def make_batch(rows: int = 6, seed: int = 1, labelled: bool = True) -> dict[str, torch.Tensor]:
    """Rows of different lengths; a quarter of the labels is -100, or all of them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=g)
    mask = (torch.arange(LENGTH)[None] < torch.randint(4, LENGTH + 1, (rows, 1), generator=g)).long()
    labels = ids.masked_fill((mask == 0) | (torch.rand(rows, LENGTH, generator=g) < 0.25), -100)
    if not labelled:
        labels = torch.full_like(labels, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
