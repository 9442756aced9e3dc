"""The batch plan of the `elasticity` section: one global batch that many numbers of data ranks can divide.

Source: DeepSpeed elasticity/elasticity.py, version 0.1 of its plan; the same file gives the same global batch.
"""

from __future__ import annotations

import math

from hf_dist.config.batch import BatchSizes
from hf_dist.config.training_sections import ElasticityConfig
from hf_dist.errors import ConfigError, Problem

# Numbers with more divisors than any smaller number: times a micro batch, they give global batches with many divisors.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120),
    *(20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400),
    *(665280, 720720),
)


def elastic_sizes(section: ElasticityConfig, data_ranks: int) -> BatchSizes:
    """The sizes for `data_ranks`. The global batch is the same for every number that divides it.

    Raises `ConfigError` if no micro batch fits, naming numbers of ranks that would.
    """
    train, counts = elastic_batch(section)
    sizes = sorted(set(section.micro_batch_sizes), reverse=True)
    if data_ranks not in counts:
        fewer, more = [n for n in counts if n < data_ranks], [n for n in counts if n > data_ranks]
        near = [*fewer[-2:], *more[:2]]
        expected = (
            f"cannot share {train} samples among {data_ranks} data ranks, {section.min_gpus} to {section.max_gpus}"
        )
        fix = f"Start {' or '.join(map(str, near))} data ranks, or change the sizes or bounds."
        raise ConfigError(Problem("elasticity.micro_batch_sizes", str(list(section.micro_batch_sizes)), expected, fix))
    micro = next(size for size in sizes if train % (data_ranks * size) == 0)
    return BatchSizes(train, micro, train // (data_ranks * micro), data_ranks)


def elastic_batch(section: ElasticityConfig) -> tuple[int, list[int]]:
    """The global batch, and every number of data ranks within the bounds that divides it."""
    micros, largest = section.micro_batch_sizes, section.max_train_batch_size
    candidates = sorted({_largest_multiple(base, largest) for base in (*micros, math.lcm(*micros)) if base <= largest})
    best, counts = min(micros), list[int]()
    for batch in candidates if section.prefer_larger_batch else reversed(candidates):
        found = _counts(batch, section)
        if len(found) >= len(counts):  # the later one of two that fit equally many
            best, counts = batch, found
    return best, counts


def _largest_multiple(base: int, largest: int) -> int:
    return base * max(number for number in _HIGHLY_COMPOSITE if number * base <= largest)


def _counts(batch: int, section: ElasticityConfig) -> list[int]:
    """Sorted numbers of ranks that each divide the batch into a whole number of some micro batch."""
    found = {
        count
        for micro in section.micro_batch_sizes
        if batch % micro == 0
        for count in range(section.min_gpus, min(section.max_gpus, batch // micro) + 1)
        if batch // micro % count == 0
    }
    return sorted(found)
