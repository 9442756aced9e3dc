"""`hf-dist tune`: which layout is fastest on this machine? Runs each candidate for a few steps.

Candidates are the stages and microbatches of a config, or the files written by `hf-dist plan --gpus N --suggest DIR`.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_dist.config import DistConfig, axes_of, canonical, load_config, read_config
from hf_dist.config.load import examine
from hf_dist.config.unknown import at
from hf_dist.errors import ConfigError, HfDistError, Problem
from hf_dist.tools.cli.written import to_write, write_texts

if TYPE_CHECKING:
    from hf_dist.tools.bench.rounds import Row

__all__ = ["tune"]

_STAGE = "zero_optimization.stage"
_MICRO = "train_micro_batch_size_per_gpu"
_BATCH = ("train_batch_size", _MICRO, "gradient_accumulation_steps")
_TUNING = "autotuning"
_NAMED = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Axes and views by which a layout is named."""
_INTERRUPTED = 130
MAX_MICRO_BATCHES = 3
"""Number of sizes to try if neither the command nor the file gives any."""

Model = Annotated[str, typer.Option(help="A model folder, or an ID of the hub.")]
Config = Annotated[
    Path,
    typer.Option(
        help="A DeepSpeed-style JSON file, in which stages and micro batches may be lists; or a folder from `plan --suggest`."
    ),
]
Micro = Annotated[str, typer.Option("--micro-batch", help="Sizes to try, comma-separated; default: from the file.")]
Seq = Annotated[int, typer.Option(help="Tokens per row.", min=2)]
Ranks = Annotated[
    int | None, typer.Option(help="Processes; default: one per GPU, or 2 without GPUs.", min=1, show_default=False)
]
Steps = Annotated[int, typer.Option(help="Timed steps per run.", min=1)]
Rounds = Annotated[int, typer.Option(help="Runs of each candidate, interleaved.", min=1)]
Dtype = Annotated[str, typer.Option(help="bf16 (with fp32 master weights) or fp32.")]
Output = Annotated[Path, typer.Option(help="Where the best config is written.", callback=to_write("file"))]


def tune(
    model: Model,
    config: Config,
    micro_batch: Micro = "",
    seq: Seq = 512,
    ranks: Ranks = None,
    steps: Steps = 10,
    rounds: Rounds = 2,
    dtype: Dtype = "bf16",
    output: Output = Path("best.json"),
) -> None:
    """Run the candidates of a config on this machine and write the one with the most tokens per second.

    Stages: those that the file lists, otherwise all that are compatible with its other settings. Candidates that do not fit
    are skipped. A folder: its files unchanged, which must have equally many rows per step. `hf-dist plan` estimates memory
    and other settings without a run. Ctrl-C writes the best of what has run, and ends with exit code 130.
    """
    options: dict[str, Any] = {"seq": seq, "ranks": ranks, "steps": steps, "rounds": rounds, "dtype": dtype}
    if config.is_dir():
        _tune_files(model, config, micro_batch, output, options)
        return
    data = read_config(config).data
    asked = data.get(_TUNING) if isinstance(data.get(_TUNING), Mapping) else {}
    sizes = _sizes(micro_batch, data, asked or {})
    speeds: dict[tuple[int, Path], Row] = {}
    stopped = False
    with tempfile.TemporaryDirectory(prefix="hf_dist_tune_") as folder:
        files = list(_candidates(data, Path(folder)))
        if not files:
            raise ConfigError(Problem(_STAGE, str(at(data, _STAGE)), "names no stage that the file can have", ""))
        for size in sizes:
            rows, stopped = _until_stopped(lambda: _measured(model, files, micro_batch=size, **options), files)  # noqa: B023
            speeds |= {(size, file): row for file, row in rows.items()}
            if stopped or all(row.error for row in rows.values()):
                break  # larger ones will not fit either
        best = _best(speeds, stopped=stopped)
        written = json.loads(best[1].read_text(encoding="utf-8"))
    print(_table(speeds, best))
    _write(written, best[0], data, output)
    _end(stopped)


