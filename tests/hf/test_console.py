"""What a user sees while it trains: two lines per record, whole progress bars, ten lines at the start, silence where asked."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback

from hf_dist import log
from hf_dist.hf.callbacks import console
from hf_dist.hf.callbacks.console import show_records, terminal_lines
from hf_dist.version import TESTED, __version__, untested
from tests.harness import ROOT
from tests.hf.test_monitors import trained

SPLIT = ("data", "forward_backward", "optimizer", "communication_wait", "other")
SIZES = st.floats(1e-6, 1e9)


class Terminal(io.StringIO):
    """A terminal of one column after the other: what stands on its lines in the end."""

    def isatty(self) -> bool:
        """A bar is drawn as on a terminal."""
        return True

    @property
    def lines(self) -> list[str]:
        """Lines, as carriage returns have left them."""
        shown = []
        for line in self.getvalue().split("\n"):
            text = ""
            for part in line.split("\r"):
                text = part + text[len(part) :]
            shown.append(text.rstrip())
        return shown


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger as in a program that has set up nothing. In the test: pytest adds its handlers after the fixtures."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(log.logger, "handlers", [])
    monkeypatch.setattr(log.logger, "level", logging.NOTSET)
    monkeypatch.setattr(log, "_followed", None)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setenv("RANK", "0")


# ---- records


@settings(max_examples=50, deadline=None)
@given(
    SIZES, SIZES, SIZES, st.floats(1e-6, 1e3), st.integers(0, 4095), st.lists(st.floats(0, 100), min_size=5, max_size=5)
)
def test_a_record_is_two_lines_of_80_columns(
    size: float, rate: float, speed: float, tflops: float, rank: int, split: list[float]
) -> None:
    stock = {"loss": size, "grad_norm": size, "learning_rate": rate, "epoch": size}
    measured = {"samples_per_second": speed, "tokens_per_second_per_rank": speed, "model_tflops_per_rank": tflops}
    measured |= {"memory_peak_gb": speed, "memory_peak_rank": rank}
    measured |= {f"time_{phase}_percent": share for phase, share in zip(SPLIT, split, strict=True)}
    first, second = terminal_lines(stock | measured, 80)
    assert len(first) <= 80 and len(second) <= 80
    assert all(f"{name} {value:.4g}" in first for name, value in stock.items())
    assert "tokens/s" in second and "FLOP/s" in second and "B" in second


def test_units_and_small_numbers_are_readable() -> None:
    record = {"loss": 2.5, "model_tflops_per_rank": 0.0005615, "samples_per_second": 12.72, "memory_peak_gb": 0.5481}
    record |= {"memory_peak_rank": 0, **{f"time_{phase}_percent": 20.0 for phase in SPLIT}}
    assert terminal_lines(record, 120) == [
        "loss 2.5",
        "  12.7 samples/s  562 MFLOP/s/rank  548 MB  compute 40%  wait 20%  data 20%  other 20%",
    ]


def test_a_record_of_the_program_or_of_an_evaluation_loses_nothing() -> None:
    record = {f"rewards/a name of some length {i}": f"{i}.25" for i in range(20)} | {"total_flos": 3.0}
    text = " ".join(terminal_lines(record, 80))
    assert all(f"{name} {value}" in text for name, value in record.items() if name != "total_flos")


def test_only_hf_s_own_printing_is_replaced_and_a_file_gets_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mine(PrinterCallback):
        """Of a program."""

    callbacks: list[Any] = [ProgressCallback(), Mine(), PrinterCallback()]
    show_records(callbacks)
    assert [type(one) for one in callbacks] == [console._Progress, Mine, console._Printer]
    state: Any = type("State", (), {"is_local_process_zero": True})()
    callbacks[2].on_log(None, state, None, logs={"loss": 0.5})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    callbacks[2].on_log(None, state, None, logs={"loss": 0.5})
    assert capsys.readouterr().out.splitlines() == ["{'loss': '0.5'}", "loss 0.5"]


# ---- lines


@pytest.mark.parametrize("of_program", [False, True], ids=["our handler", "the program's handler"])
def test_a_line_does_not_break_a_progress_bar(of_program: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    if of_program:
        monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(terminal)])
        log.logger.setLevel(logging.INFO)
    with tqdm(total=4, file=sys.stderr, ncols=40, mininterval=0) as bar:
        for number in range(4):
            bar.update()
            log.say(f"a line {number}")
        log.warn("a warning")
    *lines, last, rest = terminal.lines
    assert lines == [f"a line {number}" for number in range(4)] + ["a warning"] and rest == ""
    assert last.startswith("100%") and "4/4" in last


def test_every_line_goes_through_one_module() -> None:
    """Else it would break the bar."""
    called = re.compile(r"\blogger\.(debug|info|warning)\(")
    found = [
        str(path)
        for path in Path(ROOT, "hf_dist").rglob("*.py")
        if path.name != "log.py" and called.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(("level", "speaks"), [("error", False), ("warning", False), ("info", True), ("passive", True)])
def test_log_level_silences_us_as_it_does_hf(
    level: str, speaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forget(monkeypatch)
    verbosity = transformers.logging.get_verbosity()
    try:
        trained(tmp_path, {}, log_level=level)
    finally:
        transformers.logging.set_verbosity(verbosity)
    said = [line for line in capfd.readouterr().err.splitlines() if "hf_dist" in line or line.startswith("  ")]
    assert bool(said) is speaks, said


# ---- the start


def test_the_report_of_a_plain_job_is_ten_lines_and_whole_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forget(monkeypatch)
    trained(tmp_path, {})
    brief = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("hf_dist", "  "))]
    assert brief[0].startswith("hf_dist start-up report") and '"dump_state": true' in brief[0]
    assert len(brief) <= 10 and all(len(line) <= 80 for line in brief), brief
    for word in ("layout", "batch", "precision", "memory", "config"):
        assert sum(line.startswith(f"  {word}") for line in brief) == 1, word
    assert any("differs from DeepSpeed: gradient_clipping" in line for line in brief)
    trained(tmp_path, {"dump_state": True})
    whole = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("hf_dist", "  "))]
    assert len(whole) > 20 and any("DeepSpeed under HF reads this key alone" in line for line in whole)
    assert not any("no effect" in line for line in whole)


def test_nothing_is_said_of_a_disk_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forget(monkeypatch)
    trained(tmp_path, {}, save_strategy="steps", save_steps=3)
    assert "are free in" not in capfd.readouterr().err


# ---- what a hub shows


def test_a_model_card_names_hf_dist_and_the_folder_explains_its_files(tmp_path: Path) -> None:
    trainer = trained(tmp_path, {})
    for _ in range(2):
        trainer.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    versions = card.partition("### Framework versions")[2]
    assert re.findall(r"^- (\w+) ", versions, re.M)[-1] == "hf_dist" and card.count("hf_dist ") == 1
    assert f"- hf_dist {__version__} (one process on cpu, no communication; ZeRO stage 3)" in versions
    trainer.save_model(str(tmp_path / "final"))
    about = json.loads((tmp_path / "final" / "hf_dist_weights.json").read_text(encoding="utf-8"))["about"]
    assert "from_pretrained does not read it" in about
    ours = [path.name for path in (tmp_path / "final").iterdir() if "hf_dist" in path.name]
    assert ours == ["hf_dist_weights.json"] and ours[0] in versions
    assert torch.equal(
        type(trainer.model).from_pretrained(tmp_path / "final").lm_head.weight, trainer.model.lm_head.weight
    )


# ---- versions


def test_versions_beyond_the_newest_row_are_told() -> None:
    assert untested({"torch": "2.15.0", "transformers": "5.24.9", "numpy": "99"}) == [
        f"torch 2.15.0 is newer than {TESTED['torch']}, the newest that hf_dist {__version__} was tested with"
    ]
    assert untested({"torch": "2.14.1+cpu", "accelerate": "1.3"}) == []


def test_the_newest_tested_versions_are_those_of_the_table() -> None:
    table = Path(ROOT, "tests", "VERSIONS.md").read_text(encoding="utf-8")
    cells = [cell.strip() for cell in re.findall(r"^\| newest \|.*$", table, re.M)[0].split("|")]
    newest = dict(zip(("torch", "transformers", "accelerate"), cells[3:6], strict=True))
    assert {library: version.rpartition(".")[0] for library, version in newest.items()} == TESTED
