"""A job never just hangs: it says who is late, where, and what the others wait for; and it says nothing when all is well."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_dist.dist.watchdog import departure, thread, watch
from hf_dist.dist.watchdog.departure import Departure
from hf_dist.dist.watchdog.location import WAITS_FOR_CALLS, Location, find_location
from hf_dist.dist.watchdog.report import (
    Status,
    called_alone,
    describe_stall,
    lost_rank,
    numbers,
    unheeded,
    who_is_late,
)
from hf_dist.dist.watchdog.thread import Watchdog
from hf_dist.dist.watchdog.wire import Collector, Sender
from tests import forked, processes
from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.harness import ROOT
from tests.workers.launcher import launch

WORKER = "tests.workers.stalling"
WAITS = Location("training step > forward", "model.layers.3", "the gather of weights", ("a.py:1 in wait",))
WORKS = Location("data loader > collate", "", "", ("train.py:88 in pad",))


def stall(*statuses: Status, world: int = 4) -> str | None:
    """The report with a limit of 60 s; a rank that said nothing for 16 s does not answer."""
    return describe_stall(statuses, limit=60, silence=16, world=world)


# ---- the verdict


def test_the_rank_that_works_is_late_and_its_stack_is_shown() -> None:
    waiting = [Status(rank, "gpu-1", 10 + rank, 7, 61, WAITS) for rank in (0, 1, 3)]
    text = stall(*waiting, Status(2, "gpu-2", 99, 7, 64, WORKS))
    assert text is not None
    assert "no progress for 61 s at step 8" in text
    assert "rank 2 (pid 99 on gpu-2) is late, in: data loader > collate, at the same line for 64 s" in text
    assert "train.py:88 in pad" in text
    assert "a.py:1" not in text, "stacks of those that only wait are noise"
    assert "ranks 0-1, 3: waits for the gather of weights in: training step > forward, model.layers.3" in text


def test_every_rank_is_named_with_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role of a start counts its ranks from 0: two of them would say the same."""
    late, gone = Status(2, "b", 99, 7, 64, WORKS), Status(1, "a", 5, 3, ended=True)
    waiting = [Status(rank, "a", 10 + rank, 7, 61, WAITS) for rank in (0, 3)]
    several = replace(waiting[0], location=replace(WAITS, called="save() at a.py:1"))

    def texts() -> str:
        alone = called_alone([several, *(replace(s, still=99) for s in waiting[1:])], patience=10, world=2)
        told = unheeded([replace(s, told=20) for s in (late, *waiting)], 10, 60)
        said = [stall(late, gone, *waiting, world=6), lost_rank([gone], ""), who_is_late([late], 4), numbers([0, 1, 3])]
        return "\n".join([*filter(None, said), str(alone), str(told)])

    plain = texts()
    monkeypatch.setenv("HF_DIST_ROLE", "reward")
    said = texts()
    assert len(re.findall(r"\branks? \d", plain)) > 10
    assert re.sub(r"\b(ranks? \d)", r"reward \1", plain) == said


