"""Every shipped config is described; every example that trains with the Trainer runs three steps over two processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.ecosystem.tiny import save_example_models
from tests.examples.running import REPO, TIMEOUT_S, run, train

CONFIGS = sorted((REPO / "configs").glob("*.json"))
# By default the examples' own files are the text: to look through the standard library costs every process half a second.
TEXT = ("--vocab_size", "512", *(() if FULL_GRID else ("--text_dir", "examples", "--per_device_train_batch_size", "2")))
LITTLE = "60000" if FULL_GRID else "12000"


def test_all_configs_are_described_in_their_readme() -> None:
    readme = (REPO / "configs" / "README.md").read_text()
    assert CONFIGS
    assert [path.name for path in CONFIGS if f"`{path.name}`" not in readme] == []


def test_no_two_examples_save_to_the_same_folder() -> None:
    folders = [
        folder
        for path in sorted((REPO / "examples").glob("*.*"))
        if path.suffix in (".py", ".sh") and path.name != "classify.py"  # which reads one
        for folder in set(re.findall(r"[\"=](runs/\w+)", path.read_text()))
    ]
    assert len(folders) > 8 and sorted(set(folders)) == sorted(folders)


def test_the_process_that_writes_the_small_model_draws_the_same_numbers_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its adapters would differ from those of the others, and the first run's from the second's."""
    monkeypatch.syspath_prepend(str(REPO / "examples"))
    import small_causal_lm  # type: ignore[import-not-found, unused-ignore]

    monkeypatch.setattr(small_causal_lm, "read_texts", lambda *a, **k: ["def f(a): return a"] * 40)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    small_causal_lm.write_small_causal_lm(tmp_path / "start")
    assert (tmp_path / "start" / "model.safetensors").exists() and torch.equal(torch.rand(4), expected)


# By default torchrun's agent, which is accelerate's launcher, too, is started for real in `ecosystem/test_run.py`.
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_text_classification_trains_saves_and_classifies(tmp_path: Path) -> None:
    small = ["--max_per_label", "16", "--num_labels", "4", "--max_length", "32"]
    if not FULL_GRID:  # another encoder than that of 22 million parameters
        save_example_models(tmp_path / "models")
        small += ["--model_name_or_path", str(tmp_path / "models" / "encoder")]
    said = train("finetune_text_classification.py", "zero3.json", tmp_path, *small, is_real=FULL_GRID)
    assert "accuracy before:" in said
    said = run("examples/classify.py", str(tmp_path), "Run a coroutine in the event loop.")
    assert said.count("%") >= 3


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    "config", ["pp_zero1.json", *["zero2.json", "zero3_fp32.json", "zero3_offload.json"] * FULL_GRID]
)
def test_causal_lm_trains_samples_and_saves(tmp_path: Path, config: str) -> None:
    small = ("--max_characters", "100000" if FULL_GRID else LITTLE, "--block_size", "32", "--sample_tokens", "4")
    said = train("train_clm.py", config, tmp_path, *small, *TEXT)
    assert "perplexity before:" in said
    assert "sample: 'def " in said
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_mixture_has_its_experts_on_two_processes(tmp_path: Path) -> None:
    small = ("--max_characters", LITTLE, "--block_size", "32", "--logging_steps", "1")
    said = train("mixture.py", "experts.json", tmp_path, *small, *TEXT)
    assert "8 of 16 experts of 4 layers (Qwen3MoeExperts) on each of 2 ranks" in said
    assert "rows of the busiest expert over the mean:" in said
    AutoModelForCausalLM.from_pretrained(tmp_path)


@FULL_GRID_ONLY  # the same script as above, with a config that `tests/test_configs.py` trains with
def test_matrices_are_cut_between_two_processes(tmp_path: Path) -> None:
    small = ("--max_characters", LITTLE, "--block_size", "32", "--logging_steps", "1")
    said = train("train_clm.py", "tp_zero2.json", tmp_path, *small, *TEXT)
    assert "2 ranks = dp_replicate 1 x dp_shard 1 x tp 2" in said
    assert "of the parameters are split (tp_plan of" in said
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_long_packed_rows_are_shared_by_two_processes(tmp_path: Path) -> None:
    small = ("--max_characters", LITTLE, "--block_size", "256", *TEXT)
    batch = ("--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1")
    said = train("long_text.py", "long_context.json", tmp_path, *small, *batch)
    assert "each row on 2 ranks (ulysses 2)" in said
    assert "rows of 256 tokens; loss before:" in said
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_teacher_on_a_rank_of_its_own_grades_a_student(tmp_path: Path) -> None:
    """As `configs/roles.json`, with one rank for each role, and models in a folder of the test."""
    run("examples/distill_trl.py", "--prepare_models", str(tmp_path))
    config = json.loads((REPO / "configs" / "roles.json").read_text())
    config["hf_dist"]["roles"]["teacher"] |= {"ranks": 1, "config": {}, "model": str(tmp_path / "teacher")}
    path = tmp_path / "roles.json"
    path.write_text(json.dumps({**config, "bf16": {"enabled": False}}))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hf_dist.run"]
    script = ["--config", str(path), "examples/distill_trl.py", "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    script += ["--model_name_or_path", str(tmp_path / "student")]
    said = run(*launcher, *script, "--max_steps", "2", "--max_completion_length", "4", "--bf16", "false")
    assert "role teacher: answered" in said and "loss: " in said
    assert "this is trainer, rank 0 of the start; teacher on rank 1" in said
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
