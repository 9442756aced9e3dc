"""Tiny random models of real HF families, and batches with ragged lengths and masked labels for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.parallel.pipeline import zoo
from tests.parallel.pipeline.zoo import VOCAB

ROWS = 36  # divides by 1, 2, 3 and 4 ranks, with 1 or 3 microbatches
FAMILIES = ("llama", "gpt2", "qwen3", "bert", "t5", "qwen3_moe", "vit")
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""Experts in a loop; transposed stacks with biases; grouped products beside a shared expert, after a dense layer."""


CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3},
    "t5": {"d_ff": 56},
    "qwen3_moe": {"num_experts": 8, "output_router_logits": False, "experts_implementation": "eager"},
    "gpt_oss": {
        "num_local_experts": 8,
        "sliding_window": 8,
        "output_router_logits": False,
        "experts_implementation": "eager",
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 2,
        "experts_implementation": "grouped_mm",
    },
}
"""What differs from the models of `tests/parallel/pipeline/zoo.py`, beside the size."""
NAMES = {
    "llama": "Llama",
    "gpt2": "GPT2",
    "qwen3": "Qwen3",
    "bert": "Bert",
    "t5": "T5",
    "qwen3_moe": "Qwen3Moe",
    "gpt_oss": "GptOss",
    "deepseek_v3": "DeepseekV3",
    "vit": "ViT",
}
"""Their names there."""


def make_model(
    family: str, tied: bool = False, lora: bool = False, checkpointing: bool = False, layers: int = 3
) -> nn.Module:
    """The same weights on every call and every rank. `layers`: of a mixture."""
    sized: dict[str, Any] = {} if family in ("gpt2", "t5") else {"num_hidden_layers": 3, "intermediate_size": 56}
    if family in MIXTURES:
        sized["num_hidden_layers"] = layers
    if "pad_token_id" in zoo.CONFIGS[NAMES[family]]:  # rows of padding are looked up, and have gradients
        sized["pad_token_id"] = None
    head = "MaskedLM" if family == "bert" else ""
    model: Any = zoo.make_model(NAMES[family], tied, checkpointing, head, **sized, **CHANGES.get(family, {}))
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
