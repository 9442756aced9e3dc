"""Tiny random models of real HF families, and batches with ragged lengths and masked labels for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 101
ROWS = 36  # divides by 1, 2, 3 and 4 ranks, with 1 or 3 microbatches
SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=56)
FAMILIES = ("llama", "gpt2", "qwen3", "bert", "t5", "qwen3_moe", "vit")
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""Experts in a loop; transposed stacks with biases; grouped products beside a shared expert, after a dense layer."""


def make_model(
    family: str, tied: bool = False, lora: bool = False, checkpointing: bool = False, layers: int = 3
) -> nn.Module:
    """The same weights on every call and every rank. `layers`: of a mixture."""
    import transformers as tf

    torch.manual_seed(0)
    causal: dict[str, Any] = dict(SMALL, vocab_size=VOCAB, tie_word_embeddings=tied, use_cache=False)
    mixture = {**causal, "num_hidden_layers": layers}
    model: Any
    if family == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**causal, num_key_value_heads=2))
    elif family == "qwen3":
        model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**causal, num_key_value_heads=2, head_dim=8))
    elif family == "qwen3_moe":
        config = tf.Qwen3MoeConfig(
            **mixture, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
            decoder_sparse_step=1, experts_implementation="eager",
        )  # fmt: skip
        model = tf.Qwen3MoeForCausalLM(config)
    elif family == "gpt_oss":
        config = tf.GptOssConfig(
            **mixture, num_key_value_heads=2, head_dim=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
            experts_implementation="eager",
        )  # fmt: skip
        model = tf.GptOssForCausalLM(config)
    elif family == "deepseek_v3":
        config = tf.DeepseekV3Config(
            **mixture, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=2, first_k_dense_replace=1,
            n_shared_experts=1, moe_intermediate_size=24, experts_implementation="grouped_mm",
        )  # fmt: skip
        model = tf.DeepseekV3ForCausalLM(config)
    elif family == "gpt2":
        no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(
                n_embd=32, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=32, use_cache=False, **no_dropout
            )
        )
    elif family == "bert":
        no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = tf.BertForMaskedLM(tf.BertConfig(**SMALL, vocab_size=VOCAB, max_position_embeddings=32, **no_dropout))
    elif family == "t5":
        model = tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
                        use_cache=False, decoder_start_token_id=0)
        )  # fmt: skip
    elif family == "vit":
        no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = tf.ViTForImageClassification(
            tf.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=7, **no_dropout)
        )
    else:
        raise ValueError(family)
    # A relative comparison needs weights that are not zero; attention key biases start at zero and their gradient is zero.
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0))
        if checkpointing:
            model.enable_input_require_grads()
    return model.train()


def make_batches(family: str, steps: int) -> list[dict[str, torch.Tensor]]:
    """`steps` joined batches of ROWS rows; `labels` hold -100 where no loss is taken."""
    g = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(steps):
        if family == "vit":
            images = torch.randn(ROWS, 3, 8, 8, generator=g)
            batches.append({"pixel_values": images, "labels": torch.randint(0, 7, (ROWS,), generator=g)})
            continue
        ids = torch.randint(1, VOCAB, (ROWS, 10), generator=g)
        lengths = torch.randint(3, 11, (ROWS, 1), generator=g)
        mask = (torch.arange(10)[None] < lengths).long()
        labels = torch.where(torch.rand(ROWS, 10, generator=g) < 0.25, -100, ids).masked_fill(mask == 0, -100)
        labels[:, 2] = ids[:, 2]
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
        if family == "t5":
            batch["labels"] = batch["labels"][:, :6].contiguous()
            batch["decoder_input_ids"] = batch["labels"].clamp(min=0)
        batches.append(batch)
    return batches


def summed_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """(sum of the losses of the labelled items, number of labelled items)."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    labels = batch["labels"]
    logits = model(**inputs).logits.float()
    causal = "pixel_values" not in batch and "decoder_input_ids" not in batch and getattr(model, "is_causal_lm", True)
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.reshape(-1).to(logits.device)
    total = nn.functional.cross_entropy(logits.reshape(labels.numel(), -1), labels, reduction="sum", ignore_index=-100)
    return total, int((labels != -100).sum())


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices, none for the rest, as the HF Trainer does."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
