"""Object detection, whose loss counts boxes over all processes, on ranks and in one process."""

from __future__ import annotations

from typing import Any

import torch


def detector() -> Any:
    """A DETR with one layer of each kind."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    torch.manual_seed(0)
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], out_features=["stage1"], layer_type="basic")
    small = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=4)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0, num_labels=3, auxiliary_loss=False)
    stock = dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone)
    return DetrForObjectDetection(DetrConfig(**stock, **small, **heads))


def images(count: int) -> list[dict[str, Any]]:
    """Noise with two boxes each."""
    g = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(3, 16, 16, generator=g),
            "labels": {
                "class_labels": torch.randint(0, 3, (2,), generator=g),
                "boxes": torch.rand(2, 4, generator=g) * 0.4 + 0.2,
            },
        }
        for _ in range(count)
    ]


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Boxes stay a list with an entry per image."""
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": [row["labels"] for row in rows],
    }


def trained(rank: int, world: int, folder: str, layout: dict[str, Any] | None) -> Any:
    """Losses and norms of two steps of four images; of the stock Trainer without a layout."""
    from transformers import Trainer, TrainingArguments

    from hf_dist import DistTrainer, DistTrainingArguments
    from hf_dist.errors import ModelError

    arguments: Any = TrainingArguments if layout is None else DistTrainingArguments
    made: Any = Trainer if layout is None else DistTrainer
    more = {} if layout is None else {"dist_config": layout}
    args = arguments(
        folder, per_device_train_batch_size=4 // world, max_steps=2, learning_rate=1e-3, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, optim="sgd",
        train_sampling_strategy="sequential", **more,
    )  # fmt: skip
    trainer = made(model=detector(), args=args, train_dataset=images(8), data_collator=collated)
    try:
        trainer.train()
    except ModelError as error:
        return str(error)
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


def on_ranks(rank: int, world: int, folder: str) -> Any:
    """The layouts that work, and the one that cannot."""
    layouts = {"stage 1": {"zero_optimization": {"stage": 1}}, "stages": {"pipeline": {"stages": 2}}}
    return {name: trained(rank, world, folder, layout) for name, layout in layouts.items()}
