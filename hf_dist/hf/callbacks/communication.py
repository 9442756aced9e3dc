"""Calls and bytes of every collective of a run, as DeepSpeed's `comms_logger` shows them."""

from __future__ import annotations

import contextlib
from collections import defaultdict

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.dist import comm_counter
from hf_dist.log import say


class CommunicationCallback(TrainerCallback):
    """Prints a table of what rank 0 sent when training ends.

    Local: it counts the collectives of this process and sends nothing itself.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._log: comm_counter.CommLog | None = None
        self._totals: dict[tuple[str, str], list[int]] = {}
        self._steps = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start counting."""
        self._stack.close()
        self._log = self._stack.enter_context(comm_counter.record())
        self._totals, self._steps = defaultdict(lambda: [0, 0]), 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Sum up, so that the record does not grow with the run."""
        if self._log is not None:
            self._steps += 1
            self._add_up(self._log)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Print the table and stop counting."""
        if self._log is not None:
            self._add_up(self._log)
            say(communication_table(self._totals, self._steps))
            self._stack.close()
            self._log = None

    def _add_up(self, log: comm_counter.CommLog) -> None:
        for entry in log.entries:
            total = self._totals[entry.op, entry.axis]
            total[0] += 1
            total[1] += entry.nbytes
        log.entries.clear()


def communication_table(totals: dict[tuple[str, str], list[int]], steps: int) -> str:
    """One line per operation and axis: calls, bytes sent by this rank, and megabytes (10**6) per step."""
    lines = [f"communication of this rank in {steps} steps"]
    width = max((len(f"{op} over {axis}") for op, axis in totals), default=0)
    for (op, axis), (calls, nbytes) in sorted(totals.items()):
        each = nbytes / max(1, steps) / 1e6
        lines.append(f"  {f'{op} over {axis}':<{width}}  {calls:>9} calls  {nbytes:>15} bytes  {each:>10.3f} MB/step")
    return "\n".join(lines)
