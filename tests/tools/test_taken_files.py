"""Commands that resolve a file without a Trainer take every file that loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hf_dist.config import DistConfig, load_config, read_config
from hf_dist.config.auto import _FOUND_LATER
from hf_dist.errors import ConfigError, HfDistError
from hf_dist.hf.loop_config import without_trainer
from hf_dist.tools.cli import app, layouts, tune
from hf_dist.tools.cli.planned import resolved_config, suggestions
from tests.parity.families import make_model

REPO = Path(__file__).resolve().parents[2]
CORPUS = REPO.parent / "shared" / "corpus"
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
BATCH = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
TYPICAL: dict[str, dict[str, Any]] = {
    "template": {
        **BATCH,
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    },
    "decay": {"scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}}},
    "scheduler of numbers": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
    "optimizer alone": {"optimizer": ADAMW, "zero_optimization": {"stage": 1}},
    "stage as a switch": {"zero_optimization": True, "train_batch_size": 8},
    "null sections": {"zero_optimization": None, "scheduler": None, "optimizer": None, "pipeline": None},
    "old names": {"zero_optimization": {"stage": 2, "cpu_offload": True}, "fp16": {"enabled": True}},
    "elastic": {
        "elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [1, 2], "version": 0.1}
    },
    "stages": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}},
    "nothing": {},
}
"""Files as they are in the wild, by what is special about them."""
PLANNED = ("template", "stage as a switch")
"""Files for which a whole plan is made, which takes longest."""
CHANGES = {"zero_optimization.stage": 1, "pipeline.stages": 1, "activation_checkpointing.every_n_layers": 1}


def sources() -> Iterator[dict[str, Any]]:
    """Data of every file that loads: typical ones, those of `configs/`, and the corpus where it is."""
    yield from TYPICAL.values()
    for folder in (REPO / "configs", CORPUS):
        for path in sorted(folder.glob("*.json")):
            try:
                load_config(path)
            except ConfigError:
                continue
            yield read_config(path).data


def some_ranks(config: DistConfig, model: Any) -> DistConfig:
    """Resolved for the first number of ranks that the file's sizes divide."""
    problems = []
    for ranks in (8, 1, 64):
        try:
            return resolved_config(config, ranks, None, model)
        except ConfigError as error:
            problems.append(error)
    raise problems[0]


def test_every_file_that_loads_is_resolved_for_a_plan_for_layouts_and_for_tuning(tmp_path: Path) -> None:
    model: Any = make_model("llama")
    for data in sources():
        config = load_config(data)
        resolved = some_ranks(config, model)
        settled = {path: resolved.value_at(path) for path in resolved.sources if path not in _FOUND_LATER}
        assert "auto" not in settled.values(), data
        base = layouts.base_of_layouts({**data, "hf_dist": {**(data.get("hf_dist") or {}), "optimizer_over": "all"}})
        assert "optimizer_over" not in base["hf_dist"]
        resolved_config(load_config(base), 1, 1, model)
        (text,) = suggestions("x", base, tmp_path, [CHANGES]).values()
        assert json.loads(text)["zero_optimization"]["stage"] == 1
        try:
            assert next(tune._candidates(data, tmp_path))
        except ConfigError as error:
            assert all(problem.path for problem in error.problems)
        loop = without_trainer(config, 1)
        assert loop.optimizer is None and not [path for path in loop.sources if path.startswith("scheduler")]


@pytest.mark.parametrize("name", TYPICAL)
def test_every_command_takes_a_typical_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("llama").config.save_pretrained(tmp_path / "llama")  # type: ignore[operator, union-attr]
    file, model = tmp_path / "ds.json", ["--model", str(tmp_path / "llama"), "--seq", "16"]
    file.write_text(json.dumps(TYPICAL[name]))
    for words in (
        ["config", "check", str(file)],
        ["config", "explain", str(file)],
        ["schedule", "--config", str(file), "--stages", "2"],  # a file without a pipeline has no schedule
        ["mesh", "--config", str(file), "--ranks", "2", *model],
        *([["plan", "--config", str(file), "--world-size", "2", *model]] if name in PLANNED else []),
    ):
        try:
            app(words, standalone_mode=False)
        except HfDistError as error:
            pytest.fail(f"{words[0]}: {error}")
        except typer.Exit as end:
            assert end.exit_code == 0
        assert capsys.readouterr().out
