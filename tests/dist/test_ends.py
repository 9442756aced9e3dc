"""The last lines of a job tell the true reason, on every rank within seconds, and no rank is left behind."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from hf_dist.dist.patience import Patience
from tests.covering import some_of
from tests.workers.ending import LAYOUTS, PLANTED
from tests.workers.launcher import launch

WORKER = "tests.workers.ending"


def ended(case: str, folder: Path, sends_sigterm: bool = True) -> tuple[list[int | None], str]:
    codes, output, _ = launch(case, folder, worker=WORKER, sends_sigterm=sends_sigterm)
    assert None not in codes, "hangs\n" + output
    assert 0 not in codes, output
    return codes, output


def test_a_job_that_hangs_ends_when_it_is_told_and_names_its_last_checkpoint(tmp_path: Path) -> None:
    codes, output = ended("told", tmp_path, sends_sigterm=False)
    assert codes == [75, 75], output
    (line,) = [line for line in output.splitlines() if "SIGTERM came" in line]
    assert "nothing has moved since: rank 1" in line
    assert "is late, in: " in line
    assert line.endswith("Leaving without a save, with exit code 75; the newest checkpoint is checkpoint-1.")


@pytest.mark.parametrize("layout", some_of(LAYOUTS, "z3", "tp"))
def test_out_of_memory_between_two_steps_is_told_with_a_plan_and_ends_the_job(layout: str, tmp_path: Path) -> None:
    _, output = ended(f"memory_{layout}", tmp_path, sends_sigterm=False)
    assert "[rank 1] torch.OutOfMemoryError: CUDA out of memory (made up)" in output
    assert "what saves most:" in output
    assert "no plan" not in output, output


def test_words_about_memory_that_python_code_raises_are_no_lack_of_memory(tmp_path: Path) -> None:
    _, output = ended("memory_said", tmp_path)
    assert "[rank 1] RuntimeError: DefaultCPUAllocator: can't allocate memory (said by a callback)" in output
    assert "hf_dist measured" not in output


def test_an_interrupt_in_a_save_waits_for_its_end(tmp_path: Path) -> None:
    _, output = ended("interrupted", tmp_path)
    assert re.search(
        r"^\[rank 1\] interrupted \(KeyboardInterrupt\) at .*/hf_dist/dist/raise_on_all_ranks.py:", output, re.MULTILINE
    ), output
    assert "rank 1 (pid" in output and "ended: was interrupted (KeyboardInterrupt)" in output
    saved = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "checkpoint-")))
    assert len(saved) >= 2, saved
    assert not [name for name in saved if name.startswith(".incomplete")], saved


def test_an_error_of_every_rank_is_shown_once_with_each_ranks_own_words(tmp_path: Path) -> None:
    _, output = ended("everywhere", tmp_path, sends_sigterm=False)
    assert output.count("Traceback (most recent call last)") == 1, output
    first, second = sorted(set(re.findall(r"rank (\d) has no labels", output)))
    assert (first, second) == ("0", "1")
    assert re.search(r"^\[rank (\d)\] LookupError, at the same line as on rank (?!\1)\d: ", output, re.MULTILINE), (
        output
    )


def test_a_port_that_another_program_has_is_named_on_every_rank(tmp_path: Path) -> None:
    _, output = ended("stranger", tmp_path, sends_sigterm=False)
    found = re.findall(r"MASTER_PORT=(\d+): another program listens there on 127.0.0.1.*such as (\d+)", output)
    assert found, output
    assert all(taken != free for taken, free in found)


def test_an_output_folder_that_cannot_be_made_ends_the_job_with_a_line_and_no_traceback(tmp_path: Path) -> None:
    _, output = ended("nowhere", tmp_path)
    out = tmp_path / "file" / "out"
    told = f"hf_dist: ConfigError: output_dir: '{out}' cannot be made: {out.parent} is a file. Choose another folder"
    assert told in output.splitlines()[1] and "Traceback" not in output, output
    assert "[rank 1] lost the connection to another rank, which ended first; rank 0 (pid " in output, output


def test_one_rank_alone_without_memory_does_not_start_again_by_itself(tmp_path: Path) -> None:
    _, output = ended("alone", tmp_path, sends_sigterm=False)
    assert "rank 1 has no memory left for batches of 2, and other ranks have" in output, output
    assert "Set per_device_train_batch_size below 2" in output


def test_a_second_job_in_the_folder_of_the_first_ends_and_the_first_goes_on(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    codes: list[list[int | None]] = []
    first = threading.Thread(target=lambda: codes.append(launch("first", tmp_path / "first", worker=WORKER)[0]))
    first.start()
    assert Patience(60).until(lambda: (tmp_path / "out" / "in the middle").exists())
    _, output = ended("second", tmp_path / "second")
    assert output.count("out is being written by another job, process ") == 1, output
    (tmp_path / "over").touch()
    first.join()
    assert codes == [[0, 0]]
    left = sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != "in the middle")
    assert left == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "latest"]
    codes, output, _ = launch("second", tmp_path / "third", worker=WORKER)
    assert codes == [0, 0] and "resuming from" in output, output


SOME = some_of(PLANTED, "closed-backward-0")
"""By default the words of a lost peer; `test_watchdog.py` has other places."""


@pytest.mark.parametrize("case", SOME)
def test_the_last_lines_hold_the_text_and_the_frame_of_what_was_raised(case: str, tmp_path: Path) -> None:
    kind, _, number = case.split("-")
    _, output = ended(case, tmp_path, sends_sigterm=False)
    if kind == "exit":  # as in any program: its text, without frames
        assert "PLANTED" in output, output
        return
    last = output[-6000:]
    assert "<exception str() failed>" in last if kind == "silent" else "PLANTED" in last, output
    assert re.search(rf"^\[rank {number}\] .*in plant$", output, re.MULTILINE), output
