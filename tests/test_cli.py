"""The `hf-dist` command, as a user starts it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hf_dist.accelerate_launch import words_of_launch
from hf_dist.cli import doctor, launch
from hf_dist.config import LauncherSettings
from hf_dist.errors import ConfigError
from hf_dist.ports import HeldPort
from tests import processes

REPO = Path(__file__).resolve().parent.parent


def hf_dist(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process and return what it said."""
    return processes.run(
        [sys.executable, "-m", "hf_dist.cli", *arguments],
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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python /bin/accelerate launch --config_file a.yaml t.py", "--config_file a.yaml t.py"),
        ("python -X dev /bin/accelerate-launch t.py launch", "t.py launch"),
        ("python -m accelerate.commands.launch -m hf_dist.run t.py", "-m hf_dist.run t.py"),
        ("python -m accelerate.commands.accelerate_cli launch t.py", "t.py"),
        ("python /bin/accelerate env", None),
        ("python train.py --data accelerate", None),
        ("python", None),
    ],
)
def test_only_accelerates_launcher_is_recognized(command: str, words: str | None) -> None:
    assert words_of_launch(command.split()) == (None if words is None else words.split())


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="accelerate starts it")
def test_accelerate_launch_with_a_yaml_of_deepspeed_continues_or_says_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text(YAML.replace("LAUNCHER", "standard").replace("MACHINES", "1"))
    (tmp_path / "train.py").write_text(
        "import os, sys; open(f'rank{os.environ[\"RANK\"]}', 'w').write(repr(sys.argv[1:]))"
    )
    with HeldPort() as port:
        options = ["--machine_rank", "0", "--num_processes", "2", "--main_process_port", str(port.number)]
        told = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        for words in (["train.py", "a b"], ["-m", "hf_dist.run", "train.py", "a b"]):
            arguments = ["--config_file", "zero3.yaml", *options, *words]
            command = [sys.executable, "-m", "accelerate.commands.launch", *arguments]
            done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True)
            if words[0] == "-m":
                assert done.returncode == 0, done.stderr
                assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["['a b']"] * 2
            else:
                first = f"hf_dist needs no deepspeed. Type: {shlex.join(['hf-dist', 'launch', *arguments])}"
                assert done.returncode == 1 and first in done.stderr.splitlines()
                assert done.stderr.index(first) < done.stderr.index("Traceback")
