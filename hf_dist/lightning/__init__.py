"""The engine under Lightning's Trainer. Lightning is imported only when a `DistStrategy` is created."""

from hf_dist.lightning.strategy import DistStrategy

__all__ = ["DistStrategy"]
