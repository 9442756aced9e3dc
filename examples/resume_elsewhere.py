"""Stop a training run at any moment, and resume it on another number of processes and at another ZeRO stage.

    torchrun --nproc_per_node 2 examples/resume_elsewhere.py --dist_config configs/zero3_fp32.json --use_cpu
    kill -USR1 <any of the processes>       # SIGTERM does the same; or stop it with --stop_after 5
    torchrun --nproc_per_node 1 examples/resume_elsewhere.py --dist_config configs/zero1.json --use_cpu

On such a signal all processes write a checkpoint together and exit with code 75, "try again later". The same command
starts and resumes: "auto" uses the newest complete checkpoint, or starts from the beginning if none exists. Under
`torchrun --max-restarts 3` the restart is automatic, even after a process was killed.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from hf_dist import DistTrainer, DistTrainingArguments

GLOBAL_BATCH = 16
"""Samples per step, whatever the number of processes."""
MICRO_BATCH = 4


@dataclass
class ExampleArguments:
    """The settings of this example."""

    stop_after: int = field(default=0, metadata={"help": "Send this process SIGUSR1 after that many steps."})


class StopAfter(TrainerCallback):
    """Imitates a scheduler that takes the machine away."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Only one process gets the signal; all processes stop."""
        if state.global_step == self.step and state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGUSR1)


def rows(count: int, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards from a random start: easy to learn, no download."""
    starts = torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "labels": ids} for ids in ((start + torch.arange(length)) % 64 for start in starts)]


def main() -> None:
    """Train, starting where an earlier run stopped."""
    parser = HfArgumentParser((ExampleArguments, DistTrainingArguments))
    parser.set_defaults(output_dir="runs/resume", num_train_epochs=2, learning_rate=3e-3, logging_steps=1)
    parser.set_defaults(save_strategy="steps", save_steps=20, save_total_limit=2)
    parser.set_defaults(per_device_train_batch_size=MICRO_BATCH)
    example, args = parser.parse_args_into_dataclasses()
    # The same step in any layout: fewer readers of the data run more microbatches. (Processes that share a model or a
    # sequence read the same rows, and `world_size` counts them once.)
    args.gradient_accumulation_steps = GLOBAL_BATCH // (MICRO_BATCH * args.world_size)

    set_seed(args.seed)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **small))
    trainer = DistTrainer(model, args, train_dataset=rows(320), callbacks=[StopAfter(example.stop_after)])
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        print(f"{len(losses)} steps on {processes} processes, loss {losses[0]:.3f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
