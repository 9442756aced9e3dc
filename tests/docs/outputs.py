"""Makes the outputs that the pages show, by the commands that they show: `python -m tests.docs.outputs [WORD ...]`.

A block in a page whose language is `console` begins with `$ COMMAND`; `...` stands for lines, or the end of a line, that the
page leaves out. The whole output of each command is kept in `tests/docs/outputs/`, where `test_claims.py` looks up every line.
With words, only commands that have one of them are run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import processes

REPO = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).resolve().parent / "outputs"
PAGES = [REPO / "README.md", *sorted((REPO / "examples" / "guides").glob("*.md"))]
WIDTH = 140
TIMEOUT_S = 1800


def blocks() -> list[tuple[Path, str, list[str]]]:
    """(page, command, lines of its output) of every console block."""
    found = []
    for page in PAGES:
        for text in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            first, *lines = text.splitlines()
            assert first.startswith("$ "), (page, first)
            found.append((page, first[2:], lines))
    return found


def file_of(command: str) -> Path:
    """Where the output of a command is kept."""
    words = re.sub(r"\W+", "_", command)[:40].strip("_")
    return FOLDER / f"{words}_{hashlib.sha1(command.encode()).hexdigest()[:6]}.txt"


def output_of(command: str) -> str:
    """What the command prints, whose exit code may say "does not fit"; no bars, no colours, no folder of this machine."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TERM": "dumb"}
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": REPO, "env": environment}
    done = processes.run(shlex.split(command), timeout=TIMEOUT_S, **how)
    lines = [line.rstrip() for line in done.stdout.replace(f"{REPO}/", "").splitlines()]
    return "\n".join(line for line in lines if "it/s]" not in line and "?it/s" not in line and line != "") + "\n"


def main() -> None:
    """Run the commands and keep what they print."""
    FOLDER.mkdir(exist_ok=True)
    commands = dict.fromkeys(command for _, command, _ in blocks())
    for command in commands:
        if not sys.argv[1:] or any(word in command for word in sys.argv[1:]):
            print(f"$ {command}", flush=True)
            file_of(command).write_text(f"$ {command}\n{output_of(command)}", encoding="utf-8")
    for stale in set(FOLDER.glob("*.txt")) - {file_of(command) for command in commands}:
        stale.unlink()


if __name__ == "__main__":
    main()
