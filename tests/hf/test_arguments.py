"""Every way to hand over the JSON, and what TrainingArguments are used for beside training."""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

from hf_dist import DistAccelerator, DistArgsMixin, DistTrainingArguments
from hf_dist.dist.axes import Axes
from hf_dist.errors import ConfigError
from tests.hf.recipes import RECIPES

CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.25}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """CONFIG in a file."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def arguments(folder: Path, **changes: Any) -> DistTrainingArguments:
    """On the CPU, with the clipping of CONFIG."""
    return DistTrainingArguments(str(folder), **{"use_cpu": True, "report_to": [], "max_grad_norm": 0.25, **changes})


def stage_of(args: Any) -> int:
    """The stage of arguments that carry a config."""
    assert args.dist is not None
    return int(args.dist.zero_optimization.stage)


# ---- ways in


def test_path_dict_text_and_base64_are_the_same(path: str, tmp_path: Path) -> None:
    text = json.dumps(CONFIG)
    forms: list[Any] = [path, CONFIG, text, base64.urlsafe_b64encode(text.encode()).decode()]
    dumps = [arguments(tmp_path, dist_config=form).dist.model_dump() for form in forms]
    assert all(dump == dumps[0] for dump in dumps)
    assert dumps[0]["zero_optimization"]["stage"] == 2
    assert json.loads(text) == CONFIG, "the user's dict is not changed"


def test_the_deepspeed_argument_works_without_deepspeed(path: str, tmp_path: Path) -> None:
    assert importlib.util.find_spec("deepspeed") is None, "this machine cannot tell"
    for value in (path, CONFIG):
        args = arguments(tmp_path, deepspeed=value)
        assert stage_of(args) == 2
        assert args.deepspeed is None
        assert args.dist_config == value
    with pytest.raises(ConfigError, match="Keep one"):
        arguments(tmp_path, deepspeed=path, dist_config={})


def test_a_variable_serves_scripts_that_cannot_be_edited(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arguments(tmp_path).dist is None
    monkeypatch.setenv("HF_DIST_CONFIG", path)
    assert stage_of(arguments(tmp_path)) == 2
    assert stage_of(arguments(tmp_path, dist_config={"zero_optimization": {"stage": 1}})) == 1


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("gone.json", "gone.json does not exist"),
        ("zero.yaml", "zero.yaml is a YAML file, not a JSON file. Convert it: hf-dist config convert .*zero.yaml"),
    ],
)
def test_a_file_that_is_no_json_is_told_with_who_named_it(
    file: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED")
    name = str(tmp_path / file)
    with pytest.raises(ConfigError, match=f"^config: .*{says}"):
        arguments(tmp_path, dist_config=name)
    monkeypatch.setenv("HF_DIST_CONFIG", name)
    with pytest.raises(ConfigError, match=f"^HF_DIST_CONFIG .*: .*{says}"):
        arguments(tmp_path)
    with pytest.raises(ConfigError, match=f"^HF_DIST_CONFIG .*: .*{says}"):
        DistAccelerator(cpu=True)
    monkeypatch.delenv("HF_DIST_CONFIG")
    under_deepspeed_of_accelerate(monkeypatch, DEEPSPEED_CONFIG_FILE=name)
    with pytest.raises(ConfigError, match=f"^deepspeed_config_file of accelerate's configuration: .*{says}"):
        arguments(tmp_path)


@pytest.mark.parametrize("key", ["pipeline.stages", "tensor_parallel.autotp_size"])
def test_an_argument_that_is_refused_is_named_as_the_argument(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    with pytest.raises(ConfigError) as caught:
        arguments(tmp_path, dist_config={section: {name: 2}}, torch_compile=True)
    said = f"TrainingArguments.torch_compile: true is not available together with {key} above 1"
    assert str(caught.value).startswith(said) and "compile.enabled" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"- compile.enabled: true"):
        arguments(tmp_path, dist_config={section: {name: 2}, "compile": {"enabled": True}}, torch_compile=True)


@pytest.mark.parametrize("option", ["--dist_config", "--deepspeed"])
def test_the_command_line_takes_a_file(option: str, path: str, tmp_path: Path) -> None:
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--max_grad_norm", "0.25", option, path]
    (args,) = HfArgumentParser(DistTrainingArguments).parse_args_into_dataclasses(line)  # type: ignore[arg-type]
    assert stage_of(args) == 2
    assert args.dist.gradient_clipping == 0.25


def test_the_mixin_serves_other_argument_classes(path: str, tmp_path: Path) -> None:
    @dataclass
    class Arguments(DistArgsMixin, Seq2SeqTrainingArguments):
        """As a user would write it."""

    line = ["--output_dir", str(tmp_path), "--use_cpu", "--max_grad_norm", "0.25", "--dist_config", path]
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(  # type: ignore[arg-type]
        [*line, "--predict_with_generate"]
    )
    assert (stage_of(args), args.predict_with_generate) == (2, True)


# ---- "auto" and precision


def test_auto_is_filled_when_the_arguments_are_made(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        dist_config={"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_clipping": "auto"},
        bf16=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
    )
    assert args.dist is not None
    assert (args.dist.dtype, args.dist.train_batch_size, args.dist.gradient_clipping) == ("bf16", 15, 0.25)
    assert args.mixed_precision == "no", "no autocast: the weights are in bf16"


def test_a_later_stock_run_in_the_same_process_keeps_its_autocast(tmp_path: Path) -> None:
    arguments(tmp_path, dist_config={"bf16": {"enabled": True}})
    assert TrainingArguments(str(tmp_path), use_cpu=True, bf16=True).mixed_precision == "bf16"
    trainer = RECIPES["plain"].in_one_process(tmp_path)
    assert not isinstance(trainer.accelerator, DistAccelerator)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ACCELERATE_USE_FSDP", "true"), ("fsdp", "full_shard")],
)
def test_another_engine_beside_ours_is_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"fsdp": value} if name == "fsdp" else {}
    if not options:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}: .* starts another engine"):
        arguments(tmp_path, dist_config=CONFIG, **options)


def under_deepspeed_of_accelerate(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """The variables of `accelerate launch` with a DeepSpeed configuration."""
    for name, value in {"USE_DEEPSPEED": "true", "CONFIG_DS_FIELDS": "none", **changes}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)


def test_a_deepspeed_configuration_of_accelerate_is_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_deepspeed_of_accelerate(monkeypatch, DEEPSPEED_ZERO_STAGE="3", GRADIENT_ACCUMULATION_STEPS="2")
    for _ in range(2):  # the second finds the variables as the first left them
        args = arguments(tmp_path, gradient_accumulation_steps=2)
        assert stage_of(args) == 3 and args.dist.gradient_accumulation_steps == 2
        assert args.dist.source_of("zero_optimization.stage") == "launcher <- ACCELERATE_DEEPSPEED_ZERO_STAGE"
    assert TrainingArguments(str(tmp_path), use_cpu=True).deepspeed_plugin is None, "turned off for stock arguments too"


def test_a_config_file_that_accelerate_names_is_read_and_dist_config_must_agree(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_deepspeed_of_accelerate(monkeypatch, DEEPSPEED_CONFIG_FILE=path)
    assert stage_of(arguments(tmp_path)) == 2
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(ConfigError, match="stage: 2 differs from ACCELERATE_DEEPSPEED_ZERO_STAGE=3"):
        arguments(tmp_path, dist_config=CONFIG)


# ---- monitors


def test_monitors_of_the_config_become_reporters_and_their_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monitors = {
        "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "first"},
        "wandb": {"enabled": True, "project": "theirs", "group": "g"},
    }
    args = arguments(tmp_path, dist_config={**CONFIG, **monitors}, report_to=["wandb"])
    assert args.report_to == ["wandb", "tensorboard"]
    variables = ("TENSORBOARD_LOGGING_DIR", "WANDB_PROJECT", "WANDB_RUN_GROUP")
    assert [os.environ[name] for name in variables] == [str(Path("runs") / "first"), "mine", "g"]
    assert "WANDB_ENTITY" not in os.environ


def test_a_monitor_whose_package_is_missing_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match=r"wandb\.enabled: true needs the package wandb\. pip install wandb"):
        arguments(tmp_path, dist_config={**CONFIG, "wandb": {"enabled": True}})


# ---- other uses of the arguments


@pytest.mark.parametrize("as_file", [True, False])
def test_arguments_are_json_and_can_be_pickled(as_file: bool, path: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, dist_config=path if as_file else CONFIG)
    assert json.loads(json.dumps(args.to_dict()))["dist_config"] == (path if as_file else CONFIG)
    assert json.loads(args.to_json_string())["max_grad_norm"] == 0.25
    assert "dist_config" in args.to_sanitized_dict()
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.dist.model_dump() == args.dist.model_dump()
    assert loaded.to_dict() == args.to_dict()


def test_two_configurations_in_one_process_do_not_mix(tmp_path: Path) -> None:
    first = arguments(tmp_path, dist_config={"zero_optimization": {"stage": 3}})
    second = arguments(tmp_path, dist_config={"zero_optimization": {"stage": 1}})
    assert (stage_of(first), stage_of(second)) == (3, 1)


def test_an_optimizer_in_the_json_has_no_effect_in_a_raw_loop_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_dist"):
        DistAccelerator(cpu=True, dist_config={"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    assert '"optimizer" and "scheduler" of the configuration have no effect' in caplog.text


def test_loaders_count_ranks_by_their_rows_whichever_axis_is_innermost() -> None:
    accelerator = DistAccelerator(cpu=True, dist_config={"zero_optimization": {"stage": 1}})
    accelerator.axes = Axes.of(8, pp=2, tp=2)
    places = []
    for rank in range(8):
        accelerator.state = SimpleNamespace(process_index=rank, num_processes=8)
        places.append((accelerator.process_index, accelerator.num_processes))
    assert places == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2
