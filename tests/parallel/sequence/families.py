"""Small models of many kinds of attention, for one process and for ranks that share their sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, HIDDEN = 97, 32


def _base(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _longrope() -> dict[str, Any]:
    factors = [1.0 + 0.1 * i for i in range(4)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [2 * f for f in factors],
        "original_max_position_embeddings": 40,
    }


CONFIGS: dict[str, Callable[[Any], Any]] = {
    "llama": lambda t: t.LlamaConfig(**_base()),
    "llama-tied": lambda t: t.LlamaConfig(**_base(tie_word_embeddings=True)),
    "llama-odd": lambda t: t.LlamaConfig(**_base(num_attention_heads=6, num_key_value_heads=2, hidden_size=48)),
    "llama-mqa": lambda t: t.LlamaConfig(**_base(num_key_value_heads=1)),
    "qwen3": lambda t: t.Qwen3Config(**_base(head_dim=8)),
    "mistral": lambda t: t.MistralConfig(**_base(sliding_window=12)),
    "gemma2": lambda t: t.Gemma2Config(**_base(sliding_window=12, head_dim=8), attn_implementation="eager"),
    "gemma3": lambda t: t.Gemma3TextConfig(**_base(sliding_window=12, head_dim=8, num_hidden_layers=3)),
    "phi3-longrope": lambda t: t.Phi3Config(**_base(rope_parameters=_longrope(), original_max_position_embeddings=40)),
    "llama-dynamic": lambda t: t.LlamaConfig(
        **_base(
            max_position_embeddings=20, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
        )
    ),
    "gptoss": lambda t: t.GptOssConfig(
        **_base(sliding_window=12, head_dim=8, num_local_experts=4, num_experts_per_tok=2), attn_implementation="eager"
    ),
    "deepseek3": lambda t: t.DeepseekV3Config(
        **_base(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        )
    ),
    "qwen3moe": lambda t: t.Qwen3MoeConfig(
        **_base(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True)
    ),
    "mixtral": lambda t: t.MixtralConfig(**_base(num_local_experts=4, num_experts_per_tok=2)),
    "llama4": lambda t: t.Llama4TextConfig(
        **_base(
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=16,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            floor_scale=8,
            attn_scale=0.3,
        )
    ),
    "gpt2": lambda t: t.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        n_positions=128,
        attn_pdrop=0,
        resid_pdrop=0,
        embd_pdrop=0,
    ),
    "opt": lambda t: t.OPTConfig(**_base(ffn_dim=48, word_embed_proj_dim=HIDDEN, dropout=0.0, attention_dropout=0.0)),
    "bert": lambda t: t.BertConfig(**_base(hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
    "roberta": lambda t: t.RobertaConfig(
        **_base(hidden_dropout_prob=0, attention_probs_dropout_prob=0, max_position_embeddings=140)
    ),
    "modernbert": lambda t: t.ModernBertConfig(
        **_base(local_attention=12, num_hidden_layers=3, global_attn_every_n_layers=2)
    ),
    "mamba": lambda t: t.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, state_size=8, use_mambapy=False
    ),
    "mamba2": lambda t: t.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=16,
        pad_token_id=0,
        tie_word_embeddings=False,
    ),
    "mamba2-groups": lambda t: t.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        state_size=8,
        num_heads=12,
        head_dim=8,
        expand=3,
        n_groups=3,
        chunk_size=16,
        pad_token_id=0,
        tie_word_embeddings=False,
    ),
    "qwen3next": lambda t: t.Qwen3NextConfig(
        **_base(
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
    "lfm2": lambda t: t.Lfm2Config(**_base(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)),
    "bart-decoder": lambda t: t.BartConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        is_encoder_decoder=False,
        dropout=0.0,
        max_position_embeddings=64,
    ),
    "bart": lambda t: t.BartConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        dropout=0.0,
        max_position_embeddings=64,
    ),
    "t5": lambda t: t.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        relative_attention_max_distance=20,
    ),
    "llama-classifier": lambda t: t.LlamaConfig(**_base(num_labels=3)),
    "llama-qa": lambda t: t.LlamaConfig(**_base()),
    "bert-tokens": lambda t: t.BertConfig(**_base(hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3)),
}
"""Name -> its config, given the module `transformers`."""
CLASSES = {
    "bert": "AutoModelForMaskedLM",
    "roberta": "AutoModelForMaskedLM",
    "modernbert": "AutoModelForMaskedLM",
    "llama-classifier": "AutoModelForSequenceClassification",
    "llama-qa": "AutoModelForQuestionAnswering",
    "bert-tokens": "AutoModelForTokenClassification",
    "bart": "AutoModelForSeq2SeqLM",
    "t5": "AutoModelForSeq2SeqLM",
}


_TARGETS: dict[str, Callable[[torch.Generator, int], dict[str, torch.Tensor]]] = {
    "llama-classifier": lambda draw, length: {"labels": torch.randint(0, 3, (2,), generator=draw)},
    "llama-qa": lambda draw, length: {
        f"{end}_positions": torch.randint(0, length - 18, (2,), generator=draw) for end in ("start", "end")
    },
    "bert-tokens": lambda draw, length: {"labels": torch.randint(0, 3, (2, length), generator=draw)},
}
"""What heads that read the whole row learn; not of the padding."""


def make_model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every call; biases and norms are not at their initial values."""
    import transformers

    config = CONFIGS[family](transformers)
    kind = getattr(transformers, CLASSES.get(family, "AutoModelForCausalLM"))
    torch.manual_seed(7)
    implementation = {} if config._attn_implementation is None else {"attn_implementation": config._attn_implementation}
    model: nn.Module = kind.from_config(config, **implementation)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * (0.05 if p.dim() == 1 else 0.02))
    return model.to(dtype)


def make_batch(family: str, kind: str, seed: int, length: int | None = None) -> dict[str, torch.Tensor]:
    """Two rows. `kind`: plain (48 tokens), ragged (61, padded on the right), left (padded on the left), masked (labels at the
    end only), packed (three documents in each row, told by the positions), together (the same beside a mask of ones, with
    which HF looks for no documents)."""
    draw = torch.Generator().manual_seed(seed)
    length = length or (61 if kind == "ragged" else 48)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=draw)
    if family in _TARGETS:
        batch = {"input_ids": ids, **_TARGETS[family](draw, length)}
        if kind == "ragged":
            batch["attention_mask"] = torch.ones_like(ids)
            ids[1, -17:] = 0
            batch["attention_mask"][1, -17:] = 0
        return batch
    labels = ids.clone()
    if family in ("bart", "t5"):  # targets of another length
        labels = torch.randint(3, VOCABULARY, (2, 2 * length // 3 - 1), generator=draw)
    batch = {"input_ids": ids, "labels": labels}
    if kind == "ragged":
        mask = torch.ones_like(ids)
        mask[1, -17:] = 0
        ids[1, -17:] = 1 if family == "roberta" else 0
        labels[1, -17:] = -100
        batch["attention_mask"] = mask
    if kind == "left":
        mask = torch.ones_like(ids)
        mask[1, :17] = 0
        ids[1, :17] = 0
        labels[1, :18] = -100
        batch["attention_mask"] = mask
    if kind == "masked":
        labels[:, : labels.shape[1] * 5 // 6] = -100
    if kind in ("packed", "together"):
        ends = [0, length // 4, length // 2 + 3, length]
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)]).expand(2, -1)
        labels[:, ends[1:-1]] = -100
    if kind == "together":
        batch["attention_mask"] = torch.ones_like(ids)
    return batch
