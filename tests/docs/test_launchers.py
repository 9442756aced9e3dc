"""The page about launchers: manifests have the fields that matter, commands parse, the variables it lists lead to ranks."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from hf_dist.dist.launch import detect_launch
from tests.docs.test_guides import REPO, check_script

PAGE = (REPO / "examples" / "guides" / "launchers.md").read_text(encoding="utf-8")
MANIFESTS: dict[str, Any] = {
    loaded.get("kind", "SkyPilot"): loaded
    for loaded in map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S))
}
RANK, SIZE, LOCAL, PER_MACHINE = 5, 8, 1, 4


def command_of(kind: str) -> list[str]:
    """What a manifest runs."""
    manifest = MANIFESTS[kind]
    if kind == "TrainJob":
        return list(manifest["spec"]["trainer"]["command"])
    if kind == "PyTorchJob":
        return list(manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"])
    text = re.sub(r"\$\([^)]*\)", "10.0.0.1", manifest["run"].replace("\\\n", " "))
    values = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1"}
    return shlex.split(re.sub(r"\$(\w+)", lambda found: values[found[1]], text))


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "SkyPilot"])
def test_manifests_start_torchrun_on_two_machines_of_eight(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command_of(kind)
    assert words[0] == "torchrun"
    if kind != "SkyPilot":  # what the operators set
        for name, value in (("NNODES", "2"), ("NPROC_PER_NODE", "8"), ("NODE_RANK", "1"), ("MASTER_ADDR", "10.0.0.1")):
            monkeypatch.setenv(f"PET_{name}", value)
    asked = get_args_parser().parse_args(words[1:])
    assert (asked.nnodes, asked.nproc_per_node, asked.node_rank, asked.master_addr) == ("2", "8", 1, "10.0.0.1")
    check_script([asked.training_script, *asked.training_script_args])


def test_manifests_have_the_fields_that_the_operators_read() -> None:
    job = MANIFESTS["TrainJob"]
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = job["spec"]["trainer"]
    # An API server drops others: manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml of kubeflow/trainer 8c0f505.
    assert set(job["spec"]) <= {"runtimeRef", "trainer", "initializer", "runtimePatches", "suspend", "managedBy"}
    assert set(trainer) <= {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    old = MANIFESTS["PyTorchJob"]
    assert old["apiVersion"] == "kubeflow.org/v1" and old["spec"]["nprocPerNode"] == "8"
    parts = old["spec"]["pytorchReplicaSpecs"]
    assert sum(part["replicas"] for part in parts.values()) == 2 and "Master" in parts
    assert {part["restartPolicy"] for part in parts.values()} == {"OnFailure"}, "ExitCode takes 75 for a failure"
    for part in parts.values():
        pod = part["template"]["spec"]
        assert pod["containers"][0]["name"] == "pytorch", "the operator looks for a container of this name"
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    sky = MANIFESTS["SkyPilot"]
    assert sky["num_nodes"] == 2 and sky["resources"]["use_spot"] is True


def test_the_batch_script_asks_for_a_signal_and_goes_on_after_code_75(tmp_path: Path) -> None:
    script = next(text for text in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S) if "#SBATCH" in text)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.M))
    assert options["signal"].startswith("USR1@") and "requeue" in options
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    tools = {"srun": 'exit "$CODE"', "scontrol": f'echo "$@" >>{tmp_path}/said'}
    for name, line in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for code in (0, 75, 1):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "SLURM_JOB_ID": f"job{code}"}
        subprocess.run(["bash", "-c", script], env=env, check=False)
    assert (tmp_path / "said").read_text() == "requeue job75\n"


ROWS = [
    [re.findall(r"[A-Z][A-Z_]{3,}\w*", cell) for cell in line.split("|")[2:4]]
    for line in PAGE.partition("## What is read")[2].splitlines()
    if line.startswith("|") and ("RANK" in line or "SLURM_" in line)
]


def value_of(name: str) -> str:
    """What a launcher would set on rank 5 of 8, the second on the second machine of two."""
    if "NODELIST" in name:
        return "gpu[01-02]"
    if "ADDR" in name:
        return "gpu01"
    if "PORT" in name:
        return "29500"
    local = "LOCAL" in name
    if name.endswith(("SIZE", "TASKS", "NRANKS")):
        return str(PER_MACHINE if local else SIZE)
    return str(LOCAL if local else RANK)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][0])
def test_the_variables_of_each_launcher_lead_to_the_rank(row: list[list[str]]) -> None:
    assert len(ROWS) == 5
    own, address = row
    env = {name: value_of(name) for name in [*own, *address]}
    launch = detect_launch(env)
    assert (launch.rank, launch.world_size) == (RANK, SIZE)
    assert launch.local_rank == (LOCAL if any("LOCAL" in name for name in own) else RANK)
    assert env["MASTER_ADDR"] == "gpu01" and env["MASTER_PORT"].isdigit()
