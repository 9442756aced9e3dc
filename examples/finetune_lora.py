"""LoRA with PEFT and the Trainer: the frozen base model is sharded, only the adapters have gradients and optimizer state.

    accelerate launch --num_processes 2 examples/finetune_lora.py --dist_config configs/zero3.json

The result is an ordinary adapter folder. At the end the adapters are merged into the base model with plain PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from small_causal_lm import described_packages, small_causal_lm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_dist import DistTrainer, DistTrainingArguments


@dataclass
class ExampleArguments:
    """The base model and its adapters."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Any causal LM; default: a small Llama."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapters."})
    use_dora: bool = field(default=False, metadata={"help": "DoRA instead of LoRA."})
    max_per_package: int = field(default=100, metadata={"help": "Training docstrings per package at most."})


def tokenized(split: str, count: int, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Prompt and completion as one sequence; the prompt has no labels."""

    def to_inputs(row: dict[str, str]) -> dict[str, list[int]]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"][:100], tokenizer.eos_token_id]
        return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}

    return described_packages(split, count).map(to_inputs, remove_columns=["prompt", "completion"])


def main() -> None:
    """Train the adapters, save them, merge them."""
    parser = HfArgumentParser((ExampleArguments, DistTrainingArguments))
    parser.set_defaults(output_dir="runs/lora", learning_rate=2e-3, per_device_train_batch_size=8)
    parser.set_defaults(logging_steps=5, save_strategy="no", num_train_epochs=1)
    example, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    checkpoint = example.model_name_or_path or small_causal_lm(Path(args.output_dir, "start"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    adapters = LoraConfig(
        r=example.lora_r,
        lora_alpha=2 * example.lora_r,
        target_modules="all-linear",
        use_dora=example.use_dora,
        task_type="CAUSAL_LM",
    )
    trainer = DistTrainer(
        model=get_peft_model(model, adapters),
        args=args,
        train_dataset=tokenized("train", example.max_per_package, tokenizer),
        eval_dataset=tokenized("eval", example.max_per_package, tokenizer),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        trained, total = trainer.model.get_nb_trainable_parameters()
        print(f"{trained:,} of {total:,} parameters trained; loss before: {before:.3f}  after: {after:.3f}")
        merged = AutoPeftModelForCausalLM.from_pretrained(args.output_dir).merge_and_unload()
        merged.save_pretrained(Path(args.output_dir, "merged"))
        print(f"adapters in {args.output_dir}, merged model in {args.output_dir}/merged")


if __name__ == "__main__":
    main()
