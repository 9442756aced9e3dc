"""A forked command is what the interpreter would have been: arguments, variables, output, exit code, signals, children."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import forked

SCRIPT = """
import multiprocessing, os, signal, subprocess, sys

def twice(value):
    return 2 * value

if __name__ == "__main__":
    assert sys.argv[1:] == ["a", "b"] and os.environ["GIVEN"] == "yes" and "HOME" not in os.environ
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(twice, [2]) == [4]
    multiprocessing.get_context("fork").Lock()
    if "-m" not in sys.argv:
        child = subprocess.run([sys.executable, "-u", "child.py", "x"], stdout=subprocess.PIPE, text=True)
        assert (child.returncode, child.stdout) == (5, f"x {os.getpid()}\\n"), child
        other = subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], capture_output=True)
        assert other.stdout == b"False\\n"
    print("said")
    print("shown", file=sys.stderr)
    sys.exit(3)
"""


def test_a_forked_script_runs_as_a_started_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "child.py").write_text("import os, sys\nprint(sys.argv[1], os.getppid())\nsys.exit(5)\n")
    for words in (["program.py"], ["-m", "program"]):
        command = [sys.executable, *words, "a", "b"]
        env = {"GIVEN": "yes", "PATH": os.environ["PATH"]}
        done = forked.run(command, cwd=tmp_path, env=env, apart=True)
        assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "shown\n")


def test_an_error_a_message_and_a_signal_are_its_exit_code(tmp_path: Path) -> None:
    for body, code, said in (
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("import sys; sys.exit('no')", 1, "no"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
    ):
        (tmp_path / "program.py").write_text(body)
        done = forked.run([sys.executable, "program.py"], cwd=tmp_path)
        assert done.returncode == code and said in done.stdout
