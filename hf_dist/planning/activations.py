"""What a forward keeps for its backward: bytes and work by block, for every kind of checkpointing.

Parameters and buffers are not activations. Tensors over the vocabulary are counted separately, because the loss makes more
of them. With checkpointing a block keeps its input, and backward recomputes one block at a time:

    kept        outside + sum of saved (kept blocks) + sum of inputs (checkpointed blocks)
    recomputed  the largest `saved` of a checkpointed block, without its input
    passing     two gradients of the size of the largest tensor that a block saves: of an output, and of its input
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_dist.config import DistConfig, settled
from hf_dist.memory.activation.checkpoint import asks_for_checkpointing
from hf_dist.memory.activation.host_copies import NUM_KEPT
from hf_dist.memory.loss.chunks import loss_nbytes
from hf_dist.memory.loss.tiles import TILE_BYTES, saves_memory
from hf_dist.planning.eights import NO_EIGHTS, Eights
from hf_dist.planning.sliced import Crossed, EarlySum

_PLAIN_LOSS_NBYTES = 12
"""Bytes per logit, in fp32: the log-softmax, its gradient, and the logits' gradient. The logits are freed by then."""
_LOG_SOFTMAX_NBYTES = 4
_NORM_TENSORS = 6
"""Tensors of one size in the backward of HF's RMSNorm: the saved one and five gradients."""


@dataclass(frozen=True)
class AttentionCall:
    """Sizes of one attention call: this rank's batch rows and positions, heads and their widths."""

    rows: int
    length: int
    heads: int
    key_heads: int
    widths: int
    """Widths of a key and a value together."""
    itemsize: int
    flops: int


@dataclass
class Work:
    """The computation and communication of one forward, or of a part of it."""

    flops: int = 0
    """Operations of matrix products and attention."""
    moved: int = 0
    """Bytes read and written by all other kernels, each by itself; parameters excluded."""
    fused: int = 0
    """The same where the kernels between two products run as one (`fused.py`)."""
    attention: list[AttentionCall] = field(default_factory=list)
    crossed: Crossed = field(default_factory=dict)
    """Collectives over `tp`."""
    again: Crossed = field(default_factory=dict)
    """The collectives that recomputation repeats: it stops where the last tensor was saved."""
    eights: Eights = NO_EIGHTS
    """The part of the operations that multiplies in float8, if the config asks for it."""
    experts: Eights = NO_EIGHTS
    """The same of stacked experts."""
    early: list[EarlySum] = field(default_factory=list)
    """Sums of backward that may begin before weight gradients are computed (`tensor_parallel.tp_overlap_comm`)."""


@dataclass
class Block:
    """What one call of a block keeps, in bytes."""

    path: str
    input: int = 0
    """Size of its hidden states."""
    saved: int = 0
    saved_input: int = 0
    """The part of `saved` that is the block's input."""
    largest: int = 0
    """Size of the largest storage in `saved`."""
    costly: int = 0
    """Outputs of matrix products and attention, which selective checkpointing keeps."""
    mlp: int = 0
    """The part of `saved` from an MLP, without its input: `mlp_tiles` recomputes it one tile at a time."""
    work: Work = field(default_factory=Work)
    """The computation and communication of its forward."""


@dataclass(frozen=True)
class Kept:
    """Bytes of one microbatch under one kind of checkpointing."""

    device: int
    """Kept from forward to backward."""
    recomputed: int = 0
    """Additional bytes while one block is in backward."""
    host: int = 0
    passing: int = 0
    """Gradients of activations while one block is in backward."""
    behind: int = 0
    """The part of `device` that the backward frees before it reaches the last block."""
    closing: int = 0
    """What is there in its place while the last norm is in backward."""
    deferred: int = 0
    """Gradients of products whose weights wait for theirs, in a backward of two parts; recomputed blocks have none."""


