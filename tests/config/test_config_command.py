"""`hf-dist config`, as a user calls it: exit codes, JSON for programs, no torch, under a second."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from hf_dist.config import load_config, resolve_without_trainer
from hf_dist.config.json_schema import children
from hf_dist.config.unknown import SECTIONS
from hf_dist.tools.cli import main
from hf_dist.tools.cli.script_arguments import HF_DEFAULTS
from tests import processes
from tests.covering import FULL_GRID

REPO = Path(__file__).resolve().parents[2]
MAX_CPU_SECONDS = 1.0
MAX_VALIDATION_SECONDS = 0.05


def started(*arguments: str, columns: int = 120) -> subprocess.CompletedProcess[str]:
    """`hf-dist config ...` in a new process."""
    command = [sys.executable, "-m", "hf_dist.tools.cli", "config", *arguments]
    environment = {**os.environ, "COLUMNS": str(columns)}
    return processes.run(command, cwd=REPO, env=environment, timeout=120)


def called(*arguments: str, columns: int = 120) -> subprocess.CompletedProcess[str]:
    """The same in this process: what takes time in a new one is its imports."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = os.getcwd()
    with (
        mock.patch.object(sys, "argv", ["hf-dist", "config", *arguments]),
        mock.patch.dict(os.environ, {"COLUMNS": str(columns)}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.chdir(REPO)
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


run = started if FULL_GRID else called


def test_check_alone_prints_what_the_file_says() -> None:
    result = started("check", "configs/zero3.json")
    assert result.returncode == 0, result.stderr
    assert "zero_optimization.stage" in result.stdout and '"auto"' in result.stdout
    assert result.stdout.splitlines()[-1] == "No problem: configs/zero3.json is valid."


def test_check_with_the_arguments_of_a_script_fills_auto_and_finds_disagreements(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 64}}')
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},\n'
        ' "gradient_clipping": 0.5}'
    )
    arguments = ("check", str(path), "--world-size", "4", "--model", str(tmp_path), "--")
    result = run(*arguments, "--max_grad_norm=0.5", "--per_device_train_batch_size", "2", "--bf16", "--data_dir", "x")
    assert result.returncode == 0, result.stderr
    for words in ("train_batch_size                      8", "reduce_bucket_size  4096", "TrainingArguments.bf16"):
        assert words in result.stdout
    result = run(*arguments, "--max_grad_norm", "1.0")
    assert result.returncode == 1
    assert "gradient_clipping: 0.5 differs from TrainingArguments.max_grad_norm = 1.0" in result.stderr
    assert "Traceback" not in result.stderr


def test_check_for_programs_prints_json_either_way(tmp_path: Path) -> None:
    good = json.loads(run("check", "configs/zero2.json", "--json", "--world-size", "2").stdout)
    assert good["ok"] and good["values"]["zero_optimization.stage"] == {"value": 2, "source": "file"}
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {\n"stge": 3}, "steps_per_print": 10}')
    result = run("check", str(path), "--json")
    bad = json.loads(result.stdout)
    assert result.returncode == 1 and not bad["ok"]
    (problem,) = bad["problems"]
    assert problem["path"] == "zero_optimization.stge" and problem["file"] == f"{path}:2"
    assert problem["fix"] == 'Did you mean "stage"?'


def test_explain_says_of_every_key_where_it_comes_from_and_what_it_does(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {\n"prefetch_bucket_size": 5, "stage": 3},\n "steps_per_print": 10}')
    rows = {row["key"]: row for row in json.loads(run("explain", str(path), "--json").stdout)}
    assert rows["zero_optimization.stage"]["source"] == "line 2"
    assert "2 also gradients, 3 also weights" in rows["zero_optimization.stage"]["meaning"]
    assert (
        "written as zero_optimization.prefetch_bucket_size"
        in rows["zero_optimization.stage3_prefetch_bucket_size"]["meaning"]
    )
    assert rows["steps_per_print"]["meaning"] == "no effect: use logging_steps of TrainingArguments"
    assert rows["fp16.hysteresis"]["source"] == "default" and len(rows) > 60
    text = run("explain", str(path)).stdout
    assert "no effect: use logging_steps of TrainingArguments" in text


