"""Under torchrun and accelerate: a killed or stopped rank, a stopped launcher, a lost node; the run goes on by itself.

By default a killed rank under accelerate, which starts torch's launcher, and a job that is stopped under torchrun. That all
ranks follow one that is told to stop is in `test_preemption.py`, that fewer ranks continue a run in `test_resume_elsewhere.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dist.dist.patience import crowding
from hf_dist.dist.ports import HeldPort
from tests import forked, processes
from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.harness import ROOT
from tests.workers.elastic import LAST

LIMIT = 400
WORKER = f"{ROOT}/tests/workers/elastic.py"
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--monitor-interval", "0.1"]
Log = dict[int, list[float]]


def environment(**more: str) -> dict[str, str]:
    """That of a user on a machine without GPUs."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def launched(folder: Path, command: list[str], is_real: bool = False, **more: str) -> tuple[int, str]:
    """Exit code and output of a launcher, forked or in an interpreter of its own; a job that hangs fails the test."""
    command, env = [sys.executable, "-m", *command], environment(**more)
    if is_real:
        done = processes.run(
            command, cwd=ROOT, env=env, timeout=LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    else:
        done = forked.run(command, cwd=ROOT, env=env, timeout=LIMIT)
    return done.returncode, done.stdout


def torchrun(folder: Path, case: str, *options: str, is_real: bool = False) -> tuple[int, str]:
    """Two processes."""
    return launched(folder, [*TORCHRUN, *options, WORKER, str(folder), case], is_real)


def log(folder: Path) -> Log:
    """Loss, gradient norm, learning rate, ranks and restarts of each step; the last entry counts."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return {int(entry[0]): entry[1:] for entry in map(json.loads, lines)}


def numbers(of: Log) -> dict[int, list[float]]:
    """What must be equal."""
    return {step: entry[:3] for step, entry in of.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """The log of a run to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = torchrun(folder, "nothing")
    assert code == 0, output
    assert sorted(log(folder)) == list(range(1, LAST + 1))
    return log(folder)


@FULL_GRID_ONLY
@pytest.mark.timeout(2 * LIMIT)
def test_torchrun_restarts_all_when_a_rank_is_killed_and_the_run_resumes_by_itself(whole: Log, tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, "killed", "--max-restarts", "2", is_real=True)
    assert code == 0, output
    assert "resuming from" in output
    again = log(tmp_path)
    assert again[LAST][4] == 1, "one restart"
    assert numbers(again) == numbers(whole)


@FULL_GRID_ONLY
@pytest.mark.timeout(2 * LIMIT)
def test_a_rank_that_is_told_to_stop_takes_the_others_along_and_all_are_restarted(whole: Log, tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, "told", "--max-restarts", "1")
    assert code == 0, output
    assert "SIGTERM: stopped after step 3" in output
    assert numbers(log(tmp_path)) == numbers(whole)


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("case", ["launcher", "job"] if FULL_GRID else ["job"])  # a job tells its launcher, too
def test_a_launcher_that_is_told_to_stop_gives_the_ranks_time_to_save(case: str, whole: Log, tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, case)
    assert code != 0
    assert 3 <= max(log(tmp_path)) < LAST, "in the middle"
    code, output = torchrun(tmp_path, case)
    assert code == 0, output
    assert numbers(log(tmp_path)) == numbers(whole)


LAST_LINES = {
    "interrupted": "interrupted after step {step}; the newest checkpoint is {out}/checkpoint-{saved}; "
    'with resume_from_checkpoint="{out}/checkpoint-{saved}" the run continues from there.',
    "launcher": "SIGTERM: stopped after step {step}, saved as checkpoint-{step}; leaving with exit code 75. ",
}


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("case", LAST_LINES if FULL_GRID else ["interrupted"])
def test_the_last_line_after_a_signal_tells_what_is_saved_and_how_to_go_on(case: str, tmp_path: Path) -> None:
    command = [*TORCHRUN, WORKER, str(tmp_path), case]
    done = forked.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment(), timeout=LIMIT,
        until=lambda said: said.splitlines()[-1].startswith("hf_dist: "),
    )  # fmt: skip
    output = done.stdout
    assert done.returncode != 0
    *_, before, last = output.splitlines()
    assert re.search(r"SignalException: Process \d+ got signal: (2|15)$", before), output
    saved = (tmp_path / "latest").read_text().strip().rpartition("-")[2]
    step = re.findall(r"after step (\d+)", last)
    assert last.startswith("hf_dist: " + LAST_LINES[case].format(step=step[0], saved=saved, out=tmp_path)), output
    assert output.count("Traceback (most recent call last)") == 1, "the launcher's"


@FULL_GRID_ONLY  # a stopped job says its code above
@pytest.mark.timeout(2 * LIMIT)
def test_exit_codes_tell_the_launcher_that_a_restart_helps(tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, "told")
    assert code != 0
    assert "exitcode  : 75" in output and "exitcode  : -15" not in output, output


@FULL_GRID_ONLY
@pytest.mark.timeout(2 * LIMIT)
def test_a_lost_node_leaves_the_rest_to_go_on_with_the_same_global_batch(whole: Log, tmp_path: Path) -> None:
    port = HeldPort()
    command = ["torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    command += [
        "--monitor-interval",
        "0.1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port.number}",
        "--rdzv-id",
        "x",
    ]

    last_call = round(15 * crowding())  # how long the first agent waits for the second one, and then for nobody

    def agent(is_host: int, **more: str) -> forked.Job:
        settings = f"is_host={is_host},last_call_timeout={last_call},keep_alive_interval=1"
        words = [sys.executable, "-m", *command, "--rdzv-conf", settings, WORKER, str(tmp_path), "node"]
        return forked.start(words, cwd=ROOT, env=environment(**more))

    jobs = [agent(1), agent(0, VICTIM="1")]
    done = jobs[0].end(LIMIT)
    jobs[1].process.kill()
    port.release()
    assert done.returncode == 0, done.stdout
    again = log(tmp_path)
    assert again[1][3] == 2 and again[LAST][3] == 1, "two ranks, then one"
    assert sorted(again) == list(range(1, LAST + 1))
    for step, entry in numbers(again).items():
        assert entry == pytest.approx(whole[step][:3], rel=2e-5)


@pytest.mark.timeout(2 * LIMIT)
def test_accelerate_launch_restarts_too(whole: Log, tmp_path: Path) -> None:
    command = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--max_restarts", "1", "--monitor_interval", "0.1"]
    with HeldPort() as port:
        command += ["--main_process_port", str(port.number), WORKER, str(tmp_path), "killed"]
        code, output = launched(tmp_path, command, ACCELERATE_USE_CPU="true")
    assert code == 0, output
    assert numbers(log(tmp_path)) == numbers(whole)
