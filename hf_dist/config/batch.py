"""The batch equation: train = micro x accumulation x data ranks, exact, never rounded."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dist.errors import ConfigError, Problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
NO_MULTIPLE = "is not a multiple of"
"""What is wrong with a total that fits no number of ranks."""


@dataclass(frozen=True)
class BatchSizes:
    """Sizes that satisfy the equation. `train` and `micro` are both None if only the data loader knows them."""

    train: int | None
    """Samples per optimizer step over all data ranks."""
    micro: int | None
    """Samples per data rank and forward."""
    accumulation: int
    """Forward and backward passes per optimizer step."""
    data_ranks: int
    """Ranks that read different data."""


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, data_ranks: int) -> BatchSizes:
    """Fill in the sizes that are None. Raises ConfigError with all four numbers if no whole numbers fit."""
    if data_ranks < 1:
        raise ConfigError(Problem("data_ranks", str(data_ranks), "is not at least 1", ""))
    _check_positive(train, micro, accumulation)
    if train is None:
        steps = accumulation or 1
        return BatchSizes(None if micro is None else micro * steps * data_ranks, micro, steps, data_ranks)
    if micro is None:
        steps = accumulation or 1
        if train % (steps * data_ranks):
            raise _misfit(train, None, accumulation, data_ranks)
        return BatchSizes(train, train // (steps * data_ranks), steps, data_ranks)
    steps = accumulation or train // (micro * data_ranks)
    if micro * steps * data_ranks != train:
        raise _misfit(train, micro, accumulation, data_ranks)
    return BatchSizes(train, micro, steps, data_ranks)


def _check_positive(train: int | None, micro: int | None, accumulation: int | None) -> None:
    given = {TRAIN: train, MICRO: micro, STEPS: accumulation}
    problems = [
        Problem(path, str(size), "is not a whole number of at least 1", "")
        for path, size in given.items()
        if size is not None and size < 1
    ]
    if problems:
        raise ConfigError(problems)


def _misfit(train: int, micro: int | None, accumulation: int | None, data_ranks: int) -> ConfigError:
    """The error for sizes without a whole solution; it names single changes that would fix it."""
    factors = f"{MICRO} ({micro or 'not set'}) x {STEPS} ({accumulation or 'not set'}) x data ranks ({data_ranks})"
    known = (micro or 1) * (accumulation or 1) * data_ranks
    if micro is not None and accumulation is not None:
        expected = f"is not {factors} = {known}"
    else:
        expected = f"cannot be {factors}: it is not a multiple of {known}"
    return ConfigError(Problem(TRAIN, str(train), expected, _remedy(train, micro, accumulation, data_ranks)))


def _remedy(train: int, micro: int | None, accumulation: int | None, data_ranks: int) -> str:
    known = (micro or 1) * (accumulation or 1) * data_ranks
    nearest = max(known, round(train / known) * known) if micro is None or accumulation is None else known
    changes = [f"{TRAIN} to {nearest}"]
    if accumulation is not None and train % (accumulation * data_ranks) == 0:
        changes.append(f"{MICRO} to {train // (accumulation * data_ranks)}")
    if micro is not None and train % (micro * data_ranks) == 0:
        changes.append(f"{STEPS} to {train // (micro * data_ranks)}")
    ranks = (micro or 1) * (accumulation or 1)
    run = f", or run on {train // ranks} data ranks" if train % ranks == 0 else ""
    return f"Set {', or '.join(changes)}{run}."