def _tune_files(model: str, folder: Path, micro_batch: str, output: Path, options: Mapping[str, Any]) -> None:
    """Run every file unchanged. Microbatches of one size are interleaved; larger ones come last."""
    if micro_batch:
        fix = "Leave it out, or name one of the files."
        raise ConfigError(
            Problem("--micro-batch", micro_batch, "does not go with a folder: its files have their own", fix)
        )
    found = {file: load_config(file) for file in sorted(folder.glob("*.json"))}
    batches = {file: _batch_of(file, config, options["ranks"]) for file, config in found.items()}
    if len({micro * window for micro, window in batches.values()}) != 1:
        rows = ", ".join(f"{file.name} {micro * window}" for file, (micro, window) in batches.items())
        what = f"needs files that step on as many rows each; it has {rows or 'no file'}"
        raise ConfigError(
            Problem("--config", str(folder), what, "Take what `hf-dist plan --gpus N --suggest DIR` writes.")
        )
    speeds: dict[tuple[int, Path], Row] = {}
    stopped = False
    for micro, window in sorted(set(batches.values())):
        files = [file for file, batch in batches.items() if batch == (micro, window)]
        sizes = {"micro_batch": micro, "window": window}
        rows_of, stopped = _until_stopped(lambda: _measured(model, files, **sizes, **options), files)  # noqa: B023
        speeds |= {(micro, file): row for file, row in rows_of.items()}
        if stopped:
            break
    best = _best(speeds, stopped=stopped)
    print(_table(speeds, best, {file: _layout_text(file, config, options["ranks"]) for file, config in found.items()}))
    write_texts({output: best[1].read_text(encoding="utf-8")}, show=True)
    print(f"wrote {output}; pass --per_device_train_batch_size {best[0]} to the script")
    _end(stopped)


def _until_stopped(measure: Callable[[], list[Row]], files: list[Path]) -> tuple[dict[Path, Row], bool]:
    """(the row of every file that was measured, whether Ctrl-C ended it). A file counts with the rounds that it has run."""
    try:
        return dict(zip(files, measure(), strict=True)), False
    except _Stopped as stopped:
        return {files[index]: row for index, row in stopped.rows.items()}, True
    except KeyboardInterrupt:  # before the first run
        return {}, True


class _Stopped(KeyboardInterrupt):
    """Ctrl-C, with the rows of the files that have run, by place."""

    def __init__(self, rows: dict[int, Row]) -> None:
        super().__init__()
        self.rows = rows


def _end(stopped: bool) -> None:
    """End with the exit code of Ctrl-C."""
    if stopped:
        print("interrupted: not all candidates have run", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED)


def _batch_of(file: Path, config: DistConfig, asked: int | None) -> tuple[int, int]:
    """(rows per microbatch, microbatches per step over all ranks) of a file that gives both."""
    from hf_dist.tools.bench.prepare import device_and_ranks

    micro, count = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if not isinstance(micro, int) or not isinstance(count, int):
        fix = "Take what `hf-dist plan --gpus N --suggest DIR` writes."
        raise ConfigError(Problem(_MICRO, "", "and gradient_accumulation_steps are not both numbers", fix, str(file)))
    return micro, count * axes_of(config, device_and_ranks(asked)[1]).size("data")


def _layout_text(file: Path, config: DistConfig, asked: int | None) -> str:
    from hf_dist.tools.bench.prepare import device_and_ranks

    axes = axes_of(config, device_and_ranks(asked)[1])
    sizes = [f"{axis} {axes.size(axis)}" for axis in _NAMED if axes.size(axis) > 1]
    return f"{file.stem} ({', '.join([*sizes, f'ZeRO {config.zero_optimization.stage}'])})"


def _sizes(given: str, data: Mapping[str, Any], asked: Mapping[str, Any]) -> list[int]:
    """Micro batches to try, smallest first: from the command, the file's list, or powers of two within the file's bounds."""
    listed = given.split(",") if given else data.get(_MICRO) if isinstance(data.get(_MICRO), list) else None
    if listed is None and isinstance(data.get(_MICRO), int):
        listed = [data[_MICRO]]
    if listed is not None:
        if not all(str(size).strip().isdigit() and int(size) for size in listed):
            raise ConfigError(Problem("--micro-batch", str(given or listed), "is not a list of sizes", "Write 1,2,4."))
        return sorted({int(size) for size in listed})
    low, high = (asked.get(f"{end}_{_MICRO}") for end in ("min", "max"))
    count = asked.get("num_tuning_micro_batch_sizes") or MAX_MICRO_BATCHES
    first = low if isinstance(low, int) and low > 0 else 1
    powers = [first << n for n in range(int(count))]
    return [size for size in powers if not isinstance(high, int) or size <= high] or [first]


