"""The table of the `flops_profiler` section: the operations of one forward, module by module."""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.config.training_sections import FlopsProfilerConfig
from hf_dist.format_bytes import scaled
from hf_dist.log import is_speaking_rank, say
from hf_dist.sharding.param_slice import held_slice


class FlopsTableCallback(TrainerCallback):
    """Counts the first forward of one step on rank 0 and writes the table when the step ends."""

    def __init__(self, trainer: Any, section: FlopsProfilerConfig) -> None:
        self._trainer = weakref.ref(trainer)  # the trainer holds its callbacks
        self._section = section
        self._counted: _Forward | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Count the next forward."""
        trainer = self._trainer()
        if trainer is not None and state.global_step == self._section.profile_step and is_speaking_rank():
            self._counted = _Forward(trainer.model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Write the table."""
        counted, self._counted = self._counted, None
        if counted is None:
            return
        counted.remove()
        text = counted.table(self._section)
        if self._section.output_file is None:
            say(text)
        else:
            path = Path(self._section.output_file).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")


class _Forward:
    """Counts one call of a model, by hooks that `remove` takes off."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.flops: dict[str, int] = {}
        self.seconds = 0.0
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: self._begin()),
            model.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        # Not in the hook: torch names modules from the outermost call whose start it sees.
        self._counter: FlopCounterMode | None = FlopCounterMode(display=False)
        self._counter.__enter__()

    def remove(self) -> None:
        """Remove the hooks."""
        self._end()
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        if self._counter is not None:
            self.seconds = -_now()

    def _end(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            self.seconds += _now()
            counter.__exit__(None, None, None)
            counts = counter.get_flop_counts()
            self.flops = {str(name): sum(by_kernel.values()) for name, by_kernel in counts.items()}

    def table(self, section: FlopsProfilerConfig) -> str:
        """Modules in order, with parameters, operations and their share of the total."""
        root = type(self.model).__name__
        total = self.flops.get(root, 0)
        if not total:
            return "flops_profiler: the model was not called as a whole in that step (a pipeline calls its parts)"
        rows = []
        for name, module in self.model.named_modules():
            depth = name.count(".") + 1 if name else 0
            flops = self.flops.get(f"{root}.{name}" if name else root, 0)
            if flops and (section.module_depth < 0 or depth <= section.module_depth):
                rows.append((depth, name or root, type(module).__name__, _numel(module), flops))
        if not section.detailed:
            rows = _largest_of_each_level(rows, section.top_modules)
        width = max(len("  " * depth + name) for depth, name, *_ in rows)
        head = (
            f"flops_profiler: one forward of {root}, {scaled(total)} floating point operations in {self.seconds:.3f} s"
        )
        lines = []
        for depth, name, kind, numel, flops in rows:
            numbers = f"{scaled(numel):>7} parameters  {scaled(flops):>7}  {flops / total:>4.0%}"
            lines.append(f"  {'  ' * depth + name:<{width}}  {numbers}  {kind}")
        return "\n".join([head, *lines])


def _largest_of_each_level(
    rows: list[tuple[int, str, str, int, int]], count: int
) -> list[tuple[int, str, str, int, int]]:
    levels: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for depth, name, _, _, flops in rows:
        levels[depth][name] = flops
    kept = {name for level in levels.values() for name, _ in level.most_common(count)}
    return [row for row in rows if row[1] in kept]


def _numel(module: nn.Module) -> int:
    return sum(held_slice(p).whole_numel for p in module.parameters())


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
