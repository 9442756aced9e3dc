"""Memory of activations: recomputed blocks, their inputs on the host, and a loss without the full logits."""

from hf_dist.activation.checkpoint import describe_checkpointing, set_up_checkpointing
from hf_dist.activation.tiled_loss import TiledLoss, tiled_loss_for

__all__ = ["TiledLoss", "describe_checkpointing", "set_up_checkpointing", "tiled_loss_for"]
