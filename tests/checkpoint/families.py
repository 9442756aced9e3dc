"""Small models of the families whose names on disk differ most from their names in memory, built from a config."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 61
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
CAUSAL: dict[str, Any] = dict(BASE, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0)


class Plain(nn.Module):
    """Not HF's: a tied weight, a persistent buffer, one that is not persistent, a scalar, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("temporary", torch.ones(3), persistent=False)


def _llama(**kwargs: Any) -> nn.Module:
    import transformers as tf

    return tf.LlamaForCausalLM(tf.LlamaConfig(**CAUSAL, **kwargs))


def _lora(**kwargs: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_llama(), LoraConfig(r=3, target_modules=["q_proj", "down_proj"], **kwargs))  # type: ignore[arg-type]


def _two_adapters() -> nn.Module:
    from peft import LoraConfig

    model: Any = _lora()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    return model


def _hf_adapter() -> nn.Module:
    from peft import LoraConfig

    model: Any = _llama()
    model.add_adapter(LoraConfig(r=3, target_modules=["q_proj"]))
    return model


def _qwen3_vl_moe() -> nn.Module:
    import transformers as tf

    text = dict(CAUSAL, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    vision = dict(depth=2, hidden_size=16, intermediate_size=24, num_heads=4, out_hidden_size=16, patch_size=4)
    config = tf.Qwen3VLMoeConfig(
        text_config=text, vision_config=dict(vision, deepstack_visual_indexes=[1], num_position_embeddings=16),
        image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8,
    )  # fmt: skip
    return tf.Qwen3VLMoeForConditionalGeneration(config)


def _shuffled() -> nn.Module:
    """A llama whose checkpoints are transposed, interleaved, fused and permuted, as those of rarer families are."""
    from transformers.core_model_loading import Chunk, Interleave, PermuteForRope, Transpose, WeightConverter

    model: Any = _llama()
    key_value = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    model._weight_conversions = [
        WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)]),
        WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
        WeightConverter("self_attn.kv.weight", key_value, [Interleave(dim=1), Chunk(dim=1)]),
        WeightConverter("self_attn.q.weight", "self_attn.q_proj.weight", [PermuteForRope()]),
    ]
    return model


def _build(family: str) -> nn.Module:
    import transformers as tf

    moe = dict(CAUSAL, num_experts_per_tok=2, moe_intermediate_size=8)
    makers: dict[str, Any] = {
        "llama": _llama,
        "llama_tied": lambda: _llama(tie_word_embeddings=True),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=32)
        ),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**BASE, max_position_embeddings=32)),
        "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**moe, head_dim=4, num_experts=4)),
        "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**CAUSAL, num_local_experts=4)),
        "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**CAUSAL)),
        "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**CAUSAL, num_local_experts=4, head_dim=4)),
        "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(
            tf.DeepseekV3Config(
                **(moe | dict(num_key_value_heads=4)), n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=8,
                kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1,
            )
        ),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0)
        ),
        "vit": lambda: tf.ViTForImageClassification(
            tf.ViTConfig(**{k: v for k, v in BASE.items() if k not in ("vocab_size", "use_cache")}, image_size=8, patch_size=4)
        ),
        "dinov2": lambda: tf.Dinov2Model(
            tf.Dinov2Config(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4, use_swiglu_ffn=True
            )
        ),
        "qwen3_vl_moe": _qwen3_vl_moe,
        "shuffled": _shuffled,
        "plain": Plain,
        "lora": _lora,
        "lora_modules": lambda: _lora(modules_to_save=["lm_head"]),
        "dora": lambda: _lora(use_dora=True),
        "two_adapters": _two_adapters,
        "hf_adapter": _hf_adapter,
    }  # fmt: skip
    return makers[family]()


FAMILIES = (
    "llama", "llama_tied", "gpt2", "bert", "qwen3_moe", "mixtral", "phi3", "gpt_oss", "deepseek_v3", "t5", "vit", "dinov2",
    "qwen3_vl_moe", "shuffled", "plain",    "lora", "lora_modules", "dora", "two_adapters", "hf_adapter",
)  # fmt: skip


def make_model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every call and every rank, none of them zero or equal to another."""
    torch.manual_seed(0)
    model = _build(family).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
        for buffer in model.buffers():
            if buffer.is_floating_point() and buffer.dim() == 1 and isinstance(model, Plain):
                buffer.copy_(torch.rand(buffer.shape))
    return model.eval()
