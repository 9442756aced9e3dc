"""Sequences split over ranks: each computes on a part of every row, and what leaves the model is whole."""

from hf_dist.sequence.split import SplitSequence, as_split, split_sequence

__all__ = ["SplitSequence", "as_split", "split_sequence"]
