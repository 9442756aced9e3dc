"""Toy models with blocks that become units, each with one awkward habit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 24


def batch(step: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), the same on every rank."""
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, DIM, generator=g), torch.randn(rows, DIM, generator=g)


class Block(nn.Module):
    """A residual layer with two matrices, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pre-norm MLP."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """First layer, three blocks, head."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(DIM, DIM)

    def run_block(self, block: nn.Module, x: Any) -> Any:
        """How a block is called; what the variants below change."""
        return block(x)

    def forward(self, x: torch.Tensor) -> Any:
        """First layer, blocks, head."""
        x = self.first(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x)


class ScaledBlock(Block):
    """Uses its 0-dimensional parameter inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled, plus the sum of nothing."""
        return super().forward(x) * self.scale + self.none.sum()


class Nothing(nn.Module):
    """A block, by its structure, all of whose parameters are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterDict({"none": nn.Parameter(torch.zeros(3, 0))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the sum of nothing."""
        return x + self.inner["none"].sum()


class ScaledNet(Net):
    """Zero-sized and 0-dimensional parameters in every unit, and units that hold nothing else."""

    block = ScaledBlock

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.ModuleList([Nothing(), Nothing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled, plus the sum of nothing."""
        for module in self.nothing:
            x = module(x)
        return super().forward(x) * self.scale + self.none.sum()


class UnusedNet(Net):
    """A parameter in a block, a parameter of the root and a whole unit that no data ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Linear(DIM, DIM)
        self.spare = nn.Linear(DIM, DIM)
        self.tower = nn.ModuleList([Block(), Block()])


class TowerNet(Net):
    """Rows whose first element is large also go through a tower; others skip it, as text rows skip a vision tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList([Block(), Block()])
        self.adapter = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The tower runs only when a row wants it."""
        wants = x[:, 0] > 5
        h = self.first(x)
        if bool(wants.any()):
            image = h[wants]
            for block in self.tower:
                image = self.run_block(block, image)
            h = h.index_put((wants.nonzero()[:, 0],), h[wants] + self.adapter(image))
        for block in self.blocks:
            h = self.run_block(block, h)
        return self.head(h)


class FrozenBaseBlock(nn.Module):
    """A frozen matrix with a low-rank path beside it, LoRA's shape, and a trainable layer only at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)
        self.before, self.after = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        for module in (self.base, self.before):
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The backward of `before`, frozen, runs after the last trainable gradient is there."""
        h = self.before(torch.tanh(x))
        return x + self.after(torch.tanh(self.base(h) + self.b(self.a(h))))


class FrozenBaseNet(Net):
    """Blocks with more frozen than trainable parameters."""

    block = FrozenBaseBlock


class TwiceNet(Net):
    """One block object called at every depth, twice in a row, and also listed twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Blocks 0, 0, 1, 0, 2."""
        x = self.first(x)
        for k in (0, 0, 1, 0, 2):
            x = self.blocks[k](x)
        return self.head(x)


class PassingBlock(Block):
    """Gives an input back untouched beside its own result, as HF blocks do with masks and position embeddings."""

    def forward(self, x: torch.Tensor, side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """(result, side)."""
        return super().forward(x * side), side


class PassingNet(Net):
    """Every block reads and returns the same differentiable tensor."""

    block = PassingBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`side` travels through all blocks."""
        h = self.first(x)
        side = torch.sigmoid(h)
        for block in self.blocks:
            h, side = block(h, side)
        return self.head(h * side)


class IgnoringBlock(Block):
    """Takes a second input and makes nothing of it, as a decoder without cross attention does with the encoder's."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """`memory` gets no gradient."""
        return super().forward(x)


class IgnoredNet(Net):
    """Its first layer reaches every block and no loss."""

    block = IgnoringBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`memory` needs a gradient as far as the blocks can see."""
        memory = self.first(x)
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x)


class UnhookedNet(Net):
    """Goes around the hooks of its blocks."""

    def run_block(self, block: nn.Module, x: Any) -> Any:
        """The method, not the module."""
        return block.forward(x)


class Outside(Net):
    """Activation checkpointing around blocks, from outside."""

    reentrant = False

    def run_block(self, block: nn.Module, x: Any) -> Any:
        """Recomputed in backward."""
        return checkpoint(block, x, use_reentrant=self.reentrant)


class OutsideReentrant(Outside):
    """The same with the old, reentrant kind."""

    reentrant = True


class FrozenOutside(FrozenBaseNet, Outside):
    """Mostly frozen blocks, checkpointed."""


class FrozenOutsideReentrant(FrozenBaseNet, OutsideReentrant):
    """Mostly frozen blocks, checkpointed with the reentrant kind."""


class TowerOutside(Outside, TowerNet):
    """A tower that some ranks skip, checkpointed."""


class TowerOutsideReentrant(OutsideReentrant, TowerNet):
    """A tower that some ranks skip, checkpointed with the reentrant kind."""


class WholeCheckpointed(nn.Module):
    """Checkpoints the whole inner model, so that the root's forward is recomputed too."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Net(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One checkpoint around everything."""
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


@dataclasses.dataclass
class Result:
    """A plain dataclass, not HF's mapping."""

    hidden: torch.Tensor
    note: str = ""


class Holder:
    """An object that is no container at all."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class WrappingBlock(Block):
    """Returns its result inside an object."""

    wrap: Callable[[torch.Tensor], Any] = Result

    def forward(self, x: Any) -> Any:
        """Takes what the block before it gave."""
        return type(self).wrap(super().forward(getattr(x, "hidden", x)))


class HolderBlock(WrappingBlock):
    """With an object that no library knows."""

    wrap = Holder


class DataclassNet(Net):
    """Blocks and model exchange dataclasses."""

    block = WrappingBlock
    wrap: Callable[[torch.Tensor], Any] = Result

    def forward(self, x: torch.Tensor) -> Any:
        """The head's result inside an object."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return type(self).wrap(self.head(getattr(x, "hidden", x)))


class HolderNet(DataclassNet):
    """Blocks and model exchange objects of their own class."""

    block = HolderBlock
    wrap = Holder


class InPlaceBlock(Block):
    """Writes into its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual is added in place."""
        x += self.down(torch.tanh(self.up(self.norm(x.clone()))))
        return x


class InPlaceNet(Net):
    """Blocks that write into their inputs."""

    block = InPlaceBlock


class MixedBlock(Block):
    """Loaded in three dtypes, with a frozen matrix and a frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(DIM, DIM)
        self.extra.to(torch.bfloat16)
        self.norm.to(torch.float16)
        self.norm.weight.requires_grad_(False)
        self.extra.bias.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Uses all of them."""
        return super().forward(x) + self.extra(x)


class MixedNet(Net):
    """Mixed dtypes and mixed `requires_grad` in each block."""

    block = MixedBlock


class EmbeddingNet(Net):
    """An embedding in front, fed with indices derived from the floats of the batch."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, DIM)
        self.embed_out = nn.Linear(DIM, 37, bias=False)
        if tied:
            self.embed_out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits over 37 words, folded back to the width of the targets."""
        ids = (x.abs() * 10).long() % 37
        return super().forward(self.embed(ids[:, 0]) + x) + self.embed_out(self.embed(ids[:, 1]))[:, :DIM]


class SiblingPaths(nn.Module):
    """Two containers with the same block object in both: shared between units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = Block()
        self.left, self.right = nn.ModuleList([Block(), shared]), nn.ModuleList([shared, Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Left, then right."""
        for block in [*self.left, *self.right]:
            x = block(x)
        return x
