"""Examples with TRL, with PEFT, with a loop of one's own, and of a job that goes on elsewhere."""

from __future__ import annotations

import json
import threading
from http.server import ThreadingHTTPServer
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.covering import FULL_GRID
from tests.examples.running import REPO, TIMEOUT_S, config_of, on_few_texts, run, start, train

in_full = pytest.mark.skipif(
    not FULL_GRID, reason="HF_DIST_FULL_GRID=1 runs it; the suite trains the same by other tests"
)
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL needs Python 3.11")


@in_full
@needs_trl
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_sft_with_trl_trains_and_saves(tmp_path: Path) -> None:
    small = ("--max_per_package", "12", "--max_length", "48", "--packing", "True")
    said = train("sft_trl.py", "zero3.json", tmp_path, *small)
    assert "loss before:" in said
    AutoModelForCausalLM.from_pretrained(tmp_path)


@in_full  # the last test starts another one in the same way
@needs_trl
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_an_unmodified_trl_script_runs_sharded(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hf_dist.run"]
    options = ["--deepspeed", "configs/zero3_fp32.json", "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False"]
    said = run(*launcher, "examples/dpo_trl.py", *options, "--max_steps", "3", "--max_length", "32")
    assert "weights sharded, gradients sharded" in said
    assert "the chosen text is preferred in" in said
    AutoModelForCausalLM.from_pretrained(tmp_path)


@in_full
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_lora_trains_saves_and_merges(tmp_path: Path) -> None:
    said = train("finetune_lora.py", "zero3.json", tmp_path, "--max_per_package", "12", "--lora_r", "4")
    assert "parameters trained; loss before:" in said
    assert (tmp_path / "adapter_model.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_loop_without_a_trainer_runs_under_accelerate_launch_and_goes_on(tmp_path: Path) -> None:
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    options = ["--output_dir", str(tmp_path), "--use_cpu", "--max_steps", "3" if FULL_GRID else "1"]
    options += ["--max_per_package", "12" if FULL_GRID else "6"]
    script = [*on_few_texts("examples/no_trainer.py"), "--dist_config", config_of("zero3.json", tmp_path), *options]
    said = run(*launcher, *script, "--num_epochs", "1", ACCELERATE_USE_CPU="true")
    assert "epoch 0: held-out loss" in said
    said = run(*script, "--num_epochs", "2", ACCELERATE_USE_CPU="true")  # "on any number of processes"
    assert "epoch 1: held-out loss" in said and "epoch 0" not in said
    AutoModelForCausalLM.from_pretrained(tmp_path)


@in_full
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_lightning_trains_and_saves_a_folder(tmp_path: Path) -> None:
    options = ["--output_dir", str(tmp_path), "--use_cpu", "--max_steps", "3", "--max_per_package", "12"]
    said = run("examples/lightning_train.py", "--dist_config", "configs/zero3_fp32.json", *options)
    assert "held-out loss" in said
    AutoModelForCausalLM.from_pretrained(tmp_path / "last.ckpt")


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_stopped_run_goes_on_with_other_processes_and_another_stage(tmp_path: Path) -> None:
    epochs = ("--num_train_epochs", "2" if FULL_GRID else "1")  # of 20 steps
    stopped = start("resume_elsewhere.py", "zero3_fp32.json", tmp_path, "--stop_after", "5", *epochs)
    assert stopped.returncode != 0
    assert "SIGUSR1: stopped after step" in stopped.stdout, stopped.stdout[-8000:]
    resumed = start("resume_elsewhere.py", "zero1.json", tmp_path, *epochs, processes=1)
    assert resumed.returncode == 0, resumed.stdout[-8000:]
    assert "resuming from" in resumed.stdout
    assert f"{20 * int(epochs[1])} steps on 1 processes" in resumed.stdout
    AutoModelForCausalLM.from_pretrained(tmp_path)


@in_full
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_stream_of_files_goes_on_with_other_processes(tmp_path: Path) -> None:
    options = ("--data", str(tmp_path / "data"))
    stopped = start("stream_files.py", "streams.json", tmp_path / "out", "--stop_after", "5", *options)
    assert "SIGUSR1: stopped after step" in stopped.stdout, stopped.stdout[-8000:]
    resumed = start("stream_files.py", "streams.json", tmp_path / "out", *options, processes=1)
    assert resumed.returncode == 0, resumed.stdout[-8000:]
    assert "12 steps, loss" in resumed.stdout
    lines = [json.loads(line) for line in (tmp_path / "out" / "hf_dist_rows.jsonl").read_text().splitlines()]
    assert {line["step"]: set(map(tuple, line["lanes"].values())) for line in lines} == {
        step: {(step - 1, step)} for step in range(1, 13)
    }


@needs_trl
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_rewards_come_over_http_from_a_server_that_is_away_for_a_moment(tmp_path: Path) -> None:
    spec = spec_from_file_location("reward_server", REPO / "examples" / "reward_server.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    batches: list[int] = []

    class Busy(module.RewardHandler):  # type: ignore[name-defined,misc]
        """Away at first."""

        def answer(self, status: int, content: Any) -> None:
            """The first batch is not answered."""
            batches.append(len(content.get("rewards", ())))
            super().answer(503 if len(batches) == 1 else status, content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ranks = 2 if FULL_GRID else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m", "hf_dist.run"]
    asked = [*on_few_texts("examples/grpo_remote_rewards.py"), "--deepspeed", "configs/zero3_fp32.json"]
    asked += ["--output_dir", str(tmp_path)]
    small = ["--use_cpu", "--max_steps", "2", "--max_completion_length", "4", "--bf16", "False"]
    url = f"http://127.0.0.1:{server.server_address[1]}/score"
    said = run(*launcher, *asked, *small, REWARD_URL=url, ACCELERATE_USE_CPU="true")
    server.shutdown()
    assert "mean reward of the last step: 0." in said
    assert len(batches) >= 2 * ranks + 1 and set(batches) == {4}, "two steps of each, and the one that was refused"
    AutoModelForCausalLM.from_pretrained(tmp_path)
