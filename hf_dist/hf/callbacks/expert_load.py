"""How evenly the tokens of a window were spread over experts and ranks."""

from __future__ import annotations

from hf_dist.experts.balance import loads, most_over_mean
from hf_dist.hf.callbacks.log_record import LogCallback


class ExpertLoadCallback(LogCallback):
    """Adds two numbers to every training log of an expert-parallel run, for the window since the last one.

    `expert_load`: rows of the busiest expert over the mean, in the worst layer. `expert_rank_load`: the same for the busiest
    rank, which the others wait for. 1 is even.
    """

    def values(self) -> dict[str, float | int]:
        """Collective over dp."""
        engine = self.engine
        counts = None if engine is None else loads(engine.model, engine.mesh)
        if engine is None or counts is None:
            return {}
        expert, rank = most_over_mean(counts, engine.mesh.axes.size("ep"))
        return {"expert_load": expert, "expert_rank_load": rank}
