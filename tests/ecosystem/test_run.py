"""`hf_dist.run`: stock scripts, unmodified, at ZeRO-3 on two ranks give the numbers of plain DDP."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.covering import FULL_GRID, some_of
from tests.ecosystem.launching import launch
from tests.ecosystem.on_ranks import nothing_asked, run_scripts
from tests.ecosystem.tiny import save_example_models, save_models, words
from tests.harness import run_ranks

needs.package("trl", "TRL needs Python 3.11")
TRAINING = [
    *("--max_steps", "3", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2"),
    *("--learning_rate", "5e-3", "--adam_epsilon", "1e-3", "--logging_steps", "1", "--report_to", "none"),
    *("--save_strategy", "no", "--use_cpu", "--disable_tqdm", "True", "--seed", "5", "--max_grad_norm", "0.5"),
]
SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "language_modelling": (
        "language_modelling",
        [*TRAINING, "--model_name_or_path", "{root}/lm", "--train_file", "{root}/text.txt", "--do_train", "--do_eval",
         "--gradient_accumulation_steps", "2", "--gradient_checkpointing", "True"],
    ),
    "text_classification": ("classification", TRAINING),
    "image_classification": ("classification", [*TRAINING, "--task", "image"]),
    # These models return a mean over the microbatch: HF multiplies it by the ranks unless it is told not to.
    "question_answering": ("question_answering", [*TRAINING, "--average_tokens_across_devices", "False"]),
    "summarisation": (
        "summarisation",
        [*TRAINING, "--average_tokens_across_devices", "False", "--predict_with_generate", "--generation_max_length", "9"],
    ),
    # The first checkpoint is the best: its loss is the larger one.
    "sentences": (
        "sentences",
        [*TRAINING, "--model_name_or_path", "{root}/encoder", "--save_strategy", "steps", "--save_steps", "1",
         "--eval_strategy", "steps", "--eval_steps", "1", "--load_best_model_at_end", "--greater_is_better", "True"],
    ),
    "no_trainer": ("no_trainer", ["--model_name_or_path", "{root}/lm"]),
    "no_trainer_resumed": (
        "no_trainer",
        ["--model_name_or_path", "{root}/lm", "--resume_from_checkpoint", "{parent}/no_trainer/step_2"],
    ),
    "dpo": ("preferences", [*TRAINING, "--model_name_or_path", "{root}/lm", "--bf16", "False", "--max_length", "16"]),
    "dpo_lora": (
        "preferences",
        [*TRAINING, "--model_name_or_path", "{root}/lm", "--bf16", "False", "--max_length", "16", "--use_peft",
         "--lora_target_modules", "all-linear", "--lora_r", "4", "--lora_dropout", "0"],
    ),
}  # fmt: skip
# Each way to name a config. The rest are other classes of Trainer under the same substitution: `test_parity.py`,
# `test_saving.py` and `../hf/test_generation.py` train with them.
SCRIPTS = some_of(SCRIPTS, "language_modelling", "no_trainer")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes(sharded)[name]` of the main rank; one spawn each, because `hf_dist.run` is for the life of a process."""

    @functools.cache
    def root() -> Path:
        import torch

        made = tmp_path_factory.mktemp("scripts")
        save_models(made)
        save_example_models(made)
        g = torch.Generator().manual_seed(7)
        (made / "text.txt").write_text("\n".join(words(20, g) for _ in range(24)))
        (made / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
        return made

    @functools.cache
    def run(sharded: bool) -> dict[str, Any]:
        extra = ["--deepspeed", "{root}/zero3.json"]
        jobs = [
            (name, script, [*arguments, *(extra if sharded and script != "no_trainer" else ())])
            for name, (script, arguments) in SCRIPTS.items()
        ]
        results = run_ranks(run_scripts, 2, (jobs, sharded, str(root())), timeout=600)
        return dict(zip(SCRIPTS, results[0], strict=True))

    return run


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unmodified_script_gives_the_numbers_of_ddp(name: str, outcomes: Any) -> None:
    plain, sharded = outcomes(False)[name], outcomes(True)[name]
    assert not isinstance(plain, str), plain
    assert not isinstance(sharded, str), sharded
    assert len(plain["numbers"]) > 2
    assert set(plain["numbers"]) <= set(sharded["numbers"])
    for key, value in plain["numbers"].items():
        assert sharded["numbers"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    missing = set(plain["files"]) - set(sharded["files"])
    assert not missing


def test_a_script_that_names_no_config_gets_the_stock_behaviour(tmp_path: Path) -> None:
    found = run_ranks(nothing_asked, 1, (str(tmp_path),))[0]
    assert [name for name, holds in found.items() if not holds] == []


MODULE = """
import json, sys
from pathlib import Path
import torch
from accelerate import Accelerator as by_name
from accelerate.accelerator import Accelerator
from transformers import Trainer, TrainingArguments, HfArgumentParser
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig as declared
from tests.hf.recipes import make_model, pad, texts

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
trainer = Trainer(make_model("llama"), args, train_dataset=texts(24), data_collator=pad)
trainer.train()
stage = trainer.accelerator.engine.sharded.placements.params.name
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
found = {"name": __name__, "argv": sys.argv[1][:12], "world": args.world_size, "stage": stage, "losses": losses}
found["imported"] = [by_name.__name__, Accelerator.__name__, HfDeepSpeedConfig({}).is_zero3(), declared is HfDeepSpeedConfig]
Path(f"rank{args.process_index}.json").write_text(json.dumps(found))
"""
"""A script of somebody else: it writes how it was run and what it imported.

A file per rank: lines of two ranks would mix on one pipe.
"""


LAUNCHED: dict[str, tuple[str, list[str], str, bool, int]] = {
    # Name: (launcher, script or module, what names the config, in new interpreters, ranks).
    "torchrun": ("torchrun", ["-m", "package.module"], "argument", False, 2),
    "torchrun for real": ("torchrun", ["-m", "package.module"], "--config", True, 2 if FULL_GRID else 1),
    "accelerate": ("accelerate", ["package/module.py"], "argument", False, 2),
    "accelerate for real": ("accelerate", ["-m", "package.module"], "--config", True, 2),
    "hf-dist": ("hf-dist", ["-m", "package.module"], "YAML", False, 2),
}
LAUNCHED = some_of(LAUNCHED, "torchrun for real", "accelerate", "hf-dist")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_script_or_module_under_a_launcher(name: str, tmp_path: Path) -> None:
    launcher, named, by, is_real, ranks = LAUNCHED[name]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(MODULE)
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    given = ["--output_dir", "out", "--report_to", "none", "--max_steps", "2", "--use_cpu", "--save_strategy", "no",
             "--logging_steps", "1"]  # fmt: skip
    config = ["--config", "zero3.json"] if by == "--config" else []
    given += ["--deepspeed", "zero3.json"] if by == "argument" else []
    runner = [] if launcher == "hf-dist" else ["-m", "hf_dist.run"]
    launch(launcher, [*runner, *config, *named, *given], tmp_path, is_real=is_real, ranks=ranks)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(found) == ranks
    for rank in found:
        assert len(set(rank.pop("losses"))) == 2
        # A loop of accelerate's is sharded where the job has a config, not where a Trainer is given one.
        accelerator = "Accelerator" if by == "argument" else "DistAccelerator"
        assert rank.pop("imported") == [accelerator, accelerator, False, True]
        assert rank == {"name": "__main__", "argv": "--output_dir", "world": ranks, "stage": "SHARD"}
