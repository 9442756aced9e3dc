"""`accelerate launch` with a YAML that says DEEPSPEED, where deepspeed is not installed: continues as `hf-dist launch`.

accelerate has no place for other packages and stops before it starts the script. But it imports torch first, and torch
calls the entry points of the group `torch.backends`: https://github.com/pytorch/pytorch/issues/122468. An import of torch
costs 3 ms more. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` is torch's switch for it; then accelerate's own error stands alone.
"""

from __future__ import annotations

import os
import shlex
import sys
from types import TracebackType

__all__ = ["on_import_of_torch", "words_of_launch"]

_RUNNER = ["-m", "hf_dist.run"]
_SAYS = "DeepSpeed is not installed"
"""accelerate 1.15 commands/launch.py `deepspeed_launcher`."""


def on_import_of_torch() -> None:
    """In `accelerate launch`, wait for its error; in every other process do nothing. torch calls it once."""
    words = words_of_launch(sys.orig_argv)
    if words is None:
        return
    others = sys.excepthook

    def continue_or_say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, ImportError) and str(error).startswith(_SAYS):
            command = ["hf-dist", "launch", *words]
            if _RUNNER in (words[i : i + 2] for i in range(len(words))):
                print("hf_dist: the YAML says DEEPSPEED; continuing without it, as `hf-dist launch`.", file=sys.stderr)
                os.execv(sys.executable, [sys.executable, "-m", "hf_dist.cli", *command[1:]])
            print(f"hf_dist needs no deepspeed. Type: {shlex.join(command)}", file=sys.stderr)
        others(kind, error, trace)

    sys.excepthook = continue_or_say


def words_of_launch(command: list[str]) -> list[str] | None:
    """The arguments of `accelerate launch` in the command of a process; None if it is another command."""
    names = [os.path.basename(word).removesuffix(".exe") for word in command]
    for begin, name in enumerate(names[:5]):
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return command[begin + 1 :]
        if name in ("accelerate", "accelerate.commands.accelerate_cli"):
            return command[begin + 2 :] if names[begin + 1 : begin + 2] == ["launch"] else None
    return None