def test_explain_calls_arguments_of_the_file_by_their_lines_and_no_section_a_default(tmp_path: Path) -> None:
    path = write(tmp_path, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2}})
    rows = {row["key"]: row for row in json.loads(run("explain", path, "--json").stdout)}
    assert rows["optimizer.params.lr"] == {
        "key": "optimizer.params.lr",
        "value": 1e-4,
        "source": "line 5",
        "meaning": "learning rate at the peak.",
    }
    assert "optimizer.params" not in rows and "zero_optimization" not in rows


def test_explain_shows_what_was_written_and_what_deepspeed_would_do(tmp_path: Path) -> None:
    data = {
        "gradient_accumulation_steps": "8",
        "steps_per_print": 10,
        "zero_optimization": {"stage": 3},
        "_note": "mine",
    }
    path = write(tmp_path, data)
    rows = {row["key"]: row for row in json.loads(run("explain", path, "--json").stdout)}
    assert rows["gradient_accumulation_steps"]["value"] == 8
    assert rows["gradient_accumulation_steps"]["meaning"].endswith('per optimizer step. ("8" is read as 8)')
    assert rows["steps_per_print"]["value"] == 10 and rows["_note"]["meaning"] == "a comment"
    assert "max_grad_norm (1.0 by default) clips" in rows["gradient_clipping"]["differs"]
    text = run("explain", path).stdout
    assert "Differs from DeepSpeed:\n  gradient_clipping: " in text


@pytest.mark.parametrize("columns", [60, 120])
def test_explain_is_short_and_fits_the_terminal(columns: int) -> None:
    """A key whose value and source are one word may be longer than a line; the text is not."""
    for file in sorted((REPO / "configs").glob("*.json")):
        text = run("explain", str(file), columns=columns).stdout
        lines = text.splitlines()
        assert len(lines) < 100 and lines[-1].endswith("explains one."), file
        assert max(len(line) for line in lines if " " in line.strip() and not line.startswith("Conf")) <= columns
        assert "(default)" not in text and "a comment" not in text and "The file sets:" in text


def test_explain_lists_every_key_or_those_that_are_asked_for() -> None:
    whole = run("explain", "configs/zero3.json", "--all").stdout
    assert all(f"  {key}: " in whole for key in ("fp16.hysteresis", "zero_optimization.offload_param.device"))
    few = run("explain", "configs/zero3.json", "offload_param", "zero_optimization.stage").stdout
    keys = [line.split(":")[0].strip() for line in few.splitlines() if line.startswith("  ") and line[2] != " "]
    assert "zero_optimization.stage" in keys and len(keys) > 4
    assert all(key.startswith(("zero_optimization.offload_param.", "zero_optimization.stage")) for key in keys)


def test_explain_takes_the_arguments_of_a_script_after_a_file() -> None:
    options = ("--world-size", "4", "--", "train.py", "--learning_rate", "1e-4", "--max_grad_norm", "0.5")
    text = run("explain", "configs/zero2.json", *options).stdout
    assert "4 processes: dp_shard 4; 4 data ranks" in text
    assert "gradient_clipping: 0.5  (auto <- TrainingArguments.max_grad_norm)" in text


