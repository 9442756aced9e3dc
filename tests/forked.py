"""Commands of Python run without starting an interpreter: forked from a server with torch and transformers loaded.

    done = forked.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "script.py"])

A real process needs about five seconds of its processor for its imports, a forked one a twentieth of a second. What is
started is the same code with the same arguments, variables, signals, parents and exit codes, and so is what it starts itself
with `sys.executable` (the ranks of torchrun and accelerate, those of `hf-dist bench`). What is not the same: modules are
loaded before the variables are set. So each kind of launcher has one test that starts it for real.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from hf_dist.dist.host_info import schedule_as_batch
from hf_dist.dist.patience import Patience
from tests.harness import PRELOAD

__all__ = ["Job", "run", "start"]

_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_FILES = 4096
"""Descriptors a child closes, as one does that runs another program."""


class Job:
    """A command under way; its output goes to files."""

    def __init__(self, process: BaseProcess, command: Sequence[str], out: Path, err: Path) -> None:
        self.process, self.command, self._out, self._err = process, list(command), out, err

    def end(self, timeout: float, until: Callable[[str], bool] | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for it. Raises `subprocess.TimeoutExpired` with its output after `timeout` seconds, and kills it.

        `until`: whether its output is whole, where a process that it has started writes after its end.
        """
        patience = Patience(timeout)
        while self.process.is_alive() and not patience.is_over():
            self.process.join(1.0)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        if until is not None:
            patience.until(lambda: until(self._out.read_text()))
        said = [path.read_text() for path in (self._out, self._err)]
        self._out.unlink()
        self._err.unlink()
        if code is None:
            raise subprocess.TimeoutExpired(self.command, timeout, *said)
        return subprocess.CompletedProcess(self.command, code, *said)


def start(
    command: Sequence[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, apart: bool = False
) -> Job:
    """Start `[sys.executable, "-m", MODULE, ...]` or a script. `apart`: `stderr` has the errors, else they are in `stdout`."""
    assert command[0] == sys.executable
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    out, err = (_empty_file() for _ in range(2))
    into = (str(out), str(err if apart else out))
    given = (list(command), str(cwd or Path.cwd()), dict(os.environ if env is None else env), into)
    process = context.Process(target=_first, args=given)
    process.start()
    return Job(process, command, out, err)


def run(
    command: Sequence[str], *, timeout: float = 300, until: Callable[[str], bool] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """`start` and wait. `until`: as in `Job.end`."""
    return start(command, **how).end(timeout, until)


def _empty_file() -> Path:
    handle, path = tempfile.mkstemp(prefix="hf_dist_said_")
    os.close(handle)
    return Path(path)


# ---- in the new process


def _first(command: list[str], cwd: str, env: dict[str, str], into: tuple[str, str]) -> NoReturn:
    """What a process of the fork server runs: the command, and forks instead of the interpreters that it starts."""
    descriptors = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY | os.O_APPEND) for path in into)]
    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    subprocess.Popen = handler.Popen = _ForkedPython  # type: ignore[misc,attr-defined]
    _become(command, cwd, env, descriptors)


class _ForkedPython(subprocess.Popen):  # type: ignore[type-arg]
    """Forks where the program is this interpreter with a module or script; anything else is started as ever."""

    def _execute_child(self, *given: Any) -> None:
        asked = _EXECUTE.bind(self, *given).arguments
        command = [os.fspath(word) for word in asked["args"]] if not isinstance(asked["args"], str) else []
        plain = [word for word in command[1:3] if word != "-u"]
        if not command or command[0] != sys.executable or (plain[0].startswith("-") and plain[0] != "-m"):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if asked["start_new_session"]:
                os.setsid()
            into = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
            env = asked["env"]
            _become(command, asked["cwd"] or os.getcwd(), dict(os.environ if env is None else env), into)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def _become(command: list[str], cwd: str, env: dict[str, str], into: list[int]) -> NoReturn:
    """Go on as `command` would after its imports; `into`: descriptors for input, output, errors (-1: those there are)."""
    code = 1
    schedule_as_batch()
    try:
        gc.freeze()  # nothing of the process this was is freed: its files are closed here
        copies = [os.dup(given if given >= 0 else own) for own, given in enumerate(into)]
        for own, copy in enumerate(copies):
            os.dup2(copy, own)
        os.closerange(3, _FILES)
        tracker = resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None  # its pipe is closed with the rest; whoever needs one starts its own
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The server's start method would be that of the job's loaders, each worker of which would import everything again.
        mp.set_start_method(None, force=True)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        code = _main(command[1:])
        threading._shutdown()  # type: ignore[attr-defined]
        importlib.import_module("atexit")._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _main(words: list[str]) -> int:
    """Run the module or script as the main program; its exit code."""
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    is_module = words[0] == "-m"
    program = words[1] if is_module else words[0]
    sys.argv = words[1:] if is_module else words
    first = os.getcwd() if is_module else str(Path(program).resolve().parent)
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *own, *(path for path in sys.path if path not in (first, *own))]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0
