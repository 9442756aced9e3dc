"""GRPO with TRL, rewards from another machine over HTTP. This script does not mention hf_dist.

    python examples/reward_server.py --port 8000 &
    export REWARD_URL=http://127.0.0.1:8000/score
    accelerate launch --num_processes 2 -m hf_dist.run examples/grpo_remote_rewards.py --deepspeed configs/zero3.json

Every process sends its own completions in one request. If the server is briefly unreachable (restarting, say), the process
retries, and the other processes wait for it.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from small_causal_lm import described_packages, small_causal_lm
from trl import GRPOConfig, GRPOTrainer, TrlParser

PATIENCE_S = 120.0


def remote_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The server's score of each completion. Raises if the server refuses the batch or stays unreachable for too long."""
    body = json.dumps({"prompts": prompts, "completions": completions}).encode()
    request = urllib.request.Request(os.environ["REWARD_URL"], body, {"Content-Type": "application/json"})
    deadline, pause = time.monotonic() + PATIENCE_S, 0.1
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                rewards = json.load(answer)["rewards"]
            if len(rewards) != len(completions):
                raise ValueError(f"{len(rewards)} rewards for {len(completions)} completions")
            return [float(reward) for reward in rewards]
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if refused or time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def main() -> None:
    """Train and save."""
    parser = TrlParser((GRPOConfig,))
    parser.set_defaults(output_dir="runs/grpo", num_generations=2, max_completion_length=16, learning_rate=1e-5)
    parser.set_defaults(per_device_train_batch_size=4, logging_steps=1, save_strategy="no")
    (args,) = parser.parse_args_and_config()
    trainer = GRPOTrainer(
        model=small_causal_lm(Path(args.output_dir, "start")),
        reward_funcs=remote_reward,
        args=args,
        train_dataset=described_packages("train", 20).remove_columns("completion"),
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        last = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry][-1]
        print(f"mean reward of the last step: {last:.3f}; saved to {args.output_dir}")


if __name__ == "__main__":
    main()
