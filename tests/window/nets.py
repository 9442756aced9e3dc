"""Small models and batches, and what a script may call: the same script runs on plain torch and on a prepared model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hf_dist


class Blocks(nn.Module):
    """A stack of blocks: several units at stage 3, with matrices that lie over the shards of two ranks."""

    def __init__(self, seed: int = 0, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 20, bias=False), nn.Tanh(), nn.Linear(20, 8)) for _ in range(blocks)]
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, to_head: bool = True) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if to_head else x


class Bank(nn.Module):
    """Held by reference in several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Layer(nn.Module):
    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.shared = [bank]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.shared[0](x))


class Shares(nn.Module):
    """Units that are called inside of other units' forwards."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bank = nn.ModuleList([Bank(), Bank()])
        self.layers = nn.ModuleList([Layer(self.bank[i % 2]) for i in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(i: int, rows: int = 4) -> torch.Tensor:
    """Rows of random numbers, the same for the same `i`."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(i))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Large enough that clipping to 1 does something."""
    return (10 * model(x).float()).square().mean()


def config(stage: int = 1, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A configuration without an optimizer."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def weights(model: nn.Module) -> torch.Tensor:
    """All weights in one fp32 vector; of a prepared model every rank calls it."""
    params = list(model.parameters())
    if not any(hasattr(p, "_hf_dist_owner") for p in params):
        return torch.cat([p.detach().float().flatten() for p in params])
    with hf_dist.gathered(model):
        return torch.cat([p.detach().float().flatten().clone() for p in params])


@dataclass
class Kit:
    """What a script of raw torch calls works with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rows: Callable[[int], torch.Tensor] = batch
    """This rank's rows of batch i."""
    seen: list[float] | None = None
    """What the script wants compared besides the weights."""

    def loss(self, i: int) -> torch.Tensor:
        """Of batch i."""
        return loss_of(self.model, self.rows(i))

    def note(self, value: Any) -> None:
        """Have `value` compared."""
        assert self.seen is not None
        self.seen.append(float(value))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain, so that a gradient that is off shows in the weights."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


Script = Callable[[Kit], None]


def on_torch(script: Script, make: Callable[[], nn.Module] = Blocks) -> tuple[torch.Tensor, list[float]]:
    """Weights and notes of the script on plain torch in one process."""
    model = make()
    kit = Kit(model, sgd(model), seen=[])
    script(kit)
    return weights(model), list(kit.seen or ())


def on_hf_dist(
    script: Script,
    settings: dict[str, Any],
    make: Callable[[], nn.Module] = Blocks,
    rows: Callable[[int], torch.Tensor] = batch,
) -> tuple[torch.Tensor, list[float]]:
    """The same with the model prepared; the script goes on using the torch optimizer that it made."""
    model = make()
    kit = Kit(model, sgd(model), rows, seen=[])
    engine = hf_dist.initialize(model, config=settings, optimizer=kit.optimizer)
    script(kit)
    assert engine.model is model
    return weights(model), list(kit.seen or ())


def windows(first: int, count: int, size: int) -> Iterator[list[int]]:
    """Numbers of batches, window by window."""
    for start in range(first, first + count * size, size):
        yield list(range(start, start + size))
