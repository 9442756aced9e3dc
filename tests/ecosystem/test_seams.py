"""What libraries and scripts look at: signatures, names in modules, methods that a wrapped model has, pickled weights."""

from __future__ import annotations

import gc
import inspect
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator

import hf_dist
from hf_dist import DistAccelerator, DistSeq2SeqTrainer, DistTrainer, DistTrainerMixin, DistTrainingArguments
from tests import processes
from tests.covering import FULL_GRID_ONLY
from tests.ecosystem.loops import config_of
from tests.ecosystem.runs import arguments
from tests.harness import run_ranks
from tests.hf.recipes import make_model, pad, texts
from tests.window.nets import Blocks, batch, config, loss_of, sgd


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(DistTrainer, transformers.Trainer), (DistSeq2SeqTrainer, transformers.Seq2SeqTrainer)],
    ids=["trainer", "seq2seq"],
)
def test_a_trainer_shows_the_arguments_of_the_stock_one(ours: type, stock: type) -> None:
    assert inspect.signature(ours) == inspect.signature(stock)
    assert names(ours.__init__) == names(stock.__init__)  # type: ignore[misc]
    assert ours.__name__ == f"Dist{stock.__name__}" and issubclass(ours, stock)


def test_trainers_of_libraries_and_users_show_their_own_arguments() -> None:
    class Library(transformers.Trainer):
        def __init__(self, model: Any, special: int = 3, **kwargs: Any) -> None:
            self.special = special
            super().__init__(model, **kwargs)

    class Ours(DistTrainerMixin, Library):
        pass

    class Users(Ours):
        def __init__(self, model: Any, colour: str, **kwargs: Any) -> None:
            self.colour = colour
            super().__init__(model, special=5, **kwargs)

    assert names(Ours) == ["model", "special", "kwargs"]
    assert names(Users) == ["model", "colour", "kwargs"]
    arguments = transformers.TrainingArguments("unused", report_to=[], use_cpu=True)
    trainer = Users(Blocks(), "red", args=arguments)
    assert (trainer.colour, trainer.special) == ("red", 5)


def test_an_accelerator_shows_the_arguments_of_the_stock_one() -> None:
    ours, stock = names(DistAccelerator), names(Accelerator)
    assert [name for name in ours if name != "dist_config"] == stock


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (DistTrainer, transformers.Trainer),
        (DistTrainingArguments, transformers.TrainingArguments),
        (DistAccelerator, Accelerator),
    ],
)
def test_every_method_shows_the_arguments_of_the_stock_one(ours: type, stock: type) -> None:
    for name, method in inspect.getmembers(stock, inspect.isfunction):
        if name not in ("__init__", "load_state", "save_state"):  # whose keywords have other names
            assert names(getattr(ours, name)) == names(method), name


@FULL_GRID_ONLY  # an interpreter of its own; the module of `test_run.py` that has one looks at the same names
def test_every_way_to_import_the_accelerator_gives_ours() -> None:
    code = """
import os
os.environ["HF_DIST_CONFIG"] = '{"train_micro_batch_size_per_gpu": 1}'
from hf_dist.hf.substitute import substitute
substitute()
from accelerate import Accelerator as by_name
from accelerate.accelerator import Accelerator
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig as declared
print(by_name.__name__, Accelerator.__name__, HfDeepSpeedConfig({}).is_zero3(), declared is HfDeepSpeedConfig)
"""
    done = processes.run([sys.executable, "-c", code], timeout=300)
    assert done.stdout.split() == ["DistAccelerator", "DistAccelerator", "False", "True"], done.stderr


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_model_has_the_no_sync_that_loops_call(stage: int) -> None:
    accelerator = DistAccelerator(dist_config=config(stage))
    model = Blocks()
    model, optimizer = accelerator.prepare(model, sgd(model))
    with model.no_sync():
        assert not accelerator.engine.is_gradient_accumulation_boundary()
        accelerator.backward(loss_of(model, batch(0)))
    assert accelerator.engine.is_gradient_accumulation_boundary()
    accelerator.backward(loss_of(model, batch(1)))
    optimizer.step()
    other = Blocks()
    torch_optimizer = sgd(other)
    (loss_of(other, batch(0)) + loss_of(other, batch(1))).backward()
    torch_optimizer.step()
    with hf_dist.gathered(model):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_weights_outlive_the_model_that_was_trained(stage: int, tmp_path: Path) -> None:
    args = arguments(tmp_path, None, False, DistTrainingArguments, dist_config=config_of(stage))
    trainer = DistTrainer(make_model("llama"), args, train_dataset=texts(8), data_collator=pad)
    trainer.train()
    head, expected = trainer.model.lm_head.weight, trainer.model.lm_head.weight.detach().clone()
    del trainer
    gc.collect()
    assert torch.equal(head, expected)


def pickled(rank: int, world: int) -> list[bytes]:
    """`torch.save(model.state_dict())` right after a step, by stage."""
    found = []
    for stage in range(3):
        model = Blocks()
        optimizer = sgd(model)
        engine = hf_dist.initialize(model, config=config(stage), optimizer=optimizer)
        engine.backward(loss_of(model, batch(0)))
        engine.step()
        file = io.BytesIO()
        if rank == 0:  # alone, as scripts do
            torch.save(model.state_dict(), file)
        found.append(file.getvalue())
    return found


def test_the_state_dict_of_replicated_weights_is_pickled_by_one_rank() -> None:
    other = Blocks()
    torch_optimizer = sgd(other)
    loss_of(other, batch(0)).backward()
    torch_optimizer.step()
    for file in run_ranks(pickled, 2)[0]:
        loaded = torch.load(io.BytesIO(file), weights_only=True)
        assert loaded.keys() == other.state_dict().keys()
        for name, value in other.state_dict().items():
            torch.testing.assert_close(loaded[name], value)
