"""Cases of the tests that say something else with an older library, which pip accepts: refused by name, or not there yet.

`conftest.py` skips them where the installed version is older; VERSIONS.md lists them. What would be wrong without a word has no
place here: it is refused in the package, and a case says so.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
from typing import NamedTuple

__all__ = ["DIFFERENCES", "Difference", "difference_of"]


class Difference(NamedTuple):
    """Cases that a version older than `before` does not pass."""

    package: str
    before: str
    cases: tuple[str, ...]
    """Patterns below `tests/`."""
    why: str


DIFFERENCES = (
    Difference(
        "transformers",
        "5.15",
        (
            "hf/test_trainer.py::*label_smoothing*-w*",
            "hf/test_layouts_in_trainer.py::*label_smoothing*",
            "memory/activation/test_ranks.py::*",
        ),
        "label smoothing with several ranks is refused by name",
    ),
    Difference(
        "accelerate",
        "1.13",
        ("ecosystem/test_stateful_loaders.py::test_two_ranks_go_on_each*",),
        "stateful loaders on several ranks are refused by name",
    ),
    Difference(
        "transformers",
        "5.15",
        (
            "parallel/sequence/test_layers.py::*[[]mamba-*",
            "parallel/sequence/test_layers.py::*[[]lfm2-*",
            "parallel/sequence/test_layers.py::*[[]t5-*",
            "parallel/sequence/test_layers.py::*[[]mistral-gather-z3-cp2-flash*",
            "parallel/sequence/test_accounting.py::test_bytes_along_the_axis*",
            "parallel/sequence/test_whole_calls.py::*continued pair*",
        ),
        "T5, Mamba, LFM2 under sequence parallelism, and rows without padding under flash attention, are refused by name",
    ),
    Difference(
        "transformers",
        "5.15",
        (
            "memory/activation/*::*contradictions_are_named*",
            "sharding/test_units.py::*-vit]",
            "parallel/tensor/test_plans.py::*",
        ),
        "gradient_checkpointing_enable has no every_n_layers; blocks and plans of some classes have other names",
    ),
    Difference(
        "transformers",
        "5.23",
        (
            "memory/activation/test_checkpoint.py::*transformers_was_told*",
            "parallel/tensor/test_plans.py::test_the_slices_of_all_ranks*",
            "parallel/tensor/test_properties.py::test_what_is_kept_of_a_blocks_input*",
            "parallel/experts/test_find.py::test_the_rule_finds*",
        ),
        "plans of classes, and what a checkpointed block keeps, are asked in its words",
    ),
    Difference(
        "transformers",
        "5.23",
        ("loading/test_dequantised.py::*",),
        "fp8 and mxfp4 files are not streamed: HF reads them, whole, on every rank",
    ),
    Difference(
        "transformers",
        "5.15",
        ("loading/test_dequantised.py::*", "parallel/experts/test_find.py::test_the_rule_finds*"),
        "fp8 and mxfp4 files are not streamed, and mixtures whose experts are not one module are refused by name",
    ),
    Difference(
        "peft",
        "0.20",
        ("sharding/test_units.py::*qwen3_moe]", "parity/test_grid.py::*deepseek_v3-*-lora-*"),
        'PEFT does not find the layers of "all-linear" in mixtures',
    ),
    Difference(
        "transformers",
        "5.15",
        ("parallel/local_sgd/test_trainer.py::test_items_of_a_window*", "hf/test_generation.py::*z1-7rows-1beams*"),
        "HF counts the first label of a row, too; a tiny model generates rows of one length",
    ),
)


def difference_of(case: str) -> Difference | None:
    """Why `case`, below `tests/`, says something else with the installed versions; None if it does not."""
    for difference in DIFFERENCES:
        if any(fnmatch.fnmatchcase(case, pattern) for pattern in difference.cases) and _is_older(difference):
            return difference
    return None


def _is_older(difference: Difference) -> bool:
    found = importlib.metadata.version(difference.package).split(".")
    return tuple(map(int, found[:2])) < tuple(map(int, difference.before.split(".")))
