"""What a user sees when something is wrong: one message that names the setting and the fix, an exit code, no hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_dist import DistTrainingArguments
from hf_dist.dist import excepthook
from hf_dist.dist.patience import Patience
from hf_dist.errors import ConfigError
from tests import forked, processes
from tests.covering import FULL_GRID, FULL_GRID_ONLY, some_of
from tests.workers.failing import ROOT
from tests.workers.launcher import launch

LIMIT = 150  # seconds: a hang lasts until a timeout of minutes; a busy machine may need a while to start

ON_BOTH_RANKS = {
    "typo": ("zero_optimisation", "Did you mean", "zero_optimization"),
    "mismatch": ("gradient_clipping", "--max_grad_norm 2.0", "--per_device_train_batch_size 3"),
    "configs_differ": ("zero_optimization.stage: 3 on rank 0, 2 on rank 1", "same configuration file"),
    "parameters_differ": ("rank 0 has 20 parameters, rank 1 has 22", "extra.weight", "same configuration"),
    "frozen_on_one_rank": ("model.norm.weight", "requires_grad=False", "freeze the same parameters"),
    "device_map": ("device_map", "0", "1", "load it without device_map"),
    "damaged_checkpoint": ("checkpoint-2 is not complete", "model.safetensors has 0 bytes", "newest complete one"),
    "more_stages_than_blocks": ("pipeline.stages", "4 stages", "2 blocks", "use at most 2"),
    "stages_do_not_divide": ("pipeline.stages", "3", "does not divide the 2 processes", "a divisor of 2"),
    "no_blocks": ("Flat cannot be split", "none of its modules repeats"),
    "raw_loop_alone": ("WORLD_SIZE: 2", "accelerate sees 1", "ACCELERATE_USE_CPU=true"),
}
"""Case of the worker -> what the one message holds: the setting, and what to do."""
# By default what each of the places that find such an error says: config, command line, agreement, model, launch.
SAID_ONCE = some_of(ON_BOTH_RANKS, "typo", "mismatch", "configs_differ", "frozen_on_one_rank", "raw_loop_alone")


def check_message(output: str, parts: tuple[str, ...], codes: list[int | None], rank: str = "") -> None:
    """Exactly one message of ours, from one rank, with all `parts`; no traceback beside it; every rank failed."""
    assert None not in codes, "hangs\n" + output
    assert 0 not in codes, output
    assert len(re.findall(r"hf_dist: \w+Error", output)) == 1, output
    message = output[output.index("hf_dist: ") :]
    for part in parts:
        assert part in message, message
    assert "Traceback" not in output
    assert (" on rank 1: " in message.splitlines()[0]) is bool(rank)


@pytest.mark.parametrize("case", SAID_ONCE)
def test_an_error_of_all_ranks_is_said_once(case: str, tmp_path: Path) -> None:
    codes, output, _ = launch(case, tmp_path)
    check_message(output, ON_BOTH_RANKS[case], codes)


def test_an_error_of_one_rank_alone_is_said_by_it(tmp_path: Path) -> None:
    codes, output, _ = launch("typo_on_one_rank", tmp_path)
    check_message(output, ("stages", "Did you mean", "stage"), codes, rank="1")


def test_nothing_is_said_when_nothing_is_wrong(tmp_path: Path) -> None:
    codes, output, _ = launch("nothing_wrong", tmp_path)
    assert codes == [0, 0], output
    assert "hf_dist: " not in output
    assert "Traceback" not in output


def test_process_groups_are_closed_at_exit(tmp_path: Path) -> None:
    codes, output, _ = launch("leaves", tmp_path)
    assert codes == [0, 0], output


def test_arguments_made_after_a_stray_accelerator_still_see_all_ranks(tmp_path: Path) -> None:
    codes, output, _ = launch("one_process_seen", tmp_path)
    assert codes == [0, 0], output
    assert "layout     2 ranks" in output


# ---- in the middle of training, with the real launcher


def torchrun(case: str, folder: Path, is_real: bool = False) -> tuple[int, str]:
    """Exit code, everything that was printed. A job that hangs fails the test. `is_real`: in new interpreters."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += [f"{ROOT}/tests/workers/failing.py", case, str(folder)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if is_real:
        done = processes.run(
            command, cwd=ROOT, env=environment, timeout=LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    else:
        done = forked.run(command, cwd=ROOT, env=environment, timeout=LIMIT)
    return done.returncode, done.stdout


@FULL_GRID_ONLY
def test_torchrun_shows_a_config_error_once(tmp_path: Path) -> None:
    code, output = torchrun("typo", tmp_path)
    # It ends the launcher's summary, the last thing in the log, and stands nowhere else.
    assert output.count("hf_dist: ConfigError") == 1, output
    check_message(output[output.index("Root Cause") :], ON_BOTH_RANKS["typo"], [code])


def test_torchrun_shows_what_one_rank_raised_in_the_middle(tmp_path: Path) -> None:
    code, output = torchrun("raises", tmp_path, is_real=FULL_GRID)
    assert code != 0
    raised = re.findall(r"^\[rank (\d)\] RuntimeError: the data of step 2 is broken$", output, re.MULTILINE)
    assert raised == ["1"], output
    # The launcher's summary, the last thing in the log, ends with the traceback.
    summary = output[output.index("Root Cause") :]
    assert "traceback : of rank 1:\n  Traceback" in summary, output
    assert re.search(r"RuntimeError: the data of step 2 is broken\n=+\s*$", summary), output
    assert "message format" not in output, "torchrun knows the file that a rank leaves"
    # The rank that only lost its peer has one line, not a second traceback.
    assert "[rank 0] Traceback" not in output, output


@FULL_GRID_ONLY  # `test_watchdog.py` has killed ranks under a launcher in small
@pytest.mark.parametrize(("case", "status"), [("killed", "SIGKILL"), ("exits", "exitcode  : 3")])
def test_torchrun_ends_when_a_rank_vanishes(case: str, status: str, tmp_path: Path) -> None:
    code, output = torchrun(case, tmp_path)
    assert code != 0
    assert status in output, output
    assert "[rank 0] Traceback" not in output, output


@FULL_GRID_ONLY  # `tests/parallel/pipeline/test_p2p.py` has the schedule with the failure in it
def test_a_failing_microbatch_is_shown_in_the_schedule(tmp_path: Path) -> None:
    code, output = torchrun("raises_in_schedule", tmp_path)
    assert code != 0
    assert output.count("[rank 1] RuntimeError: the data of this microbatch is broken") == 1, output
    assert "1f1b: rank 1 failed at 1F2 (stage 1, forward, microbatch 2)" in output, output
    assert ">>> 1F2 <<<" in output
    assert "[rank 0] Traceback" not in output, output


@FULL_GRID_ONLY
def test_torchrun_ends_when_a_stage_is_killed_in_the_middle_of_a_schedule(tmp_path: Path) -> None:
    code, output = torchrun("killed_in_schedule", tmp_path)
    assert code != 0
    assert "SIGKILL" in output, output
    assert "[rank 0] Traceback" not in output, output


def test_a_rank_that_leaves_early_without_an_error_stops_the_others(tmp_path: Path) -> None:
    codes, output, _ = launch("exits_cleanly", tmp_path)
    assert codes == [1, 0], output
    assert output.count("[rank 0] lost the connection to another rank, which ended first") == 1, output


# ---- mistakes in the configuration, as DistTrainingArguments report them


WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "typo": ({"zero_optimization": {"stagee": 3}}, ("zero_optimization.stagee", 'Did you mean "stage"')),
    "type": ({"gradient_clipping": "much"}, ("gradient_clipping", '"much"', "is not a number of at least 0")),
    "value": ({"zero_optimization": {"stage": 4}}, ("zero_optimization.stage", "4", "0, 1, 2")),
    "contradictory_batch": (
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        ("train_batch_size", "10", "gradient_accumulation_steps (3)", "Set train_batch_size to 6"),
    ),
    "impossible_batch": ({"train_batch_size": 7}, ("train_batch_size", "7", "Set train_batch_size to 6")),
    "two_precisions": (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        ("bf16.enabled", "fp16.enabled", "false"),
    ),
    "duplicate": (
        '{\n  "gradient_clipping": 1,\n  "gradient_clipping": 2\n}',
        ("ds.json:3", "gradient_clipping", "line 2"),
    ),
    "no_comma": ('{\n  "gradient_clipping": 0.5\n "steps_per_print": 1\n}', ("ds.json:3", "comma is probably missing")),
    "cut_off": ('{\n  "gradient_clipping": 0.5', ("ds.json:2", 'expected "," or "}"', "end of the text")),
    "missing_file": ("dz.json", ("dz.json", "does not exist", "Did you mean ds.json?")),
    "several": (
        {
            "gradient_clipping": 2.0,
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        },
        (
            "3 problems",
            "gradient_clipping",
            "train_micro_batch_size_per_gpu",
            "optimizer.params.lr",
            "--learning_rate 1.0",
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_in_the_configuration_names_the_key_and_the_fix(name: str, tmp_path: Path) -> None:
    config, parts = WRONG[name]
    (tmp_path / "ds.json").write_text(config if isinstance(config, str) and "{" in config else "{}")
    source = config
    if isinstance(config, str):
        source = str(tmp_path / (config if "{" not in config else "ds.json"))
    with pytest.raises(ConfigError) as caught:
        DistTrainingArguments(
            str(tmp_path),
            dist_config=source,
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            max_grad_norm=0.5,
            learning_rate=5e-3,
        )
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_the_same_mistakes_are_found_in_a_file_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 2.0, "zero_optimization": {"stage": 9}}, indent=1))
    with pytest.raises(ConfigError) as caught:
        DistTrainingArguments(str(tmp_path), dist_config=str(path), use_cpu=True)
    assert "ds.json:4: zero_optimization.stage: 9" in str(caught.value)