@pytest.mark.parametrize(
    ("waits_for", "called", "ends"),
    [
        ("every rank to make the same call", "save() at a.py:1", "raises"),
        ("the gather of weights", "the forward of the model at a.py:1", "leaves"),
        ("a barrier", "", "goes on"),  # it has caught the error of the first verdict
        ("", "", "goes on"),
    ],
)
def test_a_verdict_on_a_lone_call_ends_that_call_only(
    waits_for: str, called: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = ["goes on"]
    monkeypatch.setattr("hf_dist.dist.collective_guard.report", lambda text: happened.append("raises"))
    monkeypatch.setattr("hf_dist.dist.excepthook.leave_alone", lambda text: happened.append("leaves"))
    here = SimpleNamespace(_location=lambda: Location("", "", waits_for, (), called))
    Watchdog._end_lone_call(here, "save() was called by rank 0 alone")  # type: ignore[arg-type]
    assert happened[-1] == ends


@pytest.mark.parametrize("location", [WAITS, WORKS])
def test_a_stopped_rank_is_late_even_if_it_has_just_said_that_it_waits(location: Location) -> None:
    stopped = Status(1, "a", 5, 3, 0, location, silent=0.5, state="T")
    words = who_is_late([stopped, Status(2, location=WAITS, silent=0.5, state="S")], silence=4)
    assert words.startswith("rank 1 (pid 5 on a) does not answer: it is stopped (SIGSTOP") and "rank 2" not in words


@pytest.mark.parametrize(
    "statuses",
    [
        [Status(rank, still=500, location=WORKS) for rank in range(4)],
        [Status(rank, still=59, location=WAITS) for rank in range(4)],
        [Status(0, still=0, location=WORKS)],
        [Status(0, still=500, location=Location(WAITS_FOR_CALLS)), Status(1, still=500, location=WAITS)],
    ],
    ids=["all_compute_for_long", "all_wait_briefly", "others_not_there_yet", "a_role_waits_for_its_trainer"],
)
def test_nothing_is_said_while_nobody_has_waited_for_long(statuses: list[Status]) -> None:
    assert stall(*statuses) is None


def test_a_rank_that_saves_is_named_with_what_it_does() -> None:
    saving = Location("callbacks > saving", stack=("save.py:3 in write",))
    text = stall(Status(0, still=90, location=WAITS), Status(1, pid=5, host="a", still=0.4, location=saving), world=2)
    assert text is not None
    assert "callbacks > saving, and moves (callbacks may legitimately take this long)" in text


@pytest.mark.parametrize(
    ("state", "words"), [("T", "kill -CONT 5"), ("R", "native code"), ("D", "disk"), ("", "cannot be reached")]
)
def test_a_silent_rank_is_told_from_a_late_one(state: str, words: str) -> None:
    silent = Status(1, "a", 5, 3, 0, WORKS, silent=70, state=state)
    text = stall(Status(0, still=61, location=WAITS), silent, world=2)
    assert text is not None
    assert "rank 1 (pid 5 on a) does not answer" in text
    assert words in text
    assert "70 s ago it was in: data loader > collate" in text


def test_a_rank_that_was_never_heard_of_is_named() -> None:
    text = stall(Status(0, still=61, location=WAITS), Status(1, still=61, location=WAITS), world=4)
    assert text is not None
    assert "rank 2 does not answer" in text
    assert "rank 3 does not answer" in text


def test_when_all_wait_the_few_that_wait_for_something_else_are_shown() -> None:
    other = Location("evaluation > forward", "vision", "all_gather_object()", ("b.py:2 in gather",))
    text = stall(*[Status(r, still=61, location=WAITS) for r in (0, 1, 2)], Status(3, still=61, location=other))
    assert text is not None
    assert "took different paths" in text
    assert "Python stack of rank 3" in text
    assert "rank 3: waits for all_gather_object() in: evaluation > forward, vision" in text


def test_a_rank_that_ended_without_a_word_was_killed() -> None:
    dead = Status(1, "a", 5, 3, 0, WORKS, rss=118_400_000_000, silent=1, ended=True)
    text = lost_rank([Status(0), dead], "the kernel has killed 1 process for host memory since the start")
    assert text is not None
    for part in ("rank 1 (pid 5 on a)", "was killed", "collate", "118 GB", "for host memory since"):
        assert part in text
    said = Status(1, silent=1, ended=True, last_words="[rank 1] Traceback\n[rank 1] ValueError: no rows")
    assert "ended: ValueError: no rows" in str(lost_rank([said], "the kernel has killed 1 process"))
    assert "kernel" not in str(lost_rank([said], "the kernel has killed 1 process"))


def test_a_rank_that_only_lost_its_peers_is_not_blamed_for_the_end_of_the_job() -> None:
    killed = Status(1, "a", 5, silent=1, ended=True)
    for words in (
        "lost the connection to another rank, which ended first",
        "waited for another rank until the timeout of a process group was over (ddp_timeout)",
        "waited for a rank that had ended",
    ):
        longer = Status(0, "a", 4, silent=4, ended=True, last_words=words)
        assert "rank 1 (pid 5 on a) ended: it said nothing" in str(lost_rank([longer, killed], ""))
        assert f"rank 0 (pid 4 on a) ended: {words}" in str(lost_rank([longer], "")), "no other is known"
    failed = Status(1, "a", 5, silent=1, ended=True, last_words="[rank 1] ValueError: no rows")
    assert "rank 1 (pid 5 on a) ended: ValueError" in str(lost_rank([longer, failed], ""))


def test_ranks_are_counted_in_runs() -> None:
    assert numbers([0, 1, 2, 5, 7, 6]) == "ranks 0-2, 5-7"
    assert numbers([4]) == "rank 4"


class Clock:
    """`time.monotonic`, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(departure.time, "monotonic", lambda: self.now)


def test_a_rank_leaves_when_it_has_stood_still_since_another_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lost = Clock(monkeypatch), Departure()
    waits, works = Status(1, still=500, location=WAITS), Status(1, still=500, location=WORKS)
    assert not lost.is_due(waits, 60), "nobody has ended: that is what ddp_timeout is for"
    assert lost.note("rank 2 was killed") and not lost.note("rank 2 was killed")
    assert not lost.is_due(waits, 60), "the launcher, or gloo, may end it in a better way"
    clock.now += Departure.grace
    assert lost.is_due(waits, 60)
    assert not lost.is_due(works, 60), "it saves what it has by itself"
    assert not lost.is_due(replace(waits, still=Departure.grace - 1), 60), "it moves"
    assert lost.note("")
    assert not lost.is_due(waits, 60), "only the connection was lost"


def test_a_rank_that_came_to_its_end_is_waited_for_as_long_as_nobody_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lost = Clock(monkeypatch), Departure()
    lost.note("rank 2 left without an error", left_well=True)
    clock.now += 59
    assert not lost.is_due(Status(1, still=500, location=WAITS), 60)
    clock.now += 1
    assert lost.is_due(Status(1, still=500, location=WAITS), 60)


# ---- what it is made from


def test_a_place_that_was_read_keeps_nothing_alive() -> None:
    """Frames hold their locals, gathered weights for example: not a moment longer than without the watchdog."""

    class Held:
        pass

    begun, done = threading.Event(), threading.Event()

    def work() -> weakref.ref[Held]:
        held = Held()
        begun.set()
        assert done.wait(30)
        return weakref.ref(held)

    def look() -> None:
        assert begun.wait(30)
        find_location({})
        done.set()

    gc.collect()
    gc.disable()
    try:
        watcher = threading.Thread(target=look)
        watcher.start()
        held = work()
        watcher.join()
        assert held() is None
    finally:
        gc.enable()


def test_the_place_is_that_of_the_thread_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Ray Train, whose main thread waits for the one that runs the loop."""

    class Fake:
        """A running one."""

        engines: set[object] = set()
        thread = threading.main_thread().ident

        def introduce(self) -> None:
            """Nobody listens."""

    class Engine:
        """One that is made in the loop."""

    fake, ready, seen = Fake(), threading.Event(), threading.Event()
    monkeypatch.setattr("hf_dist.dist.watchdog.thread._watchdog", fake)

    def loop_of_the_user() -> None:
        watch(Engine())
        ready.set()
        seen.wait(10)

    trains = threading.Thread(target=loop_of_the_user)
    trains.start()
    ready.wait(10)
    found = find_location({}, thread=fake.thread)
    seen.set()
    trains.join()
    assert any("loop_of_the_user" in line for line in found.stack), found.stack
    assert not any("loop_of_the_user" in line for line in find_location({}).stack)


def test_a_place_is_read_from_another_thread() -> None:
    from torch import nn

    class Slow(nn.Module):
        """Waits to be looked at."""

        def forward(self) -> None:
            """Until the other thread has looked."""
            ready.set()
            seen.wait(10)

    ready, seen, locations = threading.Event(), threading.Event(), []
    model = nn.ModuleDict({"block": Slow()})
    names = {id(module): name for name, module in model.named_modules()}

    def look() -> None:
        ready.wait(10)
        locations.append(find_location(names))
        seen.set()

    looker = threading.Thread(target=look)
    looker.start()
    model["block"]()
    looker.join()
    assert locations[0].block == "block"
    assert locations[0].activity == "forward"
    assert locations[0].waits_for == ""
    assert any("test_watchdog.py" in line and "in forward" in line for line in locations[0].stack)
    assert not any("module.py" in line for line in locations[0].stack)


def test_a_collector_hears_who_spoke_who_left_and_why() -> None:
    collector = Collector("secret")
    address = ("127.0.0.1", collector.port)
    one, two, stranger = Sender(address, "secret", 1), Sender(address, "secret", 2), Sender(address, "guess", 3)
    for sender in (one, two, stranger):
        sender.send({"status": {"still": 1}})
    collector.poll(0.2)
    assert sorted(collector.heard) == [1, 2]
    one.send({"last_words": "ValueError"})
    one.close()
    two.close()
    collector.poll(0.2)
    assert collector.heard[1].last_words == "ValueError"
    assert collector.heard[2].last_words is None
    assert collector.heard[2].ended is not None
    three = Sender(("127.0.0.1", collector.port), "secret", 3)
    three.send({"status": {}})
    collector.poll(0.2)
    assert three.hear() == []
    collector.send({"lost": "rank 2"})
    collector.send({"left": ""})
    assert three.hear() == [{"lost": "rank 2"}, {"left": ""}]
    assert three.is_open
    collector.close()
    assert three.hear() == [] and not three.is_open
    one.send({"status": {}})  # nobody listens: dropped, without an error


def test_a_collector_listens_where_it_is_called_and_drops_strangers() -> None:
    collector = Collector("secret", "127.0.0.1", ranks=2)
    assert collector._server.getsockname()[0] == "127.0.0.1"
    address = ("127.0.0.1", collector.port)
    one = Sender(address, "secret", 1)
    one.send({"status": {"still": 1}})
    strangers = [socket.create_connection(address) for _ in range(50)]
    collector.poll(0.5)
    assert len(collector._unread) == 1 + 8  # a rank, and the strangers that came last
    one.send({"status": {"still": 2}})
    collector.poll(0.2)
    assert collector.heard[1].ended is None and one.is_open
    for stranger in strangers:
        stranger.close()
    collector.close()


def test_an_address_that_is_not_of_this_machine_is_no_error() -> None:
    collector = Collector("secret", "203.0.113.7")
    assert collector._server.getsockname()[0] == "0.0.0.0"
    collector.close()


def test_one_process_has_no_watchdog(tmp_path: Path) -> None:
    program = (
        "import torch, hf_dist, threading; m = torch.nn.Linear(4, 4)\n"
        "hf_dist.initialize(m, config={'train_micro_batch_size_per_gpu': 1, 'hf_dist': {'stall_report_seconds': 1}})\n"
        "print([t.name for t in threading.enumerate()])"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(script)]
    if FULL_GRID:
        done = processes.run(command, env={**environment, "PYTHONPATH": ROOT}, timeout=100)
    else:
        done = forked.run(command, cwd=ROOT, env={**environment, "PYTHONPATH": ROOT}, timeout=100, apart=True)
    assert done.stdout.strip().endswith("['MainThread']"), done.stdout + done.stderr


# ---- whole jobs


def test_late_ranks_are_named_with_block_and_stack_and_the_job_goes_on(tmp_path: Path) -> None:
    codes, output, _ = launch("naps", tmp_path, worker=WORKER, timeout=100)
    assert codes == [0, 0], output
    reports = output.split("hf_dist watchdog: no progress for ")[1:]
    # Once where the late rank naps; not where both nap equally long; in the order of training.
    assert len(reports) == 3, output
    for report, place in zip(reports, ("forward, model.layers.1", "data loader > collate", "saving"), strict=True):
        assert re.search(rf"rank 1 \(pid \d+ on \S+\) is late, in: .*{place}", report), report
        assert "in nap" in report
        assert re.search(r"^  rank 0: waits for .+ in: ", report, re.MULTILINE), report
    assert output.count("the job goes on") >= 2  # the job may be over before it is said again
    assert "Traceback" not in output


@FULL_GRID_ONLY
def test_a_late_rank_of_a_split_is_named_and_what_the_other_one_waits_for(tmp_path: Path) -> None:
    codes, output, _ = launch("split", tmp_path, worker=WORKER, timeout=100)
    assert codes == [0, 0], output
    (report,) = output.split("hf_dist watchdog: no progress for ")[1:]
    assert re.search(r"rank 1 \(pid \d+ on \S+\) is late, in: .*forward, model\.layers\.1", report), report
    waits = (
        r"^  rank 0: waits for what the ranks of a split give each other in: training step > forward, model\.layers\.1"
    )
    assert re.search(waits, report, re.MULTILINE), report


@pytest.mark.parametrize("number", [0, 1] if FULL_GRID else [0])  # the one that all others report to
def test_a_stopped_rank_is_reported_and_the_job_ends_with_the_timeout(number: int, tmp_path: Path) -> None:
    codes, output, _ = launch(f"stops_rank_{number}", tmp_path, worker=WORKER, timeout=100)
    assert codes[1 - number] == 1, output
    assert codes[number] == -9, "only SIGKILL ends a stopped process, as the launcher sends it\n" + output
    assert re.search(rf"rank {number} \(pid \d+ on \S+\) does not answer: it is stopped \(SIGSTOP", output), output
    assert f"rank {1 - number}: waits for the gather of weights in: training step" in output
    assert "the job goes on" not in output
    assert "waited for another rank until the timeout of a process group was over (ddp_timeout); rank" in output
    assert "Traceback" not in output


def test_whole_logits_that_one_rank_reads_alone_are_named(tmp_path: Path) -> None:
    """Where sequences are split, the parts of the others come when somebody reads them
    (`hf_dist/parallel/sequence/outputs.py`)."""
    codes, output, _ = launch("one_rank_reads", tmp_path, worker=WORKER, timeout=100)
    assert 0 not in codes, output
    assert "took different paths" in output, output
    assert "rank 1: waits for the other ranks that share its rows to read logits, too, in: training step" in output, (
        output
    )


@pytest.mark.parametrize("case", [*(["killed"] if FULL_GRID else []), "killed_after_a_failed_look"])
def test_a_killed_rank_is_named_by_those_that_lost_it(case: str, tmp_path: Path) -> None:
    codes, output, _ = launch(case, tmp_path, worker=WORKER)
    assert codes[1] == -9, output
    assert codes[0] not in (0, None), output
    assert re.search(r"\[rank 0\] lost the connection .* rank 1 \(pid \d+ on \S+\) ended: .* it was killed", output), (
        output
    )


@pytest.mark.parametrize(
    ("case", "dead"),
    [("killed_listener_on_gpus", 2), pytest.param("killed_first_on_gpus", 0, marks=FULL_GRID_ONLY)],
)
def test_ranks_that_wait_on_their_gpus_for_a_killed_one_leave(case: str, dead: int, tmp_path: Path) -> None:
    codes, output, seconds = launch(case, tmp_path, world=3, worker=WORKER, timeout=100, sends_sigterm=False)
    assert codes == [-9 if rank == dead else 1 for rank in range(3)], output
    for rank in {0, 1, 2} - {dead}:
        # Rank 1 has no connection to the dead one: it is told by who listens.
        assert re.search(
            rf"^\[rank {rank}\] waits for a rank that has ended, and leaves; rank {dead} \(pid .* it was killed",
            output,
            re.MULTILINE,
        ), output
    assert "Traceback" not in output
    assert seconds < 60


@pytest.mark.parametrize("where", ["forward", "backward", "collate", "save"] if FULL_GRID else ["backward", "save"])
def test_a_rank_that_raises_ends_the_job_and_its_traceback_comes_last(where: str, tmp_path: Path) -> None:
    codes, output, seconds = launch(where, tmp_path, worker=WORKER)
    assert None not in codes, output
    assert 0 not in codes, output
    last = "[rank 1] RuntimeError: this rank has had enough"
    if where != "save":
        for log in ("rank_0.log", "rank_1.log"):  # also where no launcher has a summary: whoever ends last repeats it
            assert (tmp_path / log).read_text().rstrip().endswith(last), output
    else:  # all ranks agree that there is no checkpoint, and one says so
        assert output.count(last) == 1
        assert output.count("hf_dist: CheckpointError") == 1
        assert "could not be written (rank 1: RuntimeError: this rank has had enough)" in output
    assert "[rank 0] Traceback" not in output, output
    assert seconds < 40


def test_a_status_costs_next_to_nothing() -> None:
    find_location({})
    start = time.perf_counter()
    for _ in range(100):
        find_location({})
    assert (time.perf_counter() - start) / 100 < 0.01, "once in five seconds: a fifth of a percent at the very most"


def test_starting_twice_changes_the_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        """A running one."""

        limit = 60.0

    monkeypatch.setattr(thread, "_watchdog", Fake())
    thread.start(5)
    assert thread._watchdog is not None
    assert thread._watchdog.limit == 5
