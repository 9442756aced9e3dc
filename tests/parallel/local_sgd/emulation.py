"""Replicas that train alone, in one process with plain torch: R models in turn, and a torch SGD on what they moved."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.parity.families import make_batches, make_model, param_groups, summed_loss

LR, SGD_LR, EPS, CLIP = 3e-3, 0.1, 1e-3, 1.0


@dataclass(frozen=True)
class Work:
    """What is trained, whatever the layout."""

    replicas: int = 2
    every: int = 1
    outer_lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    inner: str = "adamw"
    steps: int = 6
    family: str = "llama"
    tied: bool = False
    lora: bool = False
    frozen: bool = False
    """The first block does not train."""
    later: tuple[int, int] | None = None
    """(after this step, so many replicas); a new one begins with the optimizer of one that there was."""
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0

    def __str__(self) -> str:
        outer = f"lr{self.outer_lr:g}-m{self.momentum:g}{'-nesterov' if self.nesterov else ''}"
        flags = [name for name in ("tied", "lora", "frozen") if getattr(self, name)]
        turns = [f"p{self.fragments}-tau{self.overlap}-alpha{self.mix:g}"] if self.streams else []
        return "-".join([self.family, *flags, self.inner, f"r{self.replicas}", f"h{self.every}", outer, *turns])

    @property
    def streams(self) -> bool:
        """Whether fragments meet in turn, or later."""
        return self.fragments > 1 or self.overlap > 0

    def starting(self, step: int) -> list[int]:
        """The fragments that are sent after step `step`; the last one at the multiples of `every`."""
        first = [(p + 1) * self.every // self.fragments for p in range(self.fragments)]
        return [p for p in range(self.fragments) if step % self.every == first[p] % self.every]

    @property
    def section(self) -> dict[str, Any]:
        """`local_sgd` of the JSON."""
        return {
            "every": self.every,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.momentum,
            "nesterov": self.nesterov,
            **({"fragments": self.fragments, "overlap": self.overlap, "mix": self.mix} if self.streams else {}),
        }


def model_for(work: Work) -> nn.Module:
    """The same weights on every call and every rank."""
    model = make_model(work.family, work.tied, work.lora)
    if work.frozen:
        for name, p in model.named_parameters():
            p.requires_grad_(".layers.0." not in name and p.requires_grad)
    return model


def inner_for(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of one replica."""
    groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in param_groups(model)]
    if work.inner == "sgd":
        return torch.optim.SGD(groups, lr=SGD_LR)
    return torch.optim.AdamW(groups, lr=LR, eps=EPS, foreach=True)


