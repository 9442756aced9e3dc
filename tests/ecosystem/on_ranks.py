"""Runs whole scripts in the ranks of one spawn, as the launchers would, and collects what they wrote."""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState

from hf_dist import run
from tests.attempts import attempts


def run_scripts(rank: int, world: int, jobs: list[tuple[str, str, list[str]]], sharded: bool, root: str) -> list[Any]:
    """What each script wrote into its `--output_dir`; a traceback where it failed. `sharded`: through `hf_dist.run`."""
    os.environ.update(HF_HUB_OFFLINE="1")
    datasets.config.HF_DATASETS_CACHE = Path(f"{root}/cache_{sharded}")  # its variable was read when it was imported
    # Of a script that ends; the next one goes on with the group.
    PartialState.destroy_process_group = lambda *_: None  # type: ignore[method-assign]
    if sharded:
        # A script without a Trainer has no argument for it; the others name the same.
        os.environ["HF_DIST_CONFIG"] = f"{root}/zero3.json"

    def run_one(name: str, script: str, arguments: list[str]) -> dict[str, Any]:
        folder = f"{root}/{'sharded' if sharded else 'plain'}/{name}"
        path = str(Path(__file__).parent / "scripts" / f"{script}.py")
        arguments = [*(a.format(parent=Path(folder).parent, root=root) for a in arguments), "--output_dir", folder]
        before = list(sys.path), list(sys.argv)
        try:
            if sharded:
                run.main([path, *arguments])
            else:
                sys.argv = [path, *arguments]
                runpy.run_path(path, run_name="__main__")
            return collected(Path(folder))
        except SystemExit as end:
            raise RuntimeError(f"the script left with {end.code}") from end
        finally:
            sys.path[:], sys.argv[:] = before

    return attempts(rank, world, (functools.partial(run_one, *job) for job in jobs))


def collected(folder: Path) -> dict[str, Any]:
    """Numbers of the log and of the results, and the names of the model's files."""
    numbers: dict[str, Any] = {}
    state = folder / "trainer_state.json"
    if state.exists():
        logs = [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
        for key in ("loss", "grad_norm", "learning_rate"):
            numbers[key] = [entry[key] for entry in logs]
    for path in sorted(folder.glob("*_results.json")):
        for key, value in json.loads(path.read_text()).items():
            if not any(word in key for word in ("runtime", "per_second", "time_", "memory", "flos", "preparation")):
                numbers[key] = value
    return {"numbers": numbers, "files": sorted(p.name for p in folder.iterdir() if p.is_file())}


def nothing_asked(rank: int, world: int, folder: str) -> dict[str, bool]:
    """What a script that names no config finds after `hf_dist.run` has prepared the process."""
    import accelerate
    import transformers

    stock = accelerate.Accelerator
    from hf_dist import DistAccelerator, DistTrainerMixin
    from hf_dist.hf.substitute import substitute

    substitute()
    from transformers.trainer import Trainer
    from trl import SFTConfig, SFTTrainer

    from tests.hf.recipes import make_model, pad, texts

    args = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], max_steps=1, save_strategy="no")
    trainer = transformers.Trainer(make_model("llama"), args, train_dataset=texts(8), data_collator=pad)
    trainer.train()
    return {
        "the Accelerator is accelerate's": accelerate.Accelerator is stock,
        "the Trainer's accelerator is accelerate's": not isinstance(trainer.accelerator, DistAccelerator),
        "nobody loads lazily": args.dist is None,
        "both names are ours": transformers.Trainer is Trainer and issubclass(Trainer, DistTrainerMixin),
        "TRL's trainers are ours": issubclass(SFTTrainer, DistTrainerMixin),
        "TRL's arguments take a config": "dist_config" in SFTConfig.__dataclass_fields__,
    }