@dataclass(eq=False)
class Activations:
    """One forward of a model with one microbatch."""

    blocks: list[Block] = field(default_factory=list)
    before: int = 0
    """Saved before the first block."""
    outside: int = 0
    """Arguments of blocks other than hidden states, and what is saved between two blocks."""
    after: int = 0
    """Saved behind the last block, excluding tensors over the vocabulary."""
    largest_after: int = 0
    """Size of the largest storage in `after`: the fp32 copy in the last norm, in most models."""
    rows: int = 0
    """Rows of the logits: tokens of the microbatch; 0 for a model without a head over a vocabulary."""
    vocabulary: int = 0
    cuts_vocabulary: bool = False
    """Whether each rank of `tp` holds only some columns of the logits."""
    logit: int = 0
    """Bytes of one logit in the head's output dtype."""
    width: int = 0
    learns: bool = True
    """Whether the head is trainable."""
    rest: Work = field(default_factory=Work)
    """Work of the forward outside the blocks."""
    backward: Crossed = field(default_factory=dict)
    """Collectives over `tp` of the whole backward, without those of recomputed blocks."""

    @property
    def flops(self) -> int:
        """Operations of the whole forward."""
        return sum(block.work.flops for block in self.blocks) + self.rest.flops

    @property
    def share_in_float8(self) -> float:
        """Of these operations."""
        works = [self.rest, *(block.work for block in self.blocks)]
        return sum(work.eights.flops + work.experts.flops for work in works) / max(1, self.flops)

    def kept(self, config: DistConfig, checkpointing: bool = False, paths: frozenset[str] | None = None) -> Kept:
        """Bytes kept under `config`. `checkpointing`: set by the Trainer's argument. `paths`: blocks of a pipeline stage."""
        section = config.activation_checkpointing
        asked, every = asks_for_checkpointing(config)
        on = (asked or checkpointing) and self.blocks
        host, recomputed, num_inputs, largest, deferred = 0, 0, 0, 0, 0
        device = self.outside + sum(nbytes for nbytes, end in self._ends() if paths is None or end in paths)
        for i, block in enumerate(self.blocks):
            if paths is not None and block.path not in paths:
                continue
            largest = max(largest, block.largest)
            tiled = block.mlp if section.mlp_tiles > 1 else 0
            tile = -(-tiled // section.mlp_tiles)
            if not on or (every is not None and i % every):
                device += block.saved - tiled
                deferred += 0 if on else block.costly
                recomputed = max(recomputed, tile)
                continue
            costly = block.costly if section.selective else 0
            device += costly
            num_inputs += 1
            if section.cpu_checkpointing:
                host += block.input
            if not section.cpu_checkpointing or num_inputs <= NUM_KEPT:
                device += block.input
            recomputed = max(recomputed, block.saved - block.saved_input - costly - tiled + tile)
        is_last = paths is None or self._ends()[-1][1] in paths
        behind, closing = (self.after, _NORM_TENSORS * self.largest_after) if is_last else (0, 0)
        return Kept(device, max(recomputed, 0), host, 2 * largest, behind, closing, deferred)

    def _ends(self) -> tuple[tuple[int, str], tuple[int, str]]:
        """What is saved before and behind all blocks, each with the block of whose stage it is a part."""
        paths = [block.path for block in self.blocks] or [""]
        return (self.before, paths[0]), (self.after, paths[-1])

    def logits(self, config: DistConfig) -> int:
        """Bytes of the logits and of the loss's tensors over the vocabulary, at the start of backward."""
        wanted = settled(config.hf_dist.tiled_loss)
        if wanted is False:
            return self.rows * self.vocabulary * _PLAIN_LOSS_NBYTES
        if wanted and saves_memory(self.rows, self.vocabulary, self.width, self.logit, learns=self.learns):
            return TILE_BYTES + 4 * self.width * (self.rows + (self.vocabulary if self.learns else 0))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return loss_nbytes(self.rows * self.vocabulary, self.logit, device)

    def waiting_logits(self, config: DistConfig) -> int:
        """Bytes of them that a microbatch keeps whose backward has not begun."""
        wanted = settled(config.hf_dist.tiled_loss)
        if wanted and saves_memory(self.rows, self.vocabulary, self.width, self.logit, learns=self.learns):
            return 0
        return self.rows * self.vocabulary * (_LOG_SOFTMAX_NBYTES if wanted is False else self.logit)