def rows_of(batch: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, torch.Tensor]:
    """The rows of one of `parts` ranks, or replicas."""
    return {key: value[len(value) * part // parts : len(value) * (part + 1) // parts] for key, value in batch.items()}


def count_items(batch: dict[str, Any]) -> int:
    """Labels of a causal model that count."""
    return int((batch["labels"][:, 1:] != -100).sum())


@functools.cache
def emulate(work: Work, parts: tuple[tuple[str, ...], ...] = ()) -> dict[str, Any]:
    """Losses and norms of every replica at every step; weights at the end, which is a meeting.

    `parts`: the parameters of each fragment, where they meet in turn.
    """
    models = [model_for(work) for _ in range(work.replicas)]
    inner = [inner_for(work, model) for model in models]
    anchor = {n: p.detach().clone().requires_grad_() for n, p in models[0].named_parameters() if p.requires_grad}
    outer = torch.optim.SGD(
        anchor.values(), lr=work.outer_lr, momentum=work.momentum, nesterov=work.nesterov and work.momentum > 0
    )
    losses, norms = [], []
    stream = Stream(work, parts, anchor, outer)
    for step, batch in enumerate(make_batches(work.family, work.steps), 1):
        if work.later is not None and step == work.later[0] + 1:
            if work.streams:
                stream.settle(models)
            models, inner = _dealt_out(work, models, inner, work.later[1])
        found = [
            _step(m, o, rows_of(batch, r, len(models))) for r, (m, o) in enumerate(zip(models, inner, strict=True))
        ]
        losses.append([loss for loss, _ in found])
        norms.append([norm for _, norm in found])
        if work.streams:
            stream.after_step(step, models)
            if step == work.steps:
                stream.settle(models)
        elif len(models) > 1 and (step % work.every == 0 or step == work.steps):
            _meet(models, anchor, outer)
    weights = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


class Stream:
    """Algorithm 2 of Streaming DiLoCo (arXiv 2501.18512), with plain torch."""

    def __init__(
        self,
        work: Work,
        parts: tuple[tuple[str, ...], ...],
        anchor: dict[str, torch.Tensor],
        outer: torch.optim.Optimizer,
    ) -> None:
        self.work, self.parts, self.anchor, self.outer = work, parts, anchor, outer
        self.on_the_way: list[tuple[int, dict[str, torch.Tensor]]] = []

    @torch.no_grad()
    def after_step(self, step: int, models: list[nn.Module]) -> None:
        """What is sent after this step, and then what is taken up after it."""
        for p in self.work.starting(step):
            sent = {n: _mean([self.anchor[n] - model.get_parameter(n) for model in models]) for n in self.parts[p]}
            self.on_the_way.append((step + self.work.overlap, sent))
        while self.on_the_way and self.on_the_way[0][0] <= step:
            self._take_up(self.on_the_way.pop(0)[1], models)

    def _take_up(self, means: dict[str, torch.Tensor], models: list[nn.Module]) -> None:
        for name, where in self.anchor.items():
            where.grad = means.get(name)
        self.outer.step()
        for model in models:
            for name in means:
                own = model.get_parameter(name)
                own.copy_(self.work.mix * own + (1 - self.work.mix) * self.anchor[name])

    @torch.no_grad()
    def settle(self, models: list[nn.Module]) -> None:
        """Before a checkpoint: what is on the way is taken up now, and all go on from the mean of the weights."""
        while self.on_the_way:
            self._take_up(self.on_the_way.pop(0)[1], models)
        for name in self.anchor:
            mean = _mean([model.get_parameter(name) for model in models])
            for model in models:
                model.get_parameter(name).copy_(mean)


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).mean(0)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: dict[str, torch.Tensor]) -> tuple[float, float]:
    total, items = summed_loss(model, copy.copy(rows))
    loss = total / items
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm


def _dealt_out(
    work: Work, models: list[nn.Module], inner: list[torch.optim.Optimizer], count: int
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """As many replicas with the weights and optimizers of those there are, in turn."""
    made = [model_for(work) for _ in range(count)]
    optimizers = [inner_for(work, model) for model in made]
    for r, (model, optimizer) in enumerate(zip(made, optimizers, strict=True)):
        model.load_state_dict(models[0].state_dict())
        optimizer.load_state_dict(copy.deepcopy(inner[r % len(inner)].state_dict()))
    return made, optimizers


@torch.no_grad()
def _meet(models: list[nn.Module], anchor: dict[str, torch.Tensor], outer: torch.optim.Optimizer) -> None:
    replicas = [dict(model.named_parameters()) for model in models]
    for name, where in anchor.items():
        where.grad = torch.stack([where - replica[name] for replica in replicas]).mean(0)
    outer.step()
    for replica in replicas:
        for name, where in anchor.items():
            replica[name].copy_(where)


@functools.cache
def together(work: Work) -> dict[str, Any]:
    """One process on the joined batches, as plain data parallelism computes: the mean of the replicas' gradients."""
    model = model_for(work)
    optimizer = inner_for(work, model)
    for batch in make_batches(work.family, work.steps):
        for replica in range(work.replicas):
            total, items = summed_loss(model, rows_of(batch, replica, work.replicas))
            (total / items / work.replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": {n: p.detach() for n, p in model.named_parameters()}}
