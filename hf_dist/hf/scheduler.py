"""The schedule of a custom loop in which several ranks read the same rows."""

from __future__ import annotations

from accelerate.scheduler import AcceleratedScheduler

__all__ = ["DataRankScheduler"]


class DataRankScheduler(AcceleratedScheduler):
    """accelerate's steps once per process for each optimizer step; this one steps once per data rank."""

    num_data_ranks: int = 1

    @staticmethod
    def of(stock: AcceleratedScheduler, num_data_ranks: int) -> AcceleratedScheduler:
        """`stock`, counting data ranks. Unchanged if `stock` counts split batches or steps without the optimizer."""
        if stock.split_batches or not stock.step_with_optimizer:
            return stock
        own = DataRankScheduler(stock.scheduler, stock.optimizers, split_batches=True)  # one step per call
        own.num_data_ranks = num_data_ranks
        return own

    def step(self, *args: object, **kwargs: object) -> None:
        """As accelerate's: no step inside a window or when the optimizer skipped."""
        for _ in range(self.num_data_ranks if self.gradient_state.sync_gradients else 1):
            # OneCycleLR refuses steps beyond its last one, which incomplete last batches would cause.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                super().step(*args, **kwargs)
