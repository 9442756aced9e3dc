"""Activation memory: recomputed blocks, and block inputs on the host."""

from hf_dist.memory.activation.checkpoint import describe_checkpointing, set_up_checkpointing

__all__ = ["describe_checkpointing", "set_up_checkpointing"]
