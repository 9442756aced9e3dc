"""The trainer's end of a role that trains: autograd goes through its model, and its optimizer steps with the trainer's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_dist.dist.link import Message
from hf_dist.engine.window import loss_scale_under_way
from hf_dist.errors import ModelError
from hf_dist.remote.asking import Asker
from hf_dist.remote.outputs import flat, mapped

__all__ = ["KeptCall", "TrainedRole", "Wire", "through_autograd"]


class Wire(Protocol):
    """How a stand-in speaks with its role; ranks that share rows share the answer."""

    @property
    def role(self) -> str:
        """The name of the role."""

    def send(self, call: str, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Future[Message] | None:
        """Ask the role. Every rank calls it."""

    def received(self, future: Future[Message] | None) -> dict[str, Any]:
        """The fields of the answer. Every rank calls it."""


class KeptCall:
    """A forward whose inputs the role keeps for a backward, until nothing here refers to the forward's graph."""

    def __init__(self, asker: Asker, number: int) -> None:
        self.number = number
        weakref.finalize(self, asker.drop, number)


class _ThroughRole(torch.autograd.Function):
    """The outputs of a forward in a role. Backward sends their gradients there, and returns those of the inputs."""

    @staticmethod
    def forward(
        ctx: Any, role: TrainedRole, kept: KeptCall, names: Sequence[str], outputs: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.role, ctx.kept, ctx.names = role, kept, names
        ctx.devices = [each.device for each in inputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found = ctx.role.backward(ctx.kept.number, grads, [n for n in ctx.names if n])
        return None, None, None, None, *(found.get(name) for name in ctx.names)


def through_autograd(
    role: TrainedRole, kept: KeptCall, fields: Mapping[str, Any], inputs: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The fields of a role's answer, as outputs of `inputs` and of the role's weights."""
    wanted = {name: t for name, t in inputs.items() if t.requires_grad}
    anchor = torch.zeros((), requires_grad=True)  # the role's weights need a gradient where no input does
    with torch.enable_grad():
        outputs = _ThroughRole.apply(role, kept, ["", *wanted], flat(fields), anchor, *wanted.values())
    left = iter(outputs)
    return mapped(fields, lambda _: next(left))


class TrainedRole:
    """The weights of a role, trained by the backwards of one engine here. `hf_dist.optim.beside.Beside`."""

    def __init__(self, wire: Wire, *, joint_norm: bool) -> None:
        """`joint_norm`: clip by one norm over all roles; otherwise the role clips by its own."""
        self._wire = wire
        self._joint_norm = joint_norm
        self._has_gradient = False
        self._was_stepped = False
        self._last: list[Future[Message] | None] = []
        """A call whose answer nobody has needed yet, None on a rank for which another asks; its error comes before the next."""

    def backward(self, number: int, grads: Sequence[Tensor | None], wanted: Sequence[str]) -> dict[str, Tensor]:
        """Send the outputs' gradients of forward `number`; the gradients of the `wanted` inputs."""
        self._has_gradient, self._was_stepped = True, False
        given = {str(i): g for i, g in enumerate(grads) if g is not None}
        options = {"of": number, "wanted": list(wanted), "scale": loss_scale_under_way()}
        fields: dict[str, Tensor] = self._ask("backward", given, **options)
        return fields

    def norm_squared(self) -> float:
        """Of its gradient."""
        if not (self._joint_norm and self._has_gradient):
            return 0.0
        return float(self._ask("norm")["squared"])

    def refuse(self, what: str) -> None:
        """Raise: only one factor goes to the role."""
        raise ModelError(
            f"role {self._wire.role} trains elsewhere: {what} is not available for its gradients. Clip by the norm of all"
        )

    def step(self, factor: float, rate: float, *, skipped: bool) -> None:
        """Let the role step, and go on here meanwhile."""
        if self._was_stepped:
            raise ModelError(
                f"role {self._wire.role}: a second step with the same gradients, which have ended there. Call "
                "optimizer.zero_grad() after each step"
            )
        if self._has_gradient:
            self._tell("step", factor=factor if self._joint_norm else None, rate=rate, skipped=skipped)
            self._was_stepped, self._has_gradient = True, False

    def drop(self) -> None:
        """Let the role drop its gradient."""
        self._was_stepped = False
        if self._has_gradient:
            self._has_gradient = False
            self._tell("drop")

    def save(self, folder: Path) -> None:
        """`roles/NAME` below the checkpoint: a Hugging Face model, with training state."""
        self._ask("save", folder=str(folder / "roles" / self._wire.role))

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Restore it, at any number of ranks of either role."""
        self._ask("load", folder=str(folder / "roles" / self._wire.role), weights_only=weights_only)

    def _tell(self, call: str, **options: object) -> None:
        self._finish()
        self._last = [self._wire.send(call, {}, options)]

    def _ask(self, call: str, tensors: Mapping[str, Tensor] | None = None, **options: object) -> dict[str, Any]:
        self._finish()
        return self._wire.received(self._wire.send(call, tensors or {}, options))

    def _finish(self) -> None:
        last, self._last = self._last, []
        for future in last:
            self._wire.received(future)
