"""What a user sees of the package without reading it: `help`, `dir`, TAB, and the arguments of the classes."""

from __future__ import annotations

import ast
import inspect
import pydoc
from pathlib import Path

import accelerate
import pytest
import transformers

import hf_dist
from hf_dist.hf.seq2seq import DistSeq2SeqTrainer
from hf_dist.hf.trainer import DistTrainer, DistTrainerMixin


def test_dir_and_help_show_the_public_names_and_no_others() -> None:
    assert dir(hf_dist) == sorted([*hf_dist.__all__, "__version__"])
    shown = pydoc.plaintext.document(hf_dist)
    assert [name for name in hf_dist.__all__ if name not in shown] == []


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(DistTrainer, transformers.Trainer), (DistSeq2SeqTrainer, transformers.Seq2SeqTrainer)],
)
def test_a_trainer_shows_the_arguments_of_the_stock_one(ours: type, stock: type) -> None:
    assert inspect.signature(ours) == inspect.signature(stock)


def test_the_accelerator_shows_accelerates_arguments_and_the_config() -> None:
    names = [*inspect.signature(accelerate.Accelerator).parameters]
    shown = [*inspect.signature(hf_dist.DistAccelerator).parameters]
    assert "dist_config" in shown and [name for name in shown if name != "dist_config"] == names


def test_editors_find_no_constructor_that_hides_the_arguments_of_the_trainer() -> None:
    """They read the code: an `__init__(*args, **kwargs)` of the mixin would be all that they show for any Trainer."""
    for cls in DistTrainerMixin.__mro__[:-1]:
        if cls.__module__.startswith("hf_dist."):
            tree = ast.parse(Path(inspect.getfile(cls)).read_text(encoding="utf-8"))
            body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
            seen = [each.name for each in body if isinstance(each, ast.FunctionDef)]
            assert "__init__" not in seen, cls
