"""Preference optimisation with TRL. This script does not mention hf_dist; start it with `hf_dist.run`:

    accelerate launch --num_processes 2 -m hf_dist.run examples/dpo_trl.py --deepspeed configs/zero3.json

The reference model is sharded like the policy, without gradients or optimizer state. --use_peft needs no reference model:
the policy without its adapters is the reference.
"""

from __future__ import annotations

from pathlib import Path

from small_causal_lm import preferred_descriptions, small_causal_lm
from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser, get_peft_config


def main() -> None:
    """Train, evaluate, save."""
    parser = TrlParser((DPOConfig, ModelConfig))
    parser.set_defaults(output_dir="runs/dpo", max_length=128, learning_rate=1e-4, logging_steps=5, beta=0.1)
    parser.set_defaults(per_device_train_batch_size=4, save_strategy="no", lora_target_modules=["all-linear"])
    args, model_args = parser.parse_args_and_config()
    trainer = DPOTrainer(
        model=model_args.model_name_or_path or small_causal_lm(Path(args.output_dir, "start")),
        args=args,
        train_dataset=preferred_descriptions("train", 50),
        eval_dataset=preferred_descriptions("eval", 10),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"the chosen text is preferred in {metrics['eval_rewards/accuracies']:.0%}; saved to {args.output_dir}")


if __name__ == "__main__":
    main()
