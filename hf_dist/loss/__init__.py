"""The loss of a language model without fp32 copies of the logits, or without the logits."""

from hf_dist.loss.tiled_loss import TiledLoss, tiled_loss_for

__all__ = ["TiledLoss", "tiled_loss_for"]
