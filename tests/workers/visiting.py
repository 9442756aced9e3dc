"""A job that serves a teacher, and jobs that ask it, each started by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SECRET = "what these jobs know"


def with_job(folder: Path) -> dict[str, Any]:
    """The section of a trainer whose teacher is in another job."""
    os.environ.update(HF_DIST_SECRET=SECRET, TEACHER=f"127.0.0.1:{(folder / 'port').read_text()}")
    return {"hf_dist": {"roles": {"trainer": {"ranks": "rest"}, "teacher": {"job": "$TEACHER"}}}}


def _serves(folder: str) -> None:
    """Until it is killed: its two ranks hold halves of the teacher's matrices."""
    from hf_dist.run import main
    from tests.remote.call_jobs import HERE

    home = Path(folder).parent
    (home / f"server{os.environ['RANK']}").write_text(str(os.getpid()))
    os.environ["HF_DIST_SECRET"] = SECRET
    teacher = {"ranks": "rest", "model": str(home / "teacher"), "config": {"tensor_parallel": {"autotp_size": 2}}}
    teacher.update(port=int((home / "port").read_text()), functions=[HERE])
    file = home / "serving.json"
    file.write_text(json.dumps({"hf_dist": {"roles": {"teacher": teacher}}}))
    main(["--config", str(file)])


def _distils(folder: str) -> None:
    """Five steps; leaves losses, norms and weights."""
    from tests.remote.jobs import distil

    home = Path(folder).parent
    found = distil(int(os.environ["RANK"]), 0, str(home), {"zero_optimization": {"stage": 3}, **with_job(home)})
    assert found is not None and found["held"] == 0
    if os.environ["RANK"] == "0":
        torch.save(found, Path(folder) / "found.pt")


def _asks(act: Callable[[Path], None], folder: str) -> None:
    """Three calls; `act` is called before the third, on the last rank."""
    from hf_dist import DistAccelerator, remote_model

    home = Path(folder).parent
    accelerator = DistAccelerator(dist_config={"zero_optimization": {"stage": 3}, **with_job(home)})
    teacher = remote_model("teacher")
    for step in range(3):
        if step == 2 and accelerator.process_index == accelerator.num_processes - 1:
            act(home)
        teacher(input_ids=torch.full((2, 5), 7 + step)).logits.sum()


def _is_killed(home: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_the_teacher(home: Path) -> None:
    """Both of its ranks, where they live."""
    for rank in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((home / f"server{rank}").read_text()), signal.SIGKILL)


def _calls(folder: str) -> None:
    """Refused with another secret; then functions that the job allows, what it refuses by name, and that it goes on. The next
    visit finds nothing of this one."""
    import pytest

    from hf_dist import DistAccelerator, remote_call, remote_model
    from hf_dist.errors import ConfigError, RemoteError
    from hf_dist.hf import remote_call as calling
    from tests.remote import call_jobs

    sections = with_job(Path(folder).parent)
    os.environ["HF_DIST_SECRET"] = "what a stranger guesses"
    DistAccelerator(dist_config=sections)
    with pytest.raises(RemoteError, match="has refused this job: give both jobs the same HF_DIST_SECRET"):
        remote_call("teacher", call_jobs.living)
    os.environ["HF_DIST_SECRET"] = SECRET
    counter = remote_call("teacher", call_jobs.make, torch.tensor([1.0, 2.0]), times=3)
    total = remote_call("teacher", call_jobs.add, counter, {"more": [1, 2.5], "word": "so"}).get(rank=1)
    torch.testing.assert_close(total[0], torch.tensor([7.5, 10.5]))
    with pytest.raises(ConfigError, match=r"hf_dist.roles.teacher.functions: .* does not allow os:getcwd"):
        remote_call("teacher", "os:getcwd")
    with pytest.raises(ConfigError, match="in another job, which outlives this one"):
        remote_model("teacher", trains=True)
    calling._check_allowed = lambda *args: None  # an end that does not look
    with pytest.raises(RemoteError, match=r"os:getcwd is not in hf_dist.roles.teacher.functions"):
        remote_call("teacher", "os:getcwd").wait()
    with pytest.raises(RemoteError, match="role teacher answers no 'step'; it answers forward, hidden"):
        counter._ends.asker.wait(counter._ends.asker.ask("step", {})[0])
    for left in (1, 0):
        count = remote_call("teacher", call_jobs.living)
        assert count.get() == left
        count._ends.asker.close()


CASES: dict[str, Callable[[str], None]] = {
    "serves": _serves,
    "distils": _distils,
    "calls": _calls,
    "trainer_killed": lambda folder: _asks(_is_killed, folder),
    "teacher_killed": lambda folder: _asks(kill_the_teacher, folder),
}
