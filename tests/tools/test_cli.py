"""The `hf-dist` command, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_dist import run as runner
from hf_dist.config import LauncherSettings
from hf_dist.errors import ConfigError
from hf_dist.tools.cli import doctor, launch
from tests import processes

REPO = Path(__file__).resolve().parents[2]


def hf_dist(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process and return what it said."""
    return processes.run(
        [sys.executable, "-m", "hf_dist.tools.cli", *arguments],
        cwd=REPO,
        env={**os.environ, "COLUMNS": "120", **environment},
        timeout=120,
    )


def test_env_prints_versions_devices_and_launch_variables() -> None:
    result = hf_dist("env", RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="localhost", MASTER_PORT="29400")
    assert result.returncode == 0, result.stderr
    for word in ("python", "torch", "transformers", "accelerate", "cpu", "backends", "gloo", "MASTER_PORT", "29400"):
        assert word in result.stdout
    assert "rank 1 of 4, launcher: torchrun" in result.stdout


def test_doctor_tests_a_group_and_finds_nothing_wrong() -> None:
    result = hf_dist("doctor", "--ranks", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in ("transformers", "interfaces", "backends", "3 ranks", "GB/s sent per rank", "nothing is wrong"):
        assert word in result.stdout


def test_doctor_knows_pairs_of_versions_that_do_not_go_together() -> None:
    found = {"transformers": "5.23.0", "peft": "0.17.1", "accelerate": "0.9"}
    problems = "\n".join(doctor.version_problems(found))
    assert "transformers 5.23.0 with peft 0.17.1: peft imports names" in problems
    assert "needs accelerate" in problems, "what a package declares itself is checked, too"
    assert doctor.version_problems({"transformers": "5.23.0", "peft": "0.21.2"}) == []


def test_config_prints_the_resolved_table() -> None:
    result = hf_dist("config", "check", "configs/zero3.json")
    assert result.returncode == 0, result.stderr
    assert "zero_optimization.stage" in result.stdout


def test_config_of_a_wrong_file_names_the_key_and_exits_with_1(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 7}}))
    result = hf_dist("config", "check", str(path))
    assert result.returncode == 1
    assert "zero_optimization.stage" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("text", [None, "{not json"], ids=["missing", "not_json"])
def test_config_that_cannot_be_read_exits_with_1_and_its_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "unreadable.json"
    if text is not None:
        path.write_text(text)
    result = hf_dist("config", "check", str(path))
    assert result.returncode == 1
    assert "unreadable.json" in result.stderr
    assert "Traceback" not in result.stderr


