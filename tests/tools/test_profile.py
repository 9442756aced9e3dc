"""A profile by one key: which files, which phases, and what the command says of them."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_dist.config import load_config
from hf_dist.dist.ranges import PREFIX, named
from hf_dist.errors import ConfigError
from hf_dist.tools.cli import app
from tests.harness import run_ranks
from tests.window.nets import Blocks, batch, config, loss_of, sgd

STEPS = 4


def data_of(folder: Path, stage: int, **more: Any) -> dict[str, Any]:
    data = config(stage=stage)
    section = {"steps": [2, 3], "ranks": [0, 1], "output_path": str(folder), **more}
    return {**data, "hf_dist": {**data.get("hf_dist", {}), "profile": section}}


def train(rank: int, world: int, folder: Path, stage: int, steps: int = STEPS) -> list[str]:
    import hf_dist

    torch.manual_seed(0)
    model = Blocks()
    engine = hf_dist.initialize(model, config=data_of(folder, stage), optimizer=sgd(model))
    for step in range(steps):
        engine.backward(loss_of(engine.model, batch(2 * step + rank)))
        engine.step()
    if engine.profile is not None:
        engine.profile.end()  # as the end of the process does
    return sorted(os.listdir(folder))


def phases(file: Path) -> Counter[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [str(e["name"]) for e in events if e.get("cat") == "user_annotation"]
    return Counter(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))


def test_two_ranks_write_the_phases_of_their_steps(tmp_path: Path) -> None:
    run_ranks(train, 2, (tmp_path, 3))
    assert sorted(os.listdir(tmp_path)) == ["rank0_steps2-3.json.gz", "rank1_steps2-3.json.gz"]
    for rank in range(2):
        found = phases(tmp_path / f"rank{rank}_steps2-3.json.gz")
        assert found["forward"] == found["backward"] == found["optimizer step"] == 2
        for words in (
            "unshard ",
            "wait for the weights of ",
            "reduce the gradients of ",
            "all-gather, ",
            "reduce-scatter, ",
        ):
            assert any(name.startswith(words) for name in found), words
    said = CliRunner().invoke(app, ["profile", str(tmp_path / "rank0_steps2-3.json.gz")])
    assert said.exit_code == 0 and "optimizer step" in said.output and "ui.perfetto.dev" in said.output


def test_a_run_that_ends_early_writes_what_it_has(tmp_path: Path) -> None:
    run_ranks(train, 2, (tmp_path, 0, 2))
    assert sorted(os.listdir(tmp_path)) == ["rank0_steps2-2.json.gz", "rank1_steps2-2.json.gz"]


def test_without_a_profiler_a_range_is_nothing() -> None:
    assert named("forward") is named("backward")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"steps": [12, 10]}, "hf_dist.profile.steps: [12, 10] ends before it begins"),
        ({"steps": [0, 10]}, "is not a whole number of at least 1"),
        ({"ranks": [0]}, "hf_dist.profile.steps says which steps"),
        ({"steps": [1, 2], "rank": 0}, "hf_dist.profile.rank"),
    ],
)
def test_a_wrong_section_is_refused_by_its_path(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"train_micro_batch_size_per_gpu": 1, "hf_dist": {"strict": True, "profile": section}})
    assert message in str(error.value)


def test_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    import hf_dist

    data = data_of(tmp_path, 0, ranks=[1])
    with pytest.raises(ConfigError, match=r"hf_dist\.profile\.ranks: 1 is not one of 1 ranks"):
        hf_dist.initialize(Blocks(), config=data)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    said = CliRunner().invoke(app, ["profile", str(tmp_path / "a.json")])
    assert said.exit_code == 1 and "is not a trace" in str(said.exception)


def test_a_gpu_writes_its_memory_also_where_it_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's functions replaced: no GPU here."""
    from hf_dist.config.sections import ProfileConfig
    from hf_dist.engine.profile import StepProfile

    observers: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_text("memory"))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    mesh: Any = SimpleNamespace(world=SimpleNamespace(rank=3, size=4), device=torch.device("cuda", 0))
    profile = StepProfile(ProfileConfig(steps=(5, 6), output_path=str(tmp_path)), mesh)
    profile.after_step(2)
    observers[0](0, 1, 2, 3)
    assert os.listdir(tmp_path) == ["rank3_step3_out_of_memory.pickle"]
    profile.after_step(4)
    profile.after_step(6)
    assert sorted(os.listdir(tmp_path))[1:] == ["rank3_steps5-6.json.gz", "rank3_steps5-6.pickle"]
    del profile
    observers[0](0, 1, 2, 3)  # the engine is gone
