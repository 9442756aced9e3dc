"""A record of the Trainer's log on a terminal: HF's numbers in one line, those of hf_dist in a second one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.format_bytes import scaled

__all__ = ["show_records", "terminal_lines"]

_HIDDEN = {"total_flos"}
_COMPUTE = ("time_forward_backward_percent", "time_optimizer_percent")
# (keys, text of their values), what matters most first: the end is left out where the terminal is narrow.
_MEASURED: tuple[tuple[tuple[str, ...], Callable[..., str]], ...] = (
    (("tokens_per_second_per_rank",), lambda n: f"{scaled(n)}tokens/s/rank"),
    (("samples_per_second",), lambda n: f"{scaled(n)}samples/s"),
    (("model_tflops_per_rank",), lambda n: f"{scaled(n * 1e12)}FLOP/s/rank"),
    (("memory_peak_gb", "memory_peak_rank"), lambda size, rank: f"{scaled(size * 1e9)}B"),
    (_COMPUTE, lambda *shares: f"compute {sum(shares):.0f}%"),
    (("time_communication_wait_percent",), lambda share: f"wait {share:.0f}%"),
    (("time_data_percent",), lambda share: f"data {share:.0f}%"),
    (("time_other_percent",), lambda share: f"other {share:.0f}%"),
)


def terminal_lines(logs: Mapping[str, object], columns: int) -> list[str]:
    """The lines of a record. Values of HF and of the program are all there; of hf_dist's, as many as fit in one line."""
    ours = {key for keys, _ in _MEASURED for key in keys}
    theirs = [f"{name} {_number(value)}" for name, value in logs.items() if name not in ours | _HIDDEN]
    lines = _filled(theirs, columns)
    measured = [text(*(logs[key] for key in keys)) for keys, text in _MEASURED if all(key in logs for key in keys)]
    if "tokens_per_second_per_rank" in logs and "samples_per_second" in logs:
        del measured[1]  # the same speed twice
    return lines + [f"  {line}" for line in _filled(measured, columns - 2)[:1]]


def _number(value: object) -> str:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _filled(parts: list[str], columns: int) -> list[str]:
    """`parts` with two spaces between them, in lines of at most `columns`."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= columns:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _text(logs: Mapping[str, object]) -> str:
    return "\n".join(terminal_lines(logs, shutil.get_terminal_size().columns))


class _Progress(ProgressCallback):
    """HF's progress bar."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Above the bar."""
        if not sys.stdout.isatty():
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(_text(logs))


class _Printer(PrinterCallback):
    """HF's records without a bar."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Once per machine, as HF's."""
        if not sys.stdout.isatty():
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_local_process_zero and logs:
            print(_text(logs))


def show_records(callbacks: list[Any]) -> None:
    """Put ours in the places of HF's printing callbacks; those of a notebook and of a program stay.

    A log file gets HF's lines, because programs read them.
    """
    instead = {ProgressCallback: _Progress, PrinterCallback: _Printer}
    callbacks[:] = [instead[type(one)]() if type(one) in instead else one for one in callbacks]
