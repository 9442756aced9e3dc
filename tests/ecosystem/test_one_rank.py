"""The main rank alone saves, generates and reads logits: it works where it has all weights, and is told so elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.dist.watchdog.location import Location
from hf_dist.dist.watchdog.report import Status, called_alone
from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.ecosystem.launching import launched
from tests.ecosystem.lone_calls import adapters, refused, works
from tests.ecosystem.savers import read
from tests.ecosystem.test_saving import assert_same_folder
from tests.harness import run_ranks


def test_one_rank_saves_generates_and_reads_logits_where_it_has_all_weights(tmp_path: Path) -> None:
    ranks = run_ranks(works, 2, (str(tmp_path), [0, 1, 2] if FULL_GRID else [0, 2]), timeout=120)
    first = ranks[0][0]
    for got, other in zip(*ranks, strict=True):
        by_trainer, by_model = got["folders"]
        assert by_trainer.keys() >= by_model.keys() and "model.safetensors" in by_model
        assert_same_folder({name: by_trainer[name] for name in by_model}, by_model)
        assert got["generate"].shape[1] > 8
        torch.testing.assert_close(got["logits"], first["logits"], rtol=1e-5, atol=1e-6)
        assert any(
            not torch.equal(weight, by_model["model.safetensors"][name])
            for name, weight in got["again"]["model.safetensors"].items()
        ), "training has gone on"
        assert_same_folder(got["again"], other["again"])


def test_a_callback_saves_adapters_on_the_main_rank_alone(tmp_path: Path) -> None:
    stages = [1, 3] if FULL_GRID else [3]
    for first, second, alone, final in run_ranks(adapters, 2, (str(tmp_path), stages), timeout=120)[0]:
        name = "adapter_model.safetensors"
        assert name in final and "model.safetensors" not in second
        assert_same_folder(second, final)
        assert_same_folder(alone, final)
        assert any(not torch.equal(first[name][key], tensor) for key, tensor in final[name].items()), "of an older step"


REFUSED = [("save_pretrained", "get_state_dict"), ("get_state_dict", "end")]
if FULL_GRID:
    REFUSED += [(call, "barrier") for call in ("save_model", "generate", "save_checkpoint", "save_state")]
    REFUSED += [("predict", "get_state_dict")]


@pytest.mark.parametrize(("call", "meanwhile"), REFUSED)
def test_one_rank_is_told_at_once_that_all_have_to_call(call: str, meanwhile: str, tmp_path: Path) -> None:
    ranks = run_ranks(refused, 2, (str(tmp_path), call, meanwhile), timeout=60)
    alone = ranks[0]
    assert f"{call}() at " in alone["error"] and "lone_calls.py:" in alone["error"]
    assert "Every rank has to call it" in alone["error"]
    assert alone["seconds"] < 30
    if meanwhile == "get_state_dict":
        assert ranks[1]["error"] == alone["error"]


def test_an_evaluation_of_one_rank_while_the_other_one_trains_with_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):  # of the one that is left alone in its step
        run_ranks(refused, 2, (str(tmp_path), "evaluate", "train"), timeout=60)
    alone = json.loads((tmp_path / "said_0.json").read_text())
    assert "trainer.evaluate() at " in alone["error"] and "lone_calls.py:" in alone["error"]
    assert "was called by rank 0 alone" in alone["error"] and alone["seconds"] < 30


def test_a_forward_of_one_rank_ends_the_job_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_ranks(refused, 2, (str(tmp_path), "logits", "barrier"), timeout=60)
    said = (tmp_path / "error.json").read_text()
    assert "the forward of the model at " in said and "lone_calls.py:" in said
    assert "Every rank has to call it" in said


LONE = """
import sys, torch
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from tests.hf.recipes import make_model, pad, texts

class Saves(TrainerCallback):
    def on_save(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            model.save_pretrained(args.output_dir + "/by_callback")

class Users(Trainer):
    def save_model(self, output_dir=None, _internal_call=False):
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
trainer = Users(make_model("llama"), args, train_dataset=texts(8), data_collator=pad, callbacks=[Saves()])
trainer.train()
if trainer.is_world_process_zero():
    trainer.save_model(args.output_dir + "/by_trainer")
    trainer.model.save_pretrained(args.output_dir + "/by_model")
    ids = torch.arange(3, 11).reshape(1, 8)
    print("generated", trainer.model.eval().generate(ids, max_new_tokens=4, do_sample=False).shape)
    print("logits", trainer.model(ids).logits.shape)
"""
"""A script of somebody else, in which the main rank does most things alone."""


@FULL_GRID_ONLY  # the same calls and the same line as above, where a launcher starts the ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "stage"), [("torchrun", 2), ("accelerate", 3)])
def test_one_rank_alone_under_a_launcher(launcher: str, stage: int, tmp_path: Path) -> None:
    (tmp_path / "lone.py").write_text(LONE)
    config = {"zero_optimization": {"stage": stage}, "hf_dist": {"stall_report_seconds": 12}}
    (tmp_path / "zero.json").write_text(json.dumps(config))
    given = ["--output_dir", "out", "--report_to", "none", "--max_steps", "2", "--use_cpu", "--save_steps", "2",
             "--per_device_train_batch_size", "2", "--deepspeed", "zero.json"]  # fmt: skip
    done = launched(launcher, ["-m", "hf_dist.run", "lone.py", *given], tmp_path, is_real=False, fails=stage == 3)
    if stage == 3:
        assert "model.save_pretrained() at lone.py:9 was called by rank 0 alone" in done.stderr
        assert "Every rank has to call it" in done.stderr
        return
    assert "generated" in done.stdout and "logits" in done.stdout
    folders = [read(tmp_path / "out" / name) for name in ("by_trainer", "by_model", "by_callback", "checkpoint-2")]
    for folder in folders[1:]:
        torch.testing.assert_close(folder["model.safetensors"], folders[0]["model.safetensors"], rtol=0, atol=0)


def status(rank: int, still: float = 9.0, called: str = "", waits: str = "barrier()", **changes: Any) -> Status:
    activity = changes.pop("activity", "")
    return Status(rank, still=still, location=Location(activity=activity, waits_for=waits, called=called), **changes)


SAVE = "model.save_pretrained() at train.py:8"


@pytest.mark.parametrize(
    "others",
    [
        [status(1, waits="")],  # it computes, and may come yet
        [status(1, still=1.0)],
        [status(1, called=SAVE)],
        [],  # not heard of
        [status(1, ended=True, last_words="ValueError")],  # that is the error to tell
    ],
    ids=["computes", "moves", "calls", "unknown", "failed"],
)
def test_nobody_is_alone_while_others_may_come(others: list[Status]) -> None:
    assert called_alone([status(0, called=SAVE), *others], patience=5, world=2) is None


@pytest.mark.parametrize("other", [status(1), status(1, ended=True, last_words="")], ids=["waits", "ended"])
def test_a_rank_is_alone_when_all_others_wait_elsewhere_or_have_ended(other: Status) -> None:
    found = called_alone([status(0, called=SAVE), other], patience=5, world=2)
    assert found is not None and found[0] == [0]
    assert found[1].startswith(f"{SAVE} was called by rank 0 alone; rank 1 ")
