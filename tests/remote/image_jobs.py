"""A model of images and text in the Trainer, whose vision tower is inside of it or in another role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from hf_dist import DistTrainer, DistTrainingArguments, remote_model

STEPS, ROWS = 5, 4
IMAGE = 5
"""The token in whose place a patch stands; an image has four."""


def save_models(folder: str) -> None:
    """`whole`, and its `tower` by itself."""
    torch.manual_seed(3)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=4, patch_size=2
    )
    text = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=4
    )
    model: Any = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(f"{folder}/whole")
    model.model.vision_tower.save_pretrained(f"{folder}/tower")


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """An image, its four places, four words."""

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(index)
        ids = torch.cat([torch.full((4,), IMAGE), torch.randint(6, 60, (4,), generator=made)])
        labels = torch.where(ids == IMAGE, -100, ids)
        return {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(3, 4, 4, generator=made)}


def train(
    rank: int, world: int, folder: str, config: dict[str, Any], trains: bool, adapters: bool = False
) -> dict[str, Any] | None:
    """Losses, norms and weights of five steps of the Trainer; None on the tower's ranks."""
    remote = "hf_dist" in config
    trainers = world - config["hf_dist"]["roles"]["tower"]["ranks"] if remote else world
    try:
        args = DistTrainingArguments(
            output_dir=f"{folder}/out-{world}-{trains}",
            per_device_train_batch_size=ROWS // trainers,
            max_steps=STEPS,
            learning_rate=1e-2,
            adam_epsilon=1e-3,
            max_grad_norm=0.5,
            logging_steps=1,
            save_steps=STEPS,
            lr_scheduler_type="linear",
            report_to=[],
            use_cpu=True,
            dist_config=config,
        )
    except SystemExit as end:
        assert not end.code, end
        return None
    model: Any = transformers.LlavaForConditionalGeneration.from_pretrained(f"{folder}/whole", dtype=torch.float32)
    if remote:
        model.model.vision_tower = remote_model("tower", trains=trains)
    elif not trains:
        model.model.vision_tower.requires_grad_(False)
    tower = model.model.vision_tower
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*language_model.*(q|v)_proj", r=4))
    trainer = DistTrainer(model=model, args=args, train_dataset=Rows())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    state = trainer.accelerator.get_state_dict(model)
    weights = {n: t.float().clone() for n, t in state.items() if "vision_tower" not in n}
    if remote:
        tower._asker.close()
    saved = Path(args.output_dir) / f"checkpoint-{STEPS}"
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry["grad_norm"] for entry in logs],
        "weights": weights if rank == 0 else {},
        "held": sum(p.numel() for p in tower.parameters()),
        "tower saved": (saved / "roles" / "tower" / "config.json").exists(),
    }
