"""Distillation with TRL, its trainer unmodified; the teacher is on two other ranks, in a layout of its own.

    python examples/distill_trl.py --prepare_models runs/distill
    torchrun --nproc_per_node 4 -m hf_dist.run --config configs/roles.json examples/distill_trl.py

`configs/roles.json` divides the four processes: two train the student with ZeRO-3, two hold half of each of the teacher's
matrices. The ranks of the teacher never enter this script. For models of yours write their folders into the JSON and into
--model_name_or_path.
"""

from __future__ import annotations

import sys
from pathlib import Path

from small_causal_lm import described_packages, write_small_causal_lm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, ModelConfig, TrlParser

import hf_dist

START = Path("runs/distill")
"""The folder of the small models."""


def write_models(folder: Path) -> None:
    """`student`, and `teacher` with twice the layers; both have random weights."""
    student = write_small_causal_lm(folder / "student")
    config = AutoConfig.from_pretrained(student)
    config.num_hidden_layers *= 2
    config.layer_types = None
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(student).save_pretrained(folder / "teacher")


def main() -> None:
    """Train the student on its own answers, which the teacher grades token by token."""
    parser = TrlParser((DistillationConfig, ModelConfig))
    parser.set_defaults(
        output_dir=str(START / "trained"), learning_rate=1e-3, logging_steps=1, save_strategy="no", max_steps=10
    )
    parser.set_defaults(
        per_device_train_batch_size=4, max_completion_length=32, model_name_or_path=str(START / "student")
    )
    args, model_args = parser.parse_args_and_config()
    prompts = described_packages("train", 20).remove_columns("completion")
    trainer = DistillationTrainer(
        model=model_args.model_name_or_path,
        teacher_model=hf_dist.remote_model("teacher"),
        args=args,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path),
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss: {losses[0]:.4f}, then {losses[-1]:.4f}; saved to {args.output_dir}")


if __name__ == "__main__":
    if "--prepare_models" in sys.argv:
        write_models(Path(*sys.argv[2:] or [START]))
    else:
        main()
