"""`hf-dist tune`: candidates of a file, the fastest is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from hf_dist.config import load_config
from hf_dist.errors import ConfigError, HfDistError
from hf_dist.tools.bench.rounds import Row
from hf_dist.tools.cli import tune as command
from tests import forked
from tests.harness import ROOT
from tests.tools.test_bench import tiny

AUTOTUNED = {
    "train_batch_size": "auto",
    "zero_optimization": {"stage": [1, 3], "overlap_comm": True},
    "autotuning": {
        "enabled": True,
        "min_train_micro_batch_size_per_gpu": 2,
        "max_train_micro_batch_size_per_gpu": 4,
        "num_tuning_micro_batch_sizes": 4,
    },
}


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], speed: Any, **options: Any) -> Any:
    """What is written, and (micro batch, stages) of every measurement; `speed(micro, stage)` stands for the machine."""
    asked: list[tuple[int, list[int]]] = []

    def measured(model: str, files: list[Path], *, micro_batch: int, **rest: Any) -> list[Row]:
        stages = [load_config(file).zero_optimization.stage for file in files]
        asked.append((micro_batch, list(stages)))
        rows = []
        for stage in stages:
            value = speed(micro_batch, stage)
            rows.append(Row("x", "hf_dist", "out of memory") if value is None else Row("x", "y", speed=(0, value, 0)))
        return rows

    monkeypatch.setattr(command, "_measured", measured)
    source, output = folder / "ds.json", folder / "best.json"
    source.write_text(json.dumps(data))
    command.tune("model", source, output=output, **options)
    return json.loads(output.read_text()), asked


def test_the_files_own_lists_are_tried_and_the_fastest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best, asked = run(tmp_path, monkeypatch, AUTOTUNED, lambda micro, stage: 100.0 * micro - stage)
    assert asked == [(2, [1, 3]), (4, [1, 3])]
    assert best["zero_optimization"] == {"stage": 1, "overlap_comm": True} and "autotuning" not in best
    assert best["train_micro_batch_size_per_gpu"] == 4 and best["train_batch_size"] == "auto"
    load_config(best)
    assert "stage1, microbatch 4" in capsys.readouterr().out


def test_stages_that_do_not_go_with_the_file_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    best, asked = run(tmp_path, monkeypatch, data, lambda micro, stage: float(stage), micro_batch="8,2")
    assert asked == [(2, [1, 2, 3]), (8, [1, 2, 3])] and best["zero_optimization"]["stage"] == 3


def test_what_runs_out_of_memory_loses_and_larger_microbatches_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = lambda micro, stage: 10.0 * micro if micro < 2 or (micro < 4 and stage == 3) else None  # noqa: E731
    best, asked = run(tmp_path, monkeypatch, {}, fits, micro_batch="1,2,4,8")
    assert [micro for micro, _ in asked] == [1, 2, 4]
    assert (best["train_micro_batch_size_per_gpu"], best["zero_optimization"]["stage"]) == (2, 3)
    with pytest.raises(HfDistError, match="no candidate could be run; the first, stage0, failed: out of memory"):
        run(tmp_path, monkeypatch, {}, lambda micro, stage: None)


def test_other_mistakes_of_the_file_are_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="overlap_com"):
        run(tmp_path, monkeypatch, {"zero_optimization": {"stage": [2], "overlap_com": 1}}, lambda *_: 1.0)
    with pytest.raises(ConfigError, match=r'Did you mean "zero_optimization"\?$'):  # the file has no such section yet
        run(tmp_path, monkeypatch, {"zero_optimisation": {"stage": 1}}, lambda *given: 1.0)
    with pytest.raises(ConfigError, match="is not a list of sizes"):
        run(tmp_path, monkeypatch, {}, lambda *_: 1.0, micro_batch="1;2")


SUGGESTED: dict[str, dict[str, Any]] = {
    "a": {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 2}},
    "b": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
    "c": {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
}


def suggested(folder: Path, **files: dict[str, Any]) -> Path:
    """What `plan --suggest` leaves."""
    (folder / "out").mkdir()
    for name, data in files.items():
        (folder / "out" / f"{name}.json").write_text(json.dumps(data))
    return folder / "out"


def test_files_of_a_plan_run_as_they_are_on_as_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int, list[str]]] = []

    def measured(model: str, files: list[Path], *, micro_batch: int, window: int, **rest: Any) -> list[Row]:
        asked.append((micro_batch, window, [file.stem for file in files]))
        speeds = {"a": 5.0, "b": 9.0, "c": 7.0}
        return [Row("x", "y", speed=(0, speeds[file.stem], 0), agrees=file.stem != "c") for file in files]

    monkeypatch.setattr(command, "_measured", measured)
    command.tune("model", suggested(tmp_path, **SUGGESTED), ranks=2, output=tmp_path / "best.json")
    assert asked == [(1, 4, ["a", "c"]), (2, 2, ["b"])]
    assert json.loads((tmp_path / "best.json").read_text()) == SUGGESTED["b"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  a (tp 2, ZeRO 0), microbatch 1 ")
    assert lines[2].startswith("  c (dp_shard 2, ZeRO 0), microbatch 1 ") and "losses DIFFER" in lines[2]
    assert lines[3].endswith("<- best")


@pytest.mark.parametrize(
    ("more", "options", "words"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            {},
            "needs files that step on as many rows",
        ),
        ({"train_micro_batch_size_per_gpu": "auto"}, {}, "are not both numbers"),
        (SUGGESTED["a"], {"micro_batch": "2"}, "does not go with a folder"),
    ],
    ids=["rows", "auto", "sizes"],
)
def test_files_that_cannot_be_compared_are_refused(
    tmp_path: Path, more: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        command.tune("model", suggested(tmp_path, **SUGGESTED, d=more), ranks=2, **options)


@pytest.mark.parametrize("finished", [0, 1])
def test_what_has_run_is_kept_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finished: int
) -> None:
    """Ctrl-C in the first run, or in the second."""

    class Prepared:
        work = SimpleNamespace(tokens_per_step=100.0, dtype="fp32", unit="tokens")
        contenders = [SimpleNamespace(name=name, engine="hf_dist") for name in ("stage1", "stage3")]

    def run(work: Any, contender: Any) -> list[dict[str, Any]]:
        ran.append(contender.name)
        if len(ran) > finished:
            raise KeyboardInterrupt
        zeros = dict.fromkeys(("peak_nbytes", "sent_nbytes", "first_step_seconds", "import_seconds"), 0)
        return [{**zeros, "step_seconds": [2.0], "losses": [1.0], "phases": {}, "waiting_seconds": None}]

    ran: list[str] = []
    monkeypatch.setattr("hf_dist.tools.bench.prepare.prepare", lambda *given: Prepared())
    monkeypatch.setattr("hf_dist.tools.bench.rounds.run", run)
    source, output = tmp_path / "ds.json", tmp_path / "best.json"
    source.write_text(json.dumps(AUTOTUNED))
    with pytest.raises(typer.Exit) as end:
        command.tune("model", source, output=output)
    told = capsys.readouterr()
    assert end.value.exit_code == 130 and len(ran) == finished + 1  # larger microbatches are not begun
    assert output.exists() == bool(finished) and "interrupted" in told.err
    if finished:
        assert json.loads(output.read_text())["zero_optimization"]["stage"] == 1
        assert "stage1, microbatch 2" in told.out and "stage3" not in told.out
        assert "round 1 of 2: stage1\n  50 tokens/s" in told.err


def test_it_runs_as_a_command(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({**AUTOTUNED, "zero_optimization": {"stage": [0]}}))
    few = ("--steps", "1", "--rounds", "1", "--seq", "16", "--ranks", "1", "--micro-batch", "1", "--dtype", "fp32")
    command = [
        sys.executable,
        "-m",
        "hf_dist.tools.cli",
        "tune",
        "--model",
        str(tiny(tmp_path)),
        "--config",
        str(source),
    ]
    result = forked.run([*command, *few, "--output", str(tmp_path / "b.json")], cwd=ROOT, apart=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "stage0, microbatch 1" in result.stdout and "<- best" in result.stdout
    assert json.loads((tmp_path / "b.json").read_text())["train_micro_batch_size_per_gpu"] == 1
