"""Which versions are accepted, what older ones are told, and which names of the libraries the package reads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import DataLoaderConfiguration
from accelerate.data_loader import DataLoaderShard

import hf_dist
from hf_dist.errors import ConfigError
from hf_dist.version import FLOORS, check_versions
from tests import library_names, versions
from tests.hf.recipes import make_model
from tests.mutants.table import MUTANTS
from tests.window.nets import config

ROOT = Path(__file__).resolve().parent.parent


def test_the_oldest_row_is_what_pip_accepts() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = dict(re.findall(r'^    "([a-z]+)>=([0-9.]+)",$', text, re.M))
    _, oldest = versions.ROWS["oldest"]
    assert all(wanted[library] == floor for library, floor in FLOORS.items())
    assert all(oldest[library].startswith(floor) for library, floor in wanted.items())


@pytest.mark.parametrize("library", FLOORS)
def test_an_older_version_is_refused_by_name(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9" if name == library else "99")
    with pytest.raises(ImportError, match=f"hf_dist needs {library} .* found 0.9: pip install '{library}>="):
        check_versions()


class OldSmoother:
    """HF's before transformers 5.15."""

    def __call__(self, model_output: Any, labels: Any, shift_labels: bool = False) -> torch.Tensor:
        raise AssertionError("it is refused before")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_label_smoothing_by_ranks_is_refused(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF's smoother was not told how many items the batch has: one microbatch on one rank is right, more are not."""
    monkeypatch.setattr(transformers.trainer, "LabelSmoother", lambda epsilon: OldSmoother())
    arguments = hf_dist.DistTrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, label_smoothing_factor=0.1,
        gradient_accumulation_steps=accumulation, dist_config={"zero_optimization": {"stage": 1}},
    )  # fmt: skip
    if accumulation == 1:
        assert hf_dist.DistTrainer(make_model("llama"), args=arguments).label_smoother is not None
        return
    with pytest.raises(ConfigError, match=r"label_smoothing_factor: 0\.1 gives wrong losses .*pip install"):
        hf_dist.DistTrainer(make_model("llama"), args=arguments)


def test_stateful_loaders_of_an_old_accelerate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if "adjust_state_dict_for_prefetch" in vars(DataLoaderShard):
        monkeypatch.delattr(DataLoaderShard, "adjust_state_dict_for_prefetch")
    monkeypatch.setattr(hf_dist.DistAccelerator, "num_processes", 2)
    loaders = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = hf_dist.DistAccelerator(dist_config=config(1), dataloader_config=loaders)
    with pytest.raises(ConfigError, match=r"use_stateful_dataloader: True resumes at other rows .*accelerate>=1\.13"):
        accelerator.prepare_data_loader(torch.utils.data.DataLoader([1, 2]))


def test_the_slice_finds_most_planted_faults() -> None:
    chosen = versions.slice_of()
    assert len(set().union(*chosen.values())) > 0.8 * len(MUTANTS)
    assert all((ROOT / file).exists() for file in chosen)


def parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def test_the_page_lists_every_name_that_is_read_and_each_is_there() -> None:
    """An older library does not know the words that came later; which are names of a library is asked of the installed one."""
    names, listed = set(library_names.read_names()), library_names.listed()
    assert names <= set(listed), "run: python -m tests.library_names --write"
    for name, (first, _) in listed.items():
        if importlib.util.find_spec(name.package) is None:
            continue
        if parts(first) <= parts(importlib.metadata.version(name.package)):
            assert name in names, "run: python -m tests.library_names --write"
            assert library_names.is_there(name), name


ASKED_FIRST = {"._pp_stage", "accelerate.parallelism_config.ParallelismConfig"}
"""Names that came after the oldest version; the package asks whether they are there."""


def test_no_name_is_read_that_the_oldest_version_lacks() -> None:
    oldest = {library: parts(floor) for library, floor in FLOORS.items()}
    later = {n.name for n, (first, _) in library_names.listed().items() if parts(first) > oldest.get(n.package, (99,))}
    assert later == ASKED_FIRST
