"""Commands in interpreters of their own, with time-outs that a busy machine lengthens (`hf_dist/dist/patience.py`)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from hf_dist.dist.patience import Patience

_LOOK_SECONDS = 1.0


def run(command: Sequence[str], *, timeout: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command, text=True, **how)`, both streams captured unless `how` says where they go.

    Raises `subprocess.TimeoutExpired` with the output so far, after killing the process.
    """
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    with subprocess.Popen(command, text=True, **how) as process:
        patience = Patience(timeout)
        while True:
            try:
                said = process.communicate(timeout=_LOOK_SECONDS)
                return subprocess.CompletedProcess(process.args, process.returncode, *said)
            except subprocess.TimeoutExpired:
                if patience.is_over():
                    process.kill()
                    out, err = process.communicate()
                    raise subprocess.TimeoutExpired(process.args, timeout, out, err) from None
            except BaseException:
                process.kill()
                raise
