"""Training with encoded messages in one process: the same function of the same numbers, written without the engine.

A rank's forward reads what arrives of the master weights; its gradient is what arrives of every rank's gradient. What a codec
does is `Codec.rounded` of a parameter; where blocks begin, who adds what and when is written here a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist.tensors.codecs import Codec, codec_of

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A layout, and what travels in which codec."""

    family: str = "llama"
    stage: int = 3
    world: int = 2
    accumulation: int = 1
    weights: str | None = None
    frozen: str | None = None
    gradients: str | None = None
    copies: str | None = None
    feedback: bool = False
    machine: int = 1
    """Ranks of the first hop; 1: one hop."""
    shards: int = 0
    """Ranks of a shard, if there are several copies."""
    over: bool = False
    block: int = 64
    bf16: bool = False
    lora: bool = False
    tied: bool = False
    checkpointing: bool = False
    offload: bool = False
    second: int = 1
    second_copy: str = "encoded"
    steps: int = 5

    @property
    def ranks(self) -> int:
        """Ranks of a shard."""
        return self.shards or self.world


class Reference:
    """One process that sends itself what `case.world` ranks would send."""

    def __init__(self, model: nn.Module, case: Case, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model, self.case = model, case
        self.masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.trained = [n for n, p in model.named_parameters() if p.requires_grad]
        self.stepped = {n: nn.Parameter(self.masters[n]) for n in self.trained}
        self.optimizer = optimizer([self.stepped[n] for n in self.trained])
        self.rests: dict[Any, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
        self.dtype = torch.bfloat16 if case.bf16 else torch.float32
        self.losses: list[float] = []
        self.norms: list[float] = []

    def codec(self, name: str | None) -> Codec | None:
        """By name, in the case's blocks."""
        return codec_of(name, self.case.block)

    def deliver(self) -> None:
        """Set the model's weights to what arrives of the masters."""
        case = self.case
        for name, p in self.model.named_parameters():
            values = self.masters[name].to(self.dtype).reshape(-1)
            trained = p.requires_grad
            if case.over and trained:
                values = self.arrived(values, self.codec(case.copies))
            gathered = case.ranks > 1 and (case.stage == 3 or (trained and case.stage > 0))
            if gathered:
                values = self.arrived(values, self.codec(case.weights if trained else case.frozen))
            p.data = values.view(p.shape)

    @staticmethod
    def arrived(values: torch.Tensor, codec: Codec | None) -> torch.Tensor:
        """What arrives."""
        return values if codec is None else codec.rounded(values)

    def sent(self, key: Any, values: torch.Tensor, codec: Codec | None) -> torch.Tensor:
        """What arrives of a message, with the rest of the last one if the case says so; fp32."""
        if codec is None:
            return values
        whole = self.rests[key] + values.float() if self.case.feedback else values.float()
        arrived = codec.rounded(whole)
        if self.case.feedback:
            self.rests[key] = whole - arrived
        return arrived

    def reduced(self, name: str, parts: Sequence[torch.Tensor], kind: str, codec: Codec | None) -> torch.Tensor:
        """The mean of the ranks' flat gradients, as one of them gets it."""
        size, near = len(parts), self.case.machine if kind != "copies" else 1
        if codec is None:
            return torch.stack(list(parts)).mean(0)
        sent = [self.sent((name, kind, self.group, r), g, codec) for r, g in enumerate(parts)]
        if 1 < near < size:
            sums = []
            for machine in range(size // near):
                total = torch.zeros_like(sent[0])
                for part in sent[machine * near : (machine + 1) * near]:
                    total += part
                sums.append(self.sent((name, kind, self.group, "sum", machine), total, codec))
            sent = sums
        total = torch.zeros_like(sent[0])
        for part in sent:
            total += part
        mean = total * (1.0 / size)
        everywhere = (kind == "gradients" and self.case.stage == 0) or (kind == "copies" and not self.case.over)
        return self.sent((name, kind, self.group, "mean"), mean, codec) if everywhere else mean

    group: Any = 0

    def step(self, batches: Sequence[Sequence[Batch]]) -> None:
        """One optimizer step; `batches[r][m]`: microbatch m of rank r."""
        case = self.case
        self.deliver()
        losses = []
        gradients: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        for rank, parts in enumerate(batches):
            for batch in parts:
                self.model.zero_grad()
                loss = self.model(**batch).loss
                (loss / len(parts)).backward()
                losses.append(float(loss.detach()))
                for name, p in self.model.named_parameters():
                    if p.requires_grad:
                        gradients[name, rank].append(p.grad.detach().float().reshape(-1).clone())
        if case.stage < 2:  # reduced once in a window
            gradients = defaultdict(list, {key: [sum(found[1:], found[0])] for key, found in gradients.items()})
        for name in self.trained:
            copies = []
            for self.group in range(case.world // case.ranks):
                ranks = range(self.group * case.ranks, (self.group + 1) * case.ranks)
                rounds = [
                    self.reduced(name, [gradients[name, r][m] for r in ranks], "gradients", self.one(case.gradients))
                    for m in range(len(gradients[name, 0]))
                ]
                copies.append(sum(rounds[1:], rounds[0]))
            self.group = "copies"
            mean = self.reduced(name, copies, "copies", self.codec(case.copies)) if len(copies) > 1 else copies[0]
            self.stepped[name].grad = mean.view(self.stepped[name].shape)
        self.losses.append(sum(losses) / len(losses))
        self.norms.append(float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.stepped.values()]))))
        self.optimizer.step()

    def one(self, name: str | None) -> Codec | None:
        """The codec of the gradients, where several ranks have a shard."""
        return self.codec(name) if self.case.ranks > 1 else None