def test_explain_of_a_key_needs_no_file() -> None:
    """Every key that a file may have is explained, under its path and under its last word."""
    keys = [path for section in ("", *SECTIONS) for _, path in children(section)]
    lines = run("explain", *keys).stdout.splitlines()
    assert set(keys) <= set(lines)
    ends = [key.rpartition(".")[2] for key in keys]
    ambiguous = {key for key, end in zip(keys, ends, strict=True) if end in keys and end != key}  # `fp16` is a section
    assert set(keys) - ambiguous <= set(run("explain", *dict.fromkeys(ends)).stdout.splitlines())
    stage = run("explain", "zero_optimization.stage").stdout
    assert "Takes one of 0, 1, 2, 3.\n  Default: 0." in stage
    alias = run("explain", "prefetch_bucket_size").stdout
    assert "another spelling of" in alias and "elements gathered before they are needed" in alias
    (row,) = json.loads(run("explain", "overlap_comm", "--json").stdout)
    assert row["key"] == "zero_optimization.overlap_comm" and row["takes"] and row["meaning"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stge",), 'stge: is no key of a config. Did you mean "stage"?'),
        (("configs/zero2.json", "configs/zero3.json"), "configs/zero3.json is a second file"),
        (("configs/zero9.json",), "does not exist"),
        (("configs/zero3.json", "overlap_com"), 'Did you mean "overlap_comm"?'),
    ],
)
def test_explain_names_what_it_does_not_know(words: tuple[str, ...], said: str) -> None:
    result = run("explain", *words)
    assert result.returncode == 1 and said in result.stderr and "Traceback" not in result.stderr


def test_check_names_slips_of_the_file_sizes_and_disagreements_in_one_round(tmp_path: Path) -> None:
    data = {
        "gradient_clipping": 0.5,
        "grad_accum_step": 2,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3, "overlap_com": True},
    }
    arguments = ("--json", "--world-size", "8", "--", "--gradient_accumulation_steps", "4")
    problems = json.loads(run("check", write(tmp_path, data), *arguments).stdout)["problems"]
    assert [problem["path"] for problem in problems] == [
        *("grad_accum_step", "zero_optimization.overlap_com", "zero_optimization.zero_hpz_partition_size"),
        *("grad_accum_step", "gradient_clipping"),
    ]


def write(folder: Path, data: dict[str, object]) -> str:
    """The path of a config with `data`, one key a line."""
    path = folder / "ds.json"
    path.write_text(json.dumps(data, indent=0))
    return str(path)


