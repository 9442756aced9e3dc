"""1-bit optimizers in one process: the messages of several ranks and the steps, written without the engine and its classes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from hf_dist.tensors.codecs import Signs

Batch = dict[str, Any]
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.99), 1e-3, 0.1
FREEZE = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A training."""

    type: str = "OneBitAdam"
    stage: int = 0
    world: int = 2
    model: str = "llama"
    """A family, or "heads": two of them, each of which some batches do not use."""
    accumulation: int = 1
    dtype: str = "fp32"
    lora: bool = False
    tied: bool = False
    frozen: bool = False
    """Whether embeddings are not trained."""
    checkpointing: bool = False
    clip: float = 0.0
    block: int = 64
    freeze: int = FREEZE
    steps: int = FREEZE + 4
    overflow: tuple[int, ...] = ()
    """Steps in which the last rank's gradient is not finite."""
    bias_correction: bool = True
    scale: float = 1.0
    """Loss scale of fp16."""

    def __str__(self) -> str:
        given = (f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(given) or "plain"


class Reference:
    """One process that sends itself what `case.world` ranks would send."""

    def __init__(self, model: nn.Module, case: Case, clips_by: Sequence[float] = ()) -> None:
        """`clips_by`: the norm of each step that its gradient is clipped by."""
        self.model, self.case, self.codec = model, case, Signs(case.block)
        self.trained = [n for n, p in model.named_parameters() if p.requires_grad]
        self.masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.states: dict[str, dict[str, Any]] = defaultdict(dict)
        self.rests: dict[Any, Any] = defaultdict(float)
        self.count, self.interval, self.changes = 0, 1, 0
        self.clips_by = clips_by
        self.losses: list[float] = []
        self.norms: list[float] = []

    @property
    def message(self) -> str | None:
        """What the next step sends."""
        if self.count >= self.case.freeze:
            return "momentum"
        one_bit = self.case.type == "ZeroOneAdam" and (self.count + 1) % self.interval
        return "gradient" if one_bit else None

    def signs(self, key: Any, values: torch.Tensor) -> torch.Tensor:
        """What arrives of a message of one parameter; what it leaves out is kept."""
        whole = self.rests[key] + values
        tail = len(whole) % self.codec.block
        full = whole
        if tail:
            mean = whole[-tail:].abs().mean()
            full = torch.cat([whole, mean.expand(self.codec.block - tail)])
        arrived = self.codec.rounded(full)[: len(whole)]
        self.rests[key] = whole - arrived
        return arrived

    def averaged(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean of the ranks' messages, as all of them get it."""
        if self.case.world == 1:
            return parts[0]
        total = torch.zeros_like(parts[0])
        for rank, part in enumerate(parts):
            total += self.signs((name, rank), part)
        return self.signs((name, "mean"), total * (1.0 / len(parts)))

    def gradients(self, batches: Sequence[Sequence[Batch]]) -> list[dict[str, torch.Tensor]]:
        """Each rank's own, flat and in fp32."""
        for name, p in self.model.named_parameters():
            p.data = self.masters[name].to(DTYPES[self.case.dtype])
        found, losses = [], []
        for parts in batches:
            own: dict[str, torch.Tensor] = {}
            for batch in parts:
                self.model.zero_grad()
                loss = self.model(**batch).loss
                (loss * (self.case.scale / len(parts))).backward()
                losses.append(float(loss.detach()))
                for name, p in self.model.named_parameters():
                    if p.grad is not None:
                        grad = p.grad.detach().float().reshape(-1)
                        own[name] = own[name] + grad if name in own else grad.clone()
            found.append({n: g.div_(self.case.scale) for n, g in own.items()})
        self.losses.append(sum(losses) / len(losses))
        return found

    def step(self, batches: Sequence[Sequence[Batch]]) -> None:
        """One optimizer step; `batches[r][m]`: microbatch m of rank r."""
        found, message, world = self.gradients(batches), self.message, self.case.world
        used = [n for n in self.trained if any(n in own for own in found)]
        parts = {n: [own.get(n, torch.zeros(self.masters[n].numel())) for own in found] for n in self.trained}
        means = {n: torch.stack(parts[n]).sum(0) / world for n in self.trained}
        rows = [means] if message is None else [{n: parts[n][r] for n in self.trained} for r in range(world)]
        squares = sum(float(g.double().square().sum()) for row in rows for g in row.values()) / len(rows)
        norm = math.sqrt(squares)
        self.norms.append(norm)
        if not math.isfinite(norm):
            return
        if self.case.clip:
            factor = (self.case.clip / (torch.tensor(self.clips_by[len(self.norms) - 1]) + 1e-6)).clamp(max=1.0)
            means = {n: g * factor for n, g in means.items()}
            parts = {n: [g * factor for g in own] for n, own in parts.items()}
        arrived = means
        if message is not None:
            if self.case.type == "ZeroOneAdam" and self.count == self.case.freeze:
                self.rests.clear()
            arrived = self.exchange(parts, used, message)
        for name in used:
            step = self.lamb if self.case.type == "OneBitLamb" else self.adam
            step(name, arrived[name].view(self.masters[name].shape), message)
        self.count += 1
        if message is None and self.case.type == "ZeroOneAdam":
            self.changes += 1
            if self.changes == 2:
                self.changes, self.interval = 0, 2 * self.interval

    def exchange(self, parts: dict[str, list[torch.Tensor]], used: list[str], message: str) -> dict[str, torch.Tensor]:
        """What arrives of every parameter."""
        arrived = {}
        for name in self.trained:
            before = self.states[name].get("m", torch.zeros(self.masters[name].shape)).reshape(-1)
            own = parts[name]
            if message == "momentum":
                own = [g * (1.0 - BETAS[0]) + before * BETAS[0] if name in used else before for g in own]
            arrived[name] = self.averaged(name, own)
        return arrived

    def started(self, name: str) -> dict[str, Any]:
        """The state of a parameter, one step further."""
        state, zero = self.states[name], torch.zeros(self.masters[name].shape)
        if not state:
            state.update(m=zero, v=zero, w=None, t=0, s=0, coeff=0.0, factor=1.0)
        state["t"] += 1
        return state

    def moved(self, state: dict[str, Any], value: torch.Tensor, message: str | None) -> None:
        """Momentum and variance of this step."""
        (b1, b2), before = BETAS, state["m"]
        state["m"] = value if message == "momentum" else (b1 * before).add(value, alpha=1 - b1)
        if message is None:
            state["s"] += 1
            state["v"] = (b2 * state["v"]).addcmul(value, value, value=1 - b2)

    def corrections(self, state: dict[str, Any]) -> tuple[float, float]:
        """Of momentum and variance."""
        if not self.case.bias_correction:
            return 1.0, 1.0
        return 1 - BETAS[0] ** state["t"], 1 - BETAS[1] ** max(state["s"], 1)

    def scale(self, state: dict[str, Any], message: str | None, second: float) -> torch.Tensor:
        """sqrt(v) + eps; infinite where v has not changed before it is frozen."""
        found = (state["v"] / second).sqrt() + EPS
        return found if message is None else torch.where(state["v"] > 0, found, math.inf)

    def adam(self, name: str, value: torch.Tensor, message: str | None) -> None:
        """A step of 1-bit Adam or 0/1 Adam."""
        state, p = self.started(name), self.masters[name]
        self.moved(state, value, message)
        first, second = self.corrections(state)
        self.masters[name] = (p * (1 - LR * DECAY)).addcdiv(
            state["m"], self.scale(state, message, second), value=-LR / first
        )

    def lamb(self, name: str, value: torch.Tensor, message: str | None) -> None:
        """A step of 1-bit LAMB."""
        state, p = self.started(name), self.masters[name]
        before = state["m"]
        self.moved(state, value, message)
        direction = state["m"] / self.scale(state, message, 1.0)
        update = direction + DECAY * p
        if message is None:
            ratio = min(max(float(p.double().norm() / update.double().norm()), 0.01), 10.0)
            state["coeff"] = 0.9 * state["coeff"] + 0.1 * ratio
        else:
            state["w"] = state["v"] if state["w"] is None else state["w"]
            change = (state["m"] - BETAS[0] * before) / (1 - BETAS[0])
            state["w"] = BETAS[1] * state["w"] + (1 - BETAS[1]) * change.square()
            ratios = (state["v"].sqrt() + EPS) / (state["w"].sqrt() + EPS)
            share = min(1.0, float(direction.double().norm() / update.double().norm()))
            factor = float(torch.where(state["v"] > 0, ratios, 0.0).max()) * share + 1 - share
            factor = min(max(factor, 0.5), 4.0)
            state["factor"] = min(max(factor, state["factor"] * 0.9), state["factor"] * 1.1)
            ratio = state["coeff"] * state["factor"]
        first, second = self.corrections(state)
        self.masters[name] = p - LR * math.sqrt(second) / first * ratio * update
