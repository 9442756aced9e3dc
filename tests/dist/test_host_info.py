"""What a process may have of this machine: memory within the limit of any cgroup around it, and how it is scheduled."""

from __future__ import annotations

import ast
import inspect
import os
import threading
from pathlib import Path

import pytest

from hf_dist.dist import host_info
from hf_dist.dist.host_info import available_nbytes, memory_kills, memory_report, share_nbytes
from hf_dist.dist.watchdog.thread import Watchdog

GB = 10**9


def kernel(folder: Path, cgroup: str = "0::/") -> tuple[Path, Path]:
    """(root of the cgroups, /proc) of a machine with 100 GB available."""
    root, proc = folder / "cgroup", folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:  200000000 kB\nMemAvailable:  {100 * GB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup + "\n")
    root.mkdir()
    return root, proc


def limit(folder: Path, most: str, used: int, cached: int = 0, v1: bool = False) -> None:
    """The limit of one cgroup and what it uses, in GB."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file") if v1 else ("max", "current", "inactive_file")
    (folder / f"memory.{names[0]}").write_text(most)
    (folder / f"memory.{names[1]}").write_text(f"{used * GB}")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached * GB}\nactive_file 7\n")


def test_without_a_limit_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    root, proc = kernel(tmp_path)
    limit(root, "max", 30)
    assert available_nbytes(root, proc) == pytest.approx(100 * GB, rel=1e-6)


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    root, proc = kernel(tmp_path)
    limit(root, f"{32 * GB}", 12)
    assert available_nbytes(root, proc) == 20 * GB


def test_files_that_were_read_are_given_back(tmp_path: Path) -> None:
    root, proc = kernel(tmp_path)
    limit(root, f"{32 * GB}", 30, cached=25)
    assert available_nbytes(root, proc) == 27 * GB


def test_a_limit_further_out_counts_as_those_of_a_slurm_job_around_its_step(tmp_path: Path) -> None:
    root, proc = kernel(tmp_path, "0::/system.slice/slurm/job_7/step_0/user/task_0")
    job = root / "system.slice" / "slurm" / "job_7"
    limit(job, f"{40 * GB}", 10)
    limit(job / "step_0" / "user" / "task_0", "max", 1)
    assert available_nbytes(root, proc) == 30 * GB
    limit(job / "step_0", f"{20 * GB}", 10)
    assert available_nbytes(root, proc) == 10 * GB


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    root, proc = kernel(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/slurm/uid_1/job_2\n1:name=systemd:/")
    limit(root / "memory", f"{2**63 - 4096}", 60, v1=True)
    limit(root / "memory" / "slurm" / "uid_1" / "job_2", f"{16 * GB}", 6, cached=2, v1=True)
    assert available_nbytes(root, proc) == 12 * GB


def test_a_path_of_the_host_inside_a_container_leads_to_the_containers_own(tmp_path: Path) -> None:
    root, proc = kernel(tmp_path, "0::/../../docker/abc")
    limit(root, f"{8 * GB}", 2)
    assert available_nbytes(root, proc) == 6 * GB


def test_more_used_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    root, proc = kernel(tmp_path)
    limit(root, f"{8 * GB}", 9)
    assert available_nbytes(root, proc) == 0


def test_a_kernel_that_does_not_say_is_not_asked(tmp_path: Path) -> None:
    assert available_nbytes(tmp_path, tmp_path) is None
    assert share_nbytes(tmp_path, tmp_path) is None


def test_the_ranks_of_a_machine_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, proc = kernel(tmp_path)
    limit(root, f"{32 * GB}", 12)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert share_nbytes(root, proc) == 5 * GB
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert share_nbytes(root, proc) == 20 * GB // 8


def test_what_the_kernel_says_of_memory_and_of_a_process(tmp_path: Path) -> None:
    assert memory_kills(tmp_path) == 0
    (tmp_path / "memory.events").write_text("low 0\nhigh 12\noom 2\noom_kill 2\n")
    (tmp_path / "memory.max").write_text("120000000000\n")
    assert memory_kills(tmp_path) == 2
    assert memory_report(2, tmp_path) == ""
    assert "killed 1 process for host memory" in memory_report(1, tmp_path)
    assert "the limit here is 120 GB" in memory_report(1, tmp_path)
    assert memory_kills(tmp_path / "none") == 0
    assert host_info.resident_nbytes() > 1_000_000
    assert host_info.process_state(os.getpid()) in "RS"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_a_rank_and_its_threads_interrupt_nobody_when_they_wake_up() -> None:
    found = []

    def rank() -> None:
        host_info.schedule_as_batch()
        host_info.schedule_as_batch()
        found.append(os.sched_getscheduler(0))
        one = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        one.start()
        one.join()

    policy = os.sched_getscheduler(0)
    thread = threading.Thread(target=rank)  # the policy belongs to a thread and to those that it starts
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH] * 2
    assert os.sched_getscheduler(0) == policy


def test_nobody_else_asks_for_free_memory_or_for_the_ranks_of_a_machine() -> None:
    words = ("MemAvailable", "mem_get_info", '"LOCAL_WORLD_SIZE"')
    package = Path(host_info.__file__).parents[1]
    # One tells what launchers say, one shows it, one is the message of an error that has happened, one starts ranks, one
    # measures what a GPU holds beside tensors, one runs what is no job of ranks in a rank.
    others = {
        "dist/host_info.py",
        "dist/launch.py",
        "tools/cli/env.py",
        "planning/out_of_memory.py",
        "tools/bench/processes.py",
    }
    others |= {"planning/overhead.py", "tools/check/runs.py"}
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in words)
    }
    assert found <= others, found - others


def test_the_watchdog_hides_nothing_of_python_s_own_thread() -> None:
    """Python calls some of it after a fork: a worker of a loader printed a TypeError for `_stop`."""
    source = ast.parse(Path(inspect.getfile(Watchdog)).read_text(encoding="utf-8"))
    stored = [n for n in ast.walk(source) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assert {node.attr for node in stored} & set(dir(threading.Thread)) == set()
