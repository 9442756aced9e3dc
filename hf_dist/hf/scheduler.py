"""A schedule of a loop of one's own, where several ranks read the same rows."""

from __future__ import annotations

from typing import Any

from accelerate.scheduler import AcceleratedScheduler

__all__ = ["DataRankScheduler"]


class DataRankScheduler(AcceleratedScheduler):
    """accelerate's goes on by one step per process, as many as the batches of an optimizer step; here those of data ranks."""

    num_data_ranks: int = 1

    @staticmethod
    def of(stock: AcceleratedScheduler, num_data_ranks: int) -> AcceleratedScheduler:
        """`stock`, counting data ranks; unchanged where it counts batches that are shared out."""
        if stock.split_batches or not stock.step_with_optimizer:
            return stock
        own = DataRankScheduler(stock.scheduler, stock.optimizers, split_batches=True)  # one step for each call
        own.num_data_ranks = num_data_ranks
        return own

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As accelerate's: nothing inside of a window or where the optimizer skipped."""
        for _ in range(self.num_data_ranks if self.gradient_state.sync_gradients else 1):
            # OneCycleLR refuses steps beyond its last one, where the last batches are not dropped.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                super().step(*args, **kwargs)
