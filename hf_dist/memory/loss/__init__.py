"""A language model's loss without fp32 copies of the logits, or without materialising the logits."""

from hf_dist.memory.loss.tiled_loss import TiledLoss, tiled_loss_for

__all__ = ["TiledLoss", "tiled_loss_for"]
