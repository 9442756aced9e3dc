"""Monitor sections of the config in a run: CSV files of the log, a table of the communication."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist import DistTrainer, DistTrainingArguments, log
from hf_dist.dist import comm_counter
from hf_dist.dist.mesh import MeshAxis
from hf_dist.hf.callbacks.communication import CommunicationCallback, communication_table


def trained(folder: Path, config: dict[str, Any], **arguments: Any) -> DistTrainer:
    """Three steps of a tiny model, logged at each."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16, pad_token_id=0))
    ids = torch.randint(1, 16, (6, 8))
    args = DistTrainingArguments(
        str(folder),
        dist_config={"zero_optimization": {"stage": 3}, **config},
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        max_steps=3,
        per_device_train_batch_size=2,
        **{"disable_tqdm": True, "save_strategy": "no", **arguments},
    )
    trainer = DistTrainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    return trainer


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_monitor_writes_one_file_per_value_with_a_row_per_log(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path / "out", {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}}
    )
    loss = rows(tmp_path / "csv" / "job" / "loss.csv")
    assert loss[0] == ["step", "loss"]
    assert [(int(step), float(value)) for step, value in loss[1:]] == [
        (record["step"], record["loss"]) for record in trainer.state.log_history if "loss" in record
    ]
    assert len(loss) == 4 and (tmp_path / "csv" / "job" / "grad_norm.csv").exists()


def test_without_a_path_the_files_are_in_the_output_folder(tmp_path: Path) -> None:
    trained(tmp_path, {"csv_monitor": {"enabled": True}})
    assert (tmp_path / "DeepSpeedJobName" / "loss.csv").exists()


def test_comms_logger_prints_a_table_when_training_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=log.logger.name):
        trained(tmp_path, {"comms_logger": {"enabled": True}})
    assert "communication of this rank in 3 steps" in caplog.text
    assert not comm_counter._logs, "nothing is counted after the run"


def test_the_table_adds_up_calls_and_bytes_over_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    callback = CommunicationCallback()
    callback.on_train_begin(None, None, None)
    axis = MeshAxis.__new__(MeshAxis)
    object.__setattr__(axis, "name", "shard")
    for _ in range(2):
        comm_counter.count("all_gather", axis, 1_500_000)
        callback.on_step_end(None, None, None)
    with caplog.at_level(logging.INFO, logger=log.logger.name):
        callback.on_train_end(None, None, None)
    assert caplog.text.count("all_gather") == 1
    line = communication_table({("all_gather", "shard"): [2, 3_000_000]}, 2).splitlines()[1]
    assert line.split() == ["all_gather", "over", "shard", "2", "calls", "3000000", "bytes", "1.500", "MB/step"]
    assert line in caplog.text