def _candidates(data: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    """A file for each listed stage, or each stage compatible with the rest. Other problems of the config are raised."""
    listed, data = at(data, _STAGE), canonical(data)
    stages = listed if isinstance(listed, list) else [0, 1, 2, 3]
    for stage in stages:
        made = copy.deepcopy(data)
        for key in (_TUNING, "$schema", *_BATCH):
            made.pop(key, None)
        has_section = _STAGE.partition(".")[0] in made
        as_written = {} if has_section else {problem.path: problem for problem in examine(made)[1]}
        zero = made.setdefault("zero_optimization", {})
        zero["stage"] = stage
        _, problems = examine(made)
        if problems and (isinstance(listed, list) or stage == stages[-1]):
            # A misspelt section is told of as the file has it, without the one that was added for the stage.
            raise ConfigError([as_written.get(problem.path, problem) for problem in problems])
        if not problems:
            file = folder / f"stage{stage}.json"
            file.write_text(json.dumps(made, indent=2), encoding="utf-8")
            yield file


def _measured(model: str, files: list[Path], *, window: int | None = None, **options: Any) -> list[Row]:
    """One row per file, measured in turns. Raises `_Stopped`."""
    from hf_dist.tools.bench.asked import Asked
    from hf_dist.tools.bench.prepare import prepare
    from hf_dist.tools.bench.rounds import InterruptedRounds, run_rounds, summarize
    from hf_dist.tools.check import quiet

    rounds = options["rounds"]
    asked = Asked(model=model, config=files, engines="hf_dist", **options)
    with tempfile.TemporaryDirectory(prefix="hf_dist_bench_") as folder:
        with quiet():
            prepared = prepare(asked, Path(folder), window)
        try:
            runs = run_rounds(prepared, rounds, lambda line: print(line, file=sys.stderr, flush=True))
        except InterruptedRounds as interrupted:
            done = sorted({each.contender for each in interrupted.runs})
            runs = [replace(each, contender=done.index(each.contender)) for each in interrupted.runs]
            rows = summarize(prepared.work, [prepared.contenders[index] for index in done], runs)
            raise _Stopped(dict(zip(done, rows, strict=True))) from None
        return summarize(prepared.work, prepared.contenders, runs)


def _best(speeds: Mapping[tuple[int, Path], Row], *, stopped: bool = False) -> tuple[int, Path]:
    good = {key: row.speed[1] for key, row in speeds.items() if not row.error}
    if stopped and not good:
        print("interrupted before a candidate has run: nothing is written", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED)
    if not good:
        (_, file), row = next(iter(speeds.items()))
        raise HfDistError(f"no candidate could be run; the first, {file.stem}, failed: {row.error.splitlines()[-1]}")
    return max(good, key=lambda key: good[key])


def _table(
    speeds: Mapping[tuple[int, Path], Row], best: tuple[int, Path], names: Mapping[Path, str] | None = None
) -> str:
    from hf_dist.format_bytes import size_text

    names = names or {}
    rows = [
        (f"{names.get(file, file.stem)}, microbatch {size}", (size, file), row) for (size, file), row in speeds.items()
    ]
    width = max(len(what) for what, *_ in rows)
    lines = []
    for what, key, row in rows:
        if row.error:
            lines.append(f"  {what:<{width}}  failed: {row.error.splitlines()[-1]}")
        else:
            mark = "  <- best" if key == best else ""
            mark += "" if row.agrees else "  losses DIFFER from the first's of this microbatch"
            lines.append(f"  {what:<{width}}  {row.speed[1]:>12,.0f} /s  {size_text(row.peak_nbytes):>9}{mark}")
    return "\n".join(["per second of all ranks, and peak memory of a rank:", *lines])


def _write(best: dict[str, object], size: int, data: Mapping[str, object], output: Path) -> None:
    """Write the user's file with the best stage and microbatch; sizes of the whole batch stay unchanged."""
    kept = {key: data[key] for key in _BATCH if key in data and not isinstance(data[key], list)}
    own = kept.get(_MICRO)
    result = {**kept, **best, _MICRO: size}
    if own != size and isinstance(kept.get("gradient_accumulation_steps"), int) and "train_batch_size" in kept:
        result["gradient_accumulation_steps"] = "auto"
    write_texts({output: json.dumps(result, indent=2) + "\n"}, show=True)
    print(f"wrote {output}; pass --per_device_train_batch_size {size} to the script")
