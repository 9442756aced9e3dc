"""Two jobs in one folder: the second learns who writes there; a dead job's claim is taken over, whatever its number says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.checkpoint import lock
from hf_dist.checkpoint.publish import recover
from hf_dist.dist.patience import Patience
from hf_dist.errors import CheckpointError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.02)
    monkeypatch.setattr(lock, "_DEAD_AFTER", 0.3)


class Job:
    """A process that makes the calls it is told to, and answers each with its error or ""."""

    def __init__(self) -> None:
        asked, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException), os.fdopen(asked) as lines:
                for line in lines:
                    name, path = line.rstrip("\n").split(" ", 1)
                    try:
                        text = str(getattr(lock, name)(Path(path)) or "")
                    except CheckpointError as error:
                        text = str(error)
                    os.write(answers, text.encode() + b"\n")
            os._exit(0)
        os.close(asked)
        os.close(answers)
        self._lines = os.fdopen(self._answer)

    def __call__(self, name: str, path: Path) -> str:
        os.write(self._ask, f"{name} {path}\n".encode())
        return self._lines.readline().rstrip("\n")

    def kill(self) -> None:
        """Also at the end of a test: processes started later have the pipe's other end, too, so closing it ends nothing."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._ask)
            self._lines.close()
        self.pid = 0


@pytest.fixture
def job() -> Iterator[Callable[[], Job]]:
    jobs: list[Job] = []

    def start() -> Job:
        jobs.append(Job())
        return jobs[-1]

    yield start
    for each in jobs:
        each.kill()


def test_the_second_job_learns_who_writes_and_a_dead_one_is_succeeded(tmp_path: Path, job: Callable[[], Job]) -> None:
    path = tmp_path / "out" / lock.OUTPUT
    first = job()
    assert first("claim", path) == ""
    assert first("claim", path) == "", "its own"
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}/out is being written by another job, process {first.pid} on "
    ):
        lock.claim(path)
    assert lock.is_claimed(path) and not lock.holds(path)
    lock.release(path)
    assert path.exists(), "another's is not released"
    first.kill()
    lock.claim(path)
    assert lock.holds(path) and not lock.is_claimed(path)
    lock.release(path)
    assert not list(path.parent.iterdir())


def test_the_number_of_a_process_that_comes_again_is_no_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / lock.OUTPUT
    lock.claim(path)
    said = json.loads(path.read_text())
    lock.release(path)
    path.write_text(json.dumps({**said, "process": said["process"] + "1", "token": "another"}))
    assert not lock.is_claimed(path)
    lock.claim(path)
    assert lock.holds(path)
    lock.release(path)


@pytest.mark.parametrize(
    "text", ['{"host": "node7", "pid": 12, "process": "elsewhere 5", "token": "x"}', "", "[1]", '{"pid": "?"}']
)
@pytest.mark.parametrize("lives", [True, False])
def test_on_another_machine_only_the_time_of_the_file_says_whether_the_job_lives(
    tmp_path: Path, text: str, lives: bool
) -> None:
    path, over = tmp_path / lock.OUTPUT, threading.Event()
    path.write_text(text)

    def beat() -> None:
        while not over.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=beat if lives else over.wait)
    thread.start()
    try:
        if lives:
            with pytest.raises(CheckpointError, match=f"delete {path}"):
                lock.claim(path)
        else:
            lock.claim(path)
        assert lock.holds(path) != lives
    finally:
        over.set()
        thread.join()
        lock.release(path)


def test_the_file_is_kept_fresh_and_its_loss_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / lock.OUTPUT
    lock.claim(path)
    first = path.stat().st_mtime_ns
    assert Patience(30).until(lambda: path.stat().st_mtime_ns != first)
    assert lock.taken_over(path) == ""
    path.write_text(json.dumps({"host": "node7", "pid": 3, "token": "another"}))
    assert "process 3 on node7" in lock.taken_over(path)
    lock.release(path)
    assert path.exists()


