"""A stock script for TRL: DPO, with TrlParser, a model by its path, LoRA by its arguments."""

from __future__ import annotations

from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser, get_peft_config

from tests.ecosystem.tiny import preferences


def main() -> None:
    """Train, evaluate, save."""
    training_args, model_args = TrlParser((DPOConfig, ModelConfig)).parse_args_and_config()
    trainer = DPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=preferences(24),
        eval_dataset=preferences(4),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
