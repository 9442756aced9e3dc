"""How evenly the tokens of a window were spread over experts and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_dist.dist import collectives
from hf_dist.hf.callbacks.log_record import LogCallback
from hf_dist.parallel.experts.balance import loads, most_over_mean
from hf_dist.parallel.experts.load_file import ExpertLoad, write_load
from hf_dist.parallel.experts.spread import exchanges


class ExpertLoadCallback(LogCallback):
    """Adds two numbers to every training log of an expert-parallel run, for the window since the last one.

    `expert_load`: rows of the busiest expert over the mean, in the worst layer. `expert_rank_load`: the same for the busiest
    rank, which the others wait for. 1 is even. At each checkpoint and at the end the main rank writes the rows of all experts
    from the start to the last log into `expert_load.json` of the output folder, for `hf-dist balance`. Rows of evaluation do
    not count.
    """

    def __init__(self, trainer: object) -> None:
        super().__init__(trainer)
        self._counts: torch.Tensor | None = None  # since the start, on the host
        self._first_step, self._last_step = 1, 0  # that are counted

    def values(self) -> dict[str, float | int]:
        """Collective over dp."""
        engine = self.engine
        counts = None if engine is None else loads(engine.model, engine.mesh)
        if engine is None or counts is None:
            return {}
        own = counts.cpu().long()
        self._counts = own if self._counts is None else self._counts + own
        self._last_step = self._trainer().state.global_step  # type: ignore[union-attr]
        expert, rank = most_over_mean(counts, engine.mesh.axes.size("ep"))
        return {"expert_load": expert, "expert_rank_load": rank}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """A training counts from its own first step, also one that goes on from a checkpoint."""
        super().on_train_begin(args, state, control, **kwargs)
        self._counts, self._first_step = None, state.global_step + 1

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Collective over pp, whose ranks have the layers."""
        self._write(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """As at a checkpoint."""
        self._write(args, state)

    def _write(self, args: Any, state: Any) -> None:
        if self.engine is None:
            return
        rows = [] if self._counts is None else self._counts.tolist()
        stages = collectives.all_gather_object(
            self.engine.mesh.pp, dict(zip(exchanges(self.engine.model), rows, strict=False))
        )
        layers = {path: own for stage in stages for path, own in stage.items()}
        if layers and state.is_world_process_zero:
            ranks = self.engine.mesh.axes.size("ep")
            write_load(Path(args.output_dir), ExpertLoad(ranks, self._first_step, self._last_step, layers))