def test_check_names_the_one_total_that_fits_the_ranks_where_they_are_known(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 17, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    path = write(tmp_path, sizes)
    assert "Set it to 16 or another multiple of 8" in run("check", path).stderr
    known = run("check", path, "--world-size", "2").stderr
    assert "x data ranks (2) = 16" in known and "Set train_batch_size to 16" in known and "multiple" not in known
    assert run("check", write(tmp_path, {**sizes, "train_batch_size": 16}), "--world-size", "2").returncode == 0


def test_check_counts_data_ranks_and_refuses_stages_that_do_not_divide(tmp_path: Path) -> None:
    path = write(tmp_path, {"train_batch_size": 16, "pipeline": {"stages": 2}})
    script = ("--", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    good = run("check", path, "--world-size", "4", *script)
    assert good.returncode == 0, good.stderr
    result = run("check", path, "--world-size", "2", *script)
    assert result.returncode == 1
    assert "x data ranks (1) = 8" in result.stderr and "2 processes in 2 stages are 1 data ranks" in result.stderr
    bad = json.loads(run("check", path, "--json", "--world-size", "3").stdout)
    (problem,) = bad["problems"]
    assert problem["path"] == "pipeline.stages" and problem["file"] == f"{path}:4"
    assert problem["expected"] == "does not divide the 3 processes of this job"


def test_explain_fills_the_batch_by_data_ranks_and_says_what_new_sections_do(tmp_path: Path) -> None:
    data = {
        "train_batch_size": "auto",
        "pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "reshard_per_microbatch": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "activation_checkpointing": {"selective": True, "partition_activations": True},
        "hf_dist": {"tiled_loss": True},
    }
    arguments = ("--json", "--world-size", "4", "--", "--per_device_train_batch_size", "2")
    rows = {row["key"]: row for row in json.loads(run("explain", write(tmp_path, data), *arguments).stdout)}
    assert rows["train_batch_size"]["value"] == 4
    assert rows["pipeline.schedule"]["meaning"] == 'no effect: with "virtual_stages" 1 it is "1f1b"'
    assert rows["pipeline.reshard_per_microbatch"]["meaning"] == "no effect: read at stages 2 and 3 only"
    assert rows["zero_optimization.offload_optimizer.device"]["meaning"] == '"none", "cpu" or "nvme".'
    assert rows["zero_optimization.offload_param.device"]["meaning"] == "no effect: read at stage 3 only"
    assert "matrix products" in rows["activation_checkpointing.selective"]["meaning"]
    assert rows["activation_checkpointing.partition_activations"]["meaning"].startswith("no effect: ")
    assert "run in tiles" in rows["hf_dist.tiled_loss"]["meaning"]


def test_convert_keeps_sections_of_ours_and_turns_checkpointing_on(tmp_path: Path) -> None:
    source, output = tmp_path / "accelerate.yaml", tmp_path / "out.json"
    source.write_text(
        "deepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\n  offload_optimizer_device: cpu\n"
        "  pipeline: {stages: 2, schedule: zb_h1}\n  hf_dist: {tiled_loss: true}\n"
    )
    result = run("convert", str(source), "--output", str(output))
    assert result.returncode == 0, result.stderr
    config = load_config(output)
    assert (config.pipeline.stages, config.pipeline.schedule, config.hf_dist.tiled_loss) == (2, "zb_h1", True)
    assert config.zero_optimization.offload_param.device == "cpu"
    source.write_text("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_activation_checkpointing: true\n")
    result = run("convert", str(source), "--output", str(output))
    assert result.returncode == 0, result.stderr
    assert load_config(output).activation_checkpointing.every_n_layers == 1


def test_schema_prints_json() -> None:
    assert json.loads(run("schema").stdout)["properties"]["aio"]["type"] == ["object", "null"]


def test_convert_writes_a_config_and_says_what_was_left_out(tmp_path: Path) -> None:
    source, output = tmp_path / "accelerate.yaml", tmp_path / "ds.json"
    source.write_text(
        "mixed_precision: bf16\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_version: 1\n"
    )
    result = run("convert", str(source), "--output", str(output))
    assert result.returncode == 0, result.stderr
    assert load_config(output).zero_optimization.stage == 2
    assert "fsdp_config.fsdp_version: there is one engine" in result.stderr
    printed = run("convert", "--fsdp", "full_shard auto_wrap")
    assert json.loads(printed.stdout)["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize("arguments", [(), ("missing.yaml",), ("pyproject.toml",), ("--fsdp", "ful_shard")])
def test_convert_of_nothing_useful_is_one_sentence(arguments: tuple[str, ...]) -> None:
    # One error that leaves a process, too: its words, its exit code.
    result = (started if arguments == ("missing.yaml",) else run)("convert", *arguments)
    assert result.returncode == 1 and result.stderr and "Traceback" not in result.stderr


def test_the_command_needs_no_torch_and_less_than_a_second() -> None:
    code = (
        "import sys; sys.argv = ['hf-dist', 'config', 'check', 'configs/zero3.json']\n"
        "from hf_dist.tools.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules), 'imported'"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = processes.run([sys.executable, "-c", code], cwd=REPO, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    # CPU time: on a busy machine the wall clock measures the others.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_CPU_SECONDS


def test_validation_takes_less_than_50_ms() -> None:
    times = []
    for _ in range(5):
        start = time.process_time()
        resolve_without_trainer(load_config(REPO / "configs" / "zero3.json"), hidden_size=64)
        times.append(time.process_time() - start)
    assert min(times) < MAX_VALIDATION_SECONDS


def test_the_defaults_of_the_arguments_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    for name, value in HF_DEFAULTS.items():
        assert fields[name].default == value, name


def test_schedule_says_where_there_is_nothing_to_draw(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    for arguments, words in (
        (["--config", str(tmp_path / "ds.json")], "is no pipeline"),
        (["--schedule", "interleaved_1f1b", "--virtual-stages", "1"], 'the same as "1f1b"'),
    ):
        with mock.patch.object(sys, "argv", ["hf-dist", "schedule", *arguments]), pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err
