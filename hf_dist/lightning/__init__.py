"""The engine under Lightning's Trainer. Nothing of Lightning is imported before a `DistStrategy` is made."""

from hf_dist.lightning.strategy import DistStrategy

__all__ = ["DistStrategy"]
