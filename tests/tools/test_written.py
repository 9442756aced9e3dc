"""Paths that commands write: refused before the work begins, and the result is printed if writing fails in the end."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.models import CommandInfo, ParameterInfo
from typer.utils import get_params_from_function

from hf_dist.errors import ConfigError, HfDistError
from hf_dist.parallel.experts.load_file import ExpertLoad
from hf_dist.tools import cli
from hf_dist.tools.cli import tune
from hf_dist.tools.cli.written import check_written
from tests.parity.families import make_model

REPO = Path(__file__).resolve().parents[2]
READ = {
    *("balance.folder", "bench.config", "bench.more", "check.config", "check.data", "mesh.config", "plan.config"),
    *(
        "checkpoint data.checkpoint",
        "checkpoint verify.folder",
        "config check.file",
        "config convert.fsdp_config",
        "config convert.source",
    ),
    *("export.checkpoint", "inspect.checkpoint", "profile.files", "schedule.config"),
    *("tune.config",),
}
"""Parameters that name what is only read."""
CALLS: dict[str, list[str]] = {
    "balance.output": ["balance", "nothing", "--output"],
    "bench.output": ["bench", "--model", "nothing", "--output"],
    "config convert.output": ["config", "convert", "nothing", "--output"],
    "config new.file": ["config", "new"],
    "export.out": ["export", "nothing"],
    "mesh.output": ["mesh", "--config", "nothing", "--output"],
    "plan.output": ["plan", "--model", "nothing", "--gpus", "8", "--output"],
    "plan.suggest": ["plan", "--model", "nothing", "--gpus", "8", "--suggest"],
    "schedule.output": ["schedule", "--config", "nothing", "--output"],
    "tune.output": ["tune", "--model", "nothing", "--config", "nothing", "--output"],
    "watch.output": ["watch"],
}
"""How each parameter that names a written path is given, as the last word. Everything else of the command is missing."""


def commands(app: typer.Typer, prefix: str = "") -> Iterator[tuple[str, CommandInfo]]:
    """Every command of the app and of those below, by name."""
    for info in app.registered_commands:
        assert info.callback is not None
        yield f"{prefix}{info.name or info.callback.__name__}", info
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, f"{prefix}{group.name} ")


def paths() -> dict[str, str | None]:
    """Every parameter of every command that is a path -> what it writes, or None."""
    found = {}
    for command, info in commands(cli.app):
        assert info.callback is not None
        for name, param in get_params_from_function(info.callback).items():
            if "Path" in str(param.annotation):
                given = param.default
                callback = given.callback if isinstance(given, ParameterInfo) else None
                found[f"{command}.{name}"] = getattr(callback, "writes", None)
    return found


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, output, errors) of `hf-dist` with these words, as its entry point runs it."""
    before = cli.sys.argv
    cli.sys.argv = ["hf-dist", *words]
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    finally:
        cli.sys.argv = before
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return code, out, err


def test_every_path_of_a_command_is_known_as_read_or_written() -> None:
    found = paths()
    assert {name for name, writes in found.items() if writes is None} == READ, 'others need callback=to_write("file")'
    assert {name for name, writes in found.items() if writes} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_cannot_be_written_is_refused_before_anything_else(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else of the command exists, so any work would end in another error."""
    (tmp_path / "file").write_text("")
    words = [*CALLS[name], str(tmp_path / "file" / "x.svg"), *(["--", "true"] if name == "watch.output" else [])]
    code, out, err = said(words, capsys)
    assert code == 1 and out == ""
    option = words[-2] if words[-2].startswith("--output") or words[-2] == "--suggest" else name.split(".")[1].upper()
    assert err.startswith(f"{option}: {tmp_path / 'file' / 'x.svg'} cannot be written: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "place", "says"),
    [
        ("file", "new/x.json", "new is no folder. Create that folder first"),
        ("file", "folder", "is a folder. Name a file"),
        ("file", "f" * 300, "cannot be written: File name too long"),
        ("picture", "x.pdf", "is neither .svg nor .png"),
        ("picture", "folder.svg/x", "is neither .svg nor .png"),
        ("folder or picture", "new/x.svg", "new is no folder"),
        ("folder", "file/x", "file is a file"),
    ],
)
def test_what_is_wrong_with_a_path_is_said(kind: Any, place: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"--output: .*{says}"):
        check_written("--output", tmp_path / place, kind)


def test_a_check_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    for kind, place in (("file", "x"), ("file", "old.json"), ("picture", "x.svg"), ("folder", "new/deep")):
        check_written("--output", tmp_path / place, kind)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.fixture
def full(tmp_path: Path) -> Callable[[str], str]:
    """`full(name)`: a path that can be opened, and to which nothing can be written, as on a full disk."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")

    def link(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/full")
        return str(path)

    return link


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small Llama's config."""
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama").config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    return str(folder)


@pytest.mark.parametrize("command", ["balance", "convert", "mesh", "plan --gpus", "plan --suggest", "schedule"])
def test_a_full_disk_costs_the_file_and_not_the_result(
    command: str, model: str, full: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    load = tmp_path / "expert_load.json"
    load.write_text(json.dumps(vars(ExpertLoad(2, 1, 5, {"layers.0": [3, 5]}))))
    planned = ["plan", "--model", model, "--seq", "16"]
    words, result = {
        "balance": (["balance", str(load), "--output"], "busiest expert"),
        "convert": (["config", "convert", "--fsdp", "full_shard", "--output"], '"stage": 3'),
        "mesh": (["mesh", "--config", str(config), "--output"], "ZeRO's shards"),
        "plan --gpus": ([*planned, "--gpus", "2", "--output"], "tokens/s"),
        "plan --suggest": ([*planned, "--config", str(config), "--suggest"], "device, peak"),
        "schedule": (["schedule", "--output"], "rank 3 |"),
    }[command]
    place = full("made/ds_1.json" if command == "plan --suggest" else "full.svg")
    code, out, err = said([*words, str(Path(place).parent) if command == "plan --suggest" else place], capsys)
    assert code == 1 and result in out
    assert err == f"{place} could not be written: No space left on device. The result is printed above.\n"


def test_the_best_config_of_tune_is_printed_if_it_cannot_be_written(
    full: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HfDistError, match="could not be written"):
        tune._write({"zero_optimization": {"stage": 1}}, 4, {}, Path(full("best.json")))
    assert json.loads(capsys.readouterr().out)["train_micro_batch_size_per_gpu"] == 4


def test_files_that_cannot_be_read_end_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zero.yaml").write_text("a: 1")
    for words, says in (
        (["config", "convert", str(tmp_path / "zer.yaml")], "zer.yaml does not exist. Did you mean zero.yaml?"),
        (["config", "convert", str(tmp_path)], "Is a directory"),
        (["config", "convert", "--fsdp", "x", "--fsdp-config", str(tmp_path / "x.json")], "x.json does not exist"),
        (["config", "check", str(tmp_path / "zero.yaml")], "is a YAML file.*hf-dist config convert"),
    ):
        code, _, err = said(words, capsys)
        assert code == 1 and "Traceback" not in err
        assert re.search(says, err), err