# ---- the hook


def test_one_process_keeps_its_excepthook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what detect_launch exports is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(excepthook, "_installed", False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = sys.excepthook
    DistTrainingArguments(str(tmp_path), dist_config={}, use_cpu=True)
    assert sys.excepthook is before
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    excepthook.install()
    assert sys.excepthook is before
    monkeypatch.setattr(sys, "excepthook", before)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))  # torchrun writes after its end
    excepthook.install()
    assert sys.excepthook is not before


def test_several_processes_get_it_once_whatever_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what detect_launch exports is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(excepthook, "_installed", False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name, value in {"SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    excepthook.install()
    hook = sys.excepthook
    assert hook is not sys.__excepthook__
    excepthook.install()
    assert sys.excepthook is hook


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_local_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-m", "tests.workers.outliving", str(tmp_path)], cwd=ROOT)
    files = [tmp_path / f"rank{rank}" for rank in range(2)]
    patience = Patience(LIMIT)
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None and not patience.is_over(), "the ranks did not start"
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    while any(Path(f"/proc/{file.read_text()}").exists() for file in files):
        assert not patience.is_over(), "ranks without a parent go on"
        time.sleep(0.1)


WORDS = (
    "Connection reset by peer",
    "reading s3://bucket/shard-7: Broken pipe",
    "Timed out waiting for the object store",
)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("kind", [ConnectionResetError, OSError, TimeoutError, RuntimeError])
def test_a_network_error_of_user_code_is_no_lost_peer(words: str, kind: type[Exception]) -> None:
    """Where an error was raised counts, and not its words; each of these can come out of a data set or a callback."""
    with pytest.raises(kind) as found:
        raise kind(words)
    assert not excepthook.lost_peer(found.value) and not excepthook.timed_out(found.value)


def test_an_error_of_a_store_or_a_group_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_dist.dist import collectives

    class Work:
        def wait(self) -> None:
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:3999")

    with pytest.raises(RuntimeError) as found:
        collectives.Handle([Work()]).wait()
    assert not excepthook.lost_peer(found.value)  # raised by Python code of this file; gloo has no such frame
    trace = found.value.__traceback__
    while trace.tb_next.tb_next is not None:  # type: ignore[union-attr]
        trace = trace.tb_next  # type: ignore[union-attr]
    trace.tb_next = None  # type: ignore[union-attr]
    assert excepthook.lost_peer(found.value)


def test_an_error_whose_text_cannot_be_made_is_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    class Odd(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert not excepthook.lost_peer(Odd()) and not excepthook.timed_out(Odd())
    assert "Odd" in excepthook.print_traceback(Odd())
    assert "Odd" in capfd.readouterr().err
