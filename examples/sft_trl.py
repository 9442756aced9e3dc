"""Supervised fine-tuning with TRL, sharded: the only change is two subclasses with our mixins.

    accelerate launch --num_processes 2 examples/sft_trl.py --dist_config configs/zero3.json --use_peft --lora_r 8

Every field of TRL's SFTConfig and ModelConfig is an option: packing, loss on the completion or the assistant only, LoRA.
`dpo_trl.py` shows how to run a script unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from small_causal_lm import described_packages, small_causal_lm
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from hf_dist import DistArgsMixin, DistTrainerMixin


@dataclass
class Arguments(DistArgsMixin, SFTConfig):
    """TRL's arguments with `dist_config`."""

    max_per_package: int = field(default=100, metadata={"help": "Training docstrings per package at most."})


class ShardedSFTTrainer(DistTrainerMixin, SFTTrainer):
    """TRL's trainer, sharded as `dist_config` says."""


def main() -> None:
    """Evaluate, train, evaluate again, save."""
    parser = TrlParser((Arguments, ModelConfig))
    parser.set_defaults(output_dir="runs/sft", max_length=128, learning_rate=1e-3, logging_steps=5)
    parser.set_defaults(per_device_train_batch_size=8, save_strategy="no", lora_target_modules=["all-linear"])
    args, model_args = parser.parse_args_and_config()
    trainer = ShardedSFTTrainer(
        model=model_args.model_name_or_path or small_causal_lm(Path(args.output_dir, "start")),
        args=args,
        train_dataset=described_packages("train", args.max_per_package),
        eval_dataset=described_packages("eval", args.max_per_package),
        peft_config=get_peft_config(model_args),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"loss before: {before:.3f}  after: {after:.3f}; saved to {args.output_dir}")


if __name__ == "__main__":
    main()