YAML = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {deepspeed_multinode_launcher: LAUNCHER, zero_stage: 3, offload_optimizer_device: cpu}
distributed_type: DEEPSPEED
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29511
mixed_precision: bf16
num_machines: MACHINES
num_processes: 8
use_cpu: false
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`launched(words, machines, launcher)`: what torchrun would be asked to start, and accelerate's variables."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    from torch.distributed import run

    found: dict[str, Any] = {}
    monkeypatch.setattr(run, "run", lambda arguments: found.update(vars(arguments), env=dict(os.environ)))

    def start(words: list[str], machines: int = 1, launcher: str = "standard") -> dict[str, Any]:
        path = tmp_path / "zero3.yaml"
        path.write_text(YAML.replace("LAUNCHER", launcher).replace("MACHINES", str(machines)))
        launch.launch(["--config_file", str(path), *words])
        return found

    return start


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (["train.py", "--a", "-m"], ["train.py", "--a", "-m"]),
        (["-m", "trl.scripts.sft", "--config_file", "x"], ["-m", "trl.scripts.sft", "--config_file", "x"]),
        (["-m", "hf_dist.run", "--config", "a.json", "train.py"], ["--config", "a.json", "train.py"]),
    ],
)
def test_launch_reads_the_yaml_of_accelerate_without_deepspeed(words: list[str], run: list[str], launched: Any) -> None:
    before = dict(os.environ)
    found = launched(words, machines=2)
    assert (found["module"], found["training_script"], found["training_script_args"]) == (True, "hf_dist.run", run)
    assert (found["nnodes"], found["nproc_per_node"], str(found["node_rank"])) == ("2", "4", "1")
    settings = LauncherSettings.from_environment(found["env"])
    assert settings is not None
    given = {key: setting.value for key, setting in settings.settings.items()}
    assert given == {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"}
    assert found["env"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("words", "launcher", "says"),
    [
        (["--cpu", "train.py"], "standard", "--cpu"),
        (["--no_python", "train"], "standard", "--no_python"),
        (["train.py"], "pdsh", 'deepspeed_multinode_launcher: pdsh .*Set it to "standard"'),
    ],
)
def test_launch_refuses_what_would_drop_the_configuration(
    words: list[str], launcher: str, says: str, launched: Any
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        launched(words, machines=2, launcher=launcher)


def test_a_script_that_does_not_exist_is_named_with_similar_ones(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in ("trainn.py", "train"):
        says = f"script: {tmp_path}/{name} does not exist. Did you mean train.py?"
        with pytest.raises(ConfigError, match=re.escape(says)):
            launch.launch([name])
        with pytest.raises(ConfigError, match=re.escape(says)):
            runner.main([name])


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (subprocess.CalledProcessError(75, ["python"]), 75, ""),
        (subprocess.CalledProcessError(-9, ["python"]), 137, ""),
        (ChildFailedError("train.py", {0: ProcessFailure(0, 1, 75, "")}), 1, "="),
        (SignalException("got signal: 15", signal.SIGTERM), 143, ""),
    ],
)
def test_a_job_that_fails_leaves_no_traceback_of_its_launcher(
    error: Exception, code: int, last: str, launched: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(arguments: object) -> None:
        raise error

    monkeypatch.setattr("torch.distributed.run.run", fail)
    with pytest.raises(SystemExit) as left:
        launched(["train.py"])
    assert left.value.code == code
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.strip()[-1:] == last


def test_the_launcher_of_accelerate_says_what_the_guide_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours runs before it ends. Should it say something else one day, the guide and the doctor have to follow."""
    from accelerate.commands import launch as stock

    monkeypatch.setattr(stock, "is_deepspeed_available", lambda: False)
    (tmp_path / "zero3.yaml").write_text(YAML.replace("LAUNCHER", "standard").replace("MACHINES", "1"))
    words = ["--config_file", str(tmp_path / "zero3.yaml"), "train.py"]
    with pytest.raises(ImportError) as caught:
        stock.launch_command(stock.launch_command_parser().parse_args(words))
    page = (REPO / "examples" / "guides" / "launchers.md").read_text()
    assert f"``ImportError: {caught.value}``" in page


def test_the_doctor_tells_what_starts_a_yaml_that_says_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "default.yaml"))
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: False)
    assert doctor.launcher_notes() == []
    (tmp_path / "default.yaml").write_text(YAML.replace("LAUNCHER", "standard").replace("MACHINES", "1"))
    assert [note for note in doctor.launcher_notes() if "hf-dist launch" in note and str(tmp_path) in note]
    (tmp_path / "default.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    (note,) = doctor.launcher_notes()
    assert f"hf-dist config convert {tmp_path / 'default.yaml'} --output zero3.json" in note
    (tmp_path / "default.yaml").write_text("distributed_type: MULTI_GPU\n")
    assert doctor.launcher_notes() == []
    (tmp_path / "default.yaml").write_text("{[")
    assert doctor.launcher_notes() == []


@pytest.mark.parametrize("by", ["yaml", "option", "default"])
def test_launch_refuses_what_would_start_without_a_layout_of_hf_dist(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n" if by != "option" else "num_processes: 2\n"
    )
    words = ["--config_file", str(file)] if by != "default" else []
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(file))
    with pytest.raises(ConfigError, match=r"hf_dist reads no layout from it.* -m hf_dist.run --config"):
        launch.launch([*words, *(["--use_fsdp"] if by == "option" else []), "train.py"])
