"""Trainings that HF starts again by itself: with smaller batches after running out of memory, with other hyperparameters.

Both begin on every rank together, or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils.memory import should_reduce_batch_size

from hf_dist.dist.collective_guard import every_rank
from hf_dist.errors import OneRankError

__all__ = ["RepeatedTrainingsMixin", "counted"]


class RepeatedTrainingsMixin:
    """Overrides of the Trainer around whole trainings; part of `DistTrainerMixin`."""

    args: Any
    accelerator: Any
    dist: Any
    _train_batch_size: int

    def _inner_training_loop(self, *args: object, **kwargs: object) -> Any:
        """HF's, which `auto_find_batch_size` calls again with smaller batches. Raises `OneRankError` if only some ranks do."""
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if self.dist is not None and self.args.auto_find_batch_size and should_reduce_batch_size(error):
                self._shrink_together(error)
            raise

    def _shrink_together(self, error: RuntimeError) -> None:
        try:
            every_rank(self.accelerator.mesh, "a new start with smaller batches")
        except OneRankError:
            rank, size = self.accelerator.mesh.world.rank, self._train_batch_size
            # Not the error's own words, by which HF would try again.
            raise OneRankError(
                f"rank {rank} has no memory left for batches of {size}, and other ranks have: auto_find_batch_size starts "
                f"again with smaller batches only where every rank runs out in the same step. Set per_device_train_batch_size "
                f"below {size} (`hf-dist plan` says what fits), without auto_find_batch_size."
            ) from error

    def hyperparameter_search(self, *args: object, **kwargs: object) -> Any:
        """HF's. It hands a trial from process 0 to others if `world_size` says that there are any: here all processes count."""
        if self.dist is None:
            return super().hyperparameter_search(*args, **kwargs)  # type: ignore[misc]
        with counted(self.args, processes=True):
            return super().hyperparameter_search(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: object, **kwargs: object) -> Any:
        """HF's, also inside of a search."""
        with counted(self.args, processes=False):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def counted(args: Any, *, processes: bool) -> Iterator[None]:
    """Inside, `args.world_size` is the number of processes, or of those that read different rows."""
    before = getattr(args, "counts_processes", None)
    if before is None:  # HF's own arguments
        yield
        return
    args.counts_processes = processes
    try:
        yield
    finally:
        args.counts_processes = before