def test_of_many_that_come_together_one_gets_it(tmp_path: Path, job: Callable[[], Job]) -> None:
    jobs = [job() for _ in range(4)]
    for number in range(5):
        path = tmp_path / str(number) / lock.OUTPUT
        dead = job()
        dead("claim", path)
        dead.kill()
        for each in jobs:  # all before the first answer
            os.write(each._ask, f"claim {path}\n".encode())
        answers = [each._lines.readline().rstrip("\n") for each in jobs]
        assert answers.count("") == 1, answers
        assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("dead_on_the_way", [False, True])
def test_who_is_late_does_not_take_what_a_faster_job_has_taken(
    dead_on_the_way: bool, tmp_path: Path, job: Callable[[], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process sees that the file's job has ended; before it does anything about it, another job takes the file."""
    path = tmp_path / lock.OUTPUT
    dead, faster = job(), job()
    dead("claim", path)
    dead.kill()
    if dead_on_the_way:  # a job that ended with its ticket
        died = job()
        died("claim", lock._ticket(path, lock._read(path) or {}))
        died.kill()
    lives, passed = lock._lives, []

    def late(asked: Path, other: Mapping[str, Any]) -> bool:
        result = lives(asked, other)
        if not result and not passed:
            passed.append(faster("claim", path))
        return result

    monkeypatch.setattr(lock, "_lives", late)
    with pytest.raises(CheckpointError, match="is being written by another job"):
        lock.claim(path)
    assert passed == [""] and faster("holds", path) == "True"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_takes_nothing_from_the_dead_and_leaves_the_ticket_of_another_job(
    tmp_path: Path, job: Callable[[], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / lock.OUTPUT
    dead, faster = job(), job()
    dead("claim", path)
    dead.kill()
    faster("claim", lock._ticket(path, lock._read(path) or {}))
    before = sorted(tmp_path.iterdir())
    made = iter([False, True])  # the file is there; a ticket cannot be made
    monkeypatch.setattr(lock, "_made", lambda path, token: next(made))
    with pytest.raises(CheckpointError, match="nothing can be written"):
        lock.claim(path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("place", ["file", "file/below", "n" * 300, "/".join(["n" * 200] * 25), "/proc/none"])
def test_a_folder_that_cannot_be_made_or_written_claims_nothing(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock.claim(tmp_path / place / lock.OUTPUT)
    assert not lock.holds(tmp_path / place / lock.OUTPUT)
    lock.release(tmp_path / place / lock.OUTPUT)


def test_a_link_to_nothing_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / lock.OUTPUT).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="link to nothing"):
        lock.claim(tmp_path / lock.OUTPUT)


def test_what_another_job_writes_is_not_cleaned_up(tmp_path: Path, job: Callable[[], Job]) -> None:
    writes, dead = job(), job()
    for each, name in ((writes, "checkpoint-2"), (dead, "checkpoint-4")):
        each("claim", lock.writing_of(tmp_path / name))
        (tmp_path / f".incomplete-{name}").mkdir()
    dead.kill()
    recover(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".incomplete-checkpoint-2", lock.writing_of(tmp_path / "checkpoint-2").name}


STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["claim", "release", "kill"])), max_size=12)


@settings(max_examples=int(os.environ.get("HF_DIST_WALKS", "15")), deadline=None)
@given(STEPS)
def test_never_two_living_jobs_hold_one_folder(steps: list[tuple[int, str]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / lock.OUTPUT
        jobs = [Job() for _ in range(3)]
        holder: int | None = None
        try:
            for who, what in steps:
                if what == "kill":
                    jobs[who].kill()
                    jobs[who] = Job()
                    holder = None if holder == who else holder
                elif what == "release":
                    jobs[who]("release", path)
                    holder = None if holder == who else holder
                else:
                    answer = jobs[who]("claim", path)
                    assert bool(answer) == (holder not in (None, who)), (answer, holder, who)
                    holder = who if holder is None else holder
                held = [number for number, each in enumerate(jobs) if each("holds", path) == "True"]
                assert held == ([] if holder is None else [holder])
        finally:
            for each in jobs:
                each.kill()
