"""Sequences split over ranks: each rank computes on a part of every row, and the model's outputs are whole."""

from hf_dist.parallel.sequence.split import SplitSequence, as_split, split_sequence

__all__ = ["SplitSequence", "as_split", "split_sequence"]
