"""Ray Train starts the workers; the loop is an ordinary script with `DistTrainer`. `pip install "ray[train]"`, then

    python examples/ray_train.py --num_workers 2 --storage /path/that/all/machines/see

If a worker dies or a machine leaves, Ray restarts the group (`max_failures`), possibly with another number of workers, and
the Trainer resumes from the newest complete checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.hf.ray import RayReportCallback


def train_loop(settings: dict[str, Any]) -> None:
    """Runs on every worker. Ray has set RANK, WORLD_SIZE and so on, and has created the process group."""
    from train_clm import ExampleArguments, make_tokenizer, prepare_data, read_texts, small_llama
    from transformers import AutoTokenizer, default_data_collator, set_seed

    args = DistTrainingArguments(**settings["arguments"])
    set_seed(args.seed)  # a group that restarts before its first checkpoint creates the same model
    texts = read_texts(ExampleArguments(max_characters=60_000), args.seed)
    folder = Path(args.output_dir, "tokenizer")
    with args.main_process_first():
        if not (folder / "tokenizer.json").exists():
            make_tokenizer(texts, 512, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = DistTrainer(
        model=small_llama(tokenizer, 32),
        args=args,
        train_dataset=prepare_data(texts, tokenizer, 32)["train"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[RayReportCallback(), *settings.get("callbacks", [])],
    )
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(str(Path(args.output_dir, "final")))


def fit(storage: Path, num_workers: int, use_gpu: bool, arguments: dict[str, Any], callbacks: Any = ()) -> Any:
    """Run `train_loop` on workers; returns Ray's result."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    settings = {"arguments": {"output_dir": str(storage / "out"), **arguments}, "callbacks": list(callbacks)}
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=RunConfig(storage_path=str(storage / "ray"), failure_config=FailureConfig(max_failures=3)),
    )
    return trainer.fit()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--dist_config", default="configs/zero3.json")
    parser.add_argument("--max_steps", type=int, default=50)
    parser.add_argument("--use_gpu", action="store_true")
    asked = parser.parse_args()
    import ray

    # Workers are other processes, maybe on other machines: they must find the modules next to this script. Ray would log
    # everything they print, including the bytecode from which datasets computes fingerprints.
    variables = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent), "env_vars": variables})
    arguments = {
        "dist_config": str(Path(asked.dist_config).resolve()),
        "max_steps": asked.max_steps,
        "save_steps": 10,
        "logging_steps": 1,
        "use_cpu": not asked.use_gpu,
    }
    result = fit(asked.storage.resolve(), asked.num_workers, asked.use_gpu, arguments)
    print(f"loss {result.metrics['train_loss']:.3f} after {result.metrics['step']} steps; {result.checkpoint.path}")


if __name__ == "__main__":
    main()
