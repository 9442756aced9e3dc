"""What a run prints beside the start-up report and HF's log: few lines, none twice; records with stock keys where asked."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_dist import log
from tests import processes
from tests.covering import some_of
from tests.ecosystem.launching import launched

SCRIPT = """
import json, logging, sys
from hf_dist import DistTrainer, DistTrainingArguments
from tests.hf.recipes import make_model, pad, texts

args = DistTrainingArguments(
    "out", dist_config=json.loads(sys.argv[1]), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=6, seed=5,
    logging_steps=1, save_steps=1, save_total_limit=2, eval_strategy="steps", eval_steps=2,
    per_device_train_batch_size=2, gradient_accumulation_steps=2,
)
if len(sys.argv) > 2:
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # after the arguments, as HF's example scripts do
trainer = DistTrainer(make_model(), args, train_dataset=texts(24), eval_dataset=texts(8), data_collator=pad)
trainer.train()
trainer.evaluate()
trainer.predict(texts(8))
trainer.save_model("last")
"""
"""A training with six checkpoints and three evaluations, then what usually follows one."""
LOOP = """
import torch, hf_dist

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
engine = hf_dist.initialize(model, config=config, device="cpu")
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
"""
"""A loop of one's own, whose model and engine live until the interpreter ends."""
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "stage1": ({"zero_optimization": {"stage": 1}}, []),
    "stage3": ({"zero_optimization": {"stage": 3}, "hf_dist": {"log_measurements": False}}, ["logging"]),
    "pipeline": ({"pipeline": {"stages": 2}}, []),
}
CASES = some_of(CASES, "stage3")  # what the others print, it could print as well
STOCK = {"loss", "grad_norm", "learning_rate", "epoch"}
ALLOWED = 5


def split_lines(done: subprocess.CompletedProcess[str]) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """(lines of start-up reports, records of HF's log, all other lines) of both streams."""
    report: list[str] = []
    records, other = [], []
    for line in (*done.stdout.splitlines(), *done.stderr.splitlines()):
        if line.startswith("hf_dist start-up report") or (report and line.startswith("  ")):
            report.append(line)
        elif line.startswith("{'"):
            records.append(ast.literal_eval(line))
        elif line.strip():
            other.append(line)
    return report, records, other


@pytest.mark.parametrize("case", CASES)
def test_a_run_prints_its_report_and_at_most_five_lines(case: str, tmp_path: Path) -> None:
    config, more = CASES[case]
    (tmp_path / "script.py").write_text(SCRIPT)
    done = launched("torchrun", ["script.py", json.dumps(config), *more], tmp_path, is_real=False)
    report, records, other = split_lines(done)
    assert sum("start-up report" in line for line in report) == 1 and len(report) > 10
    assert len(other) <= ALLOWED, "\n".join(other)
    twice = [line for line, count in Counter(other).items() if count > 1]
    assert not twice
    training = [record for record in records if "loss" in record]
    assert len(training) == 6 and len(records) == 6 + 4 + 1, "each record once, from one rank"
    measured = config.get("hf_dist", {}).get("log_measurements", True)
    for record in training:
        assert set(record) > STOCK if measured else set(record) == STOCK


def test_a_script_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    # A forked interpreter does not end as a started one.
    done = processes.run([sys.executable, "loop.py"], cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and "ignored" not in done.stderr, done.stderr


def test_lines_are_not_written_twice_when_logging_is_set_up_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own handler goes when the program has one."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(log.logger, "handlers", [])
    monkeypatch.setattr(log.logger, "level", logging.NOTSET)
    log.say("first")
    root.addHandler(logging.StreamHandler(sys.stdout))
    log.say("second, at the program's level")
    log.logger.warning("third")
    said = capsys.readouterr()
    assert said.err.splitlines() == ["first"]
    assert said.out.splitlines() == ["third"]


def test_a_level_that_the_program_chose_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(log.logger, "handlers", [])
    monkeypatch.setattr(log.logger, "level", logging.WARNING)
    log.say("nobody asked")
    assert capsys.readouterr().err == ""
