"""What a role that trains answers: forwards that a backward may follow, backwards, its norm, steps, checkpoints.

A backward computes the forward again, as activation checkpointing does, because the schedule of a pipeline runs both together.
So every layout trains by the one window of the engine, and no graph is kept between the two calls: inputs are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dist.dist import collectives
from hf_dist.dist.link import Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.optim.clip import clip_coefficient
from hf_dist.remote.outputs import flat, packed
from hf_dist.remote.routes import SEED
from hf_dist.remote.serving import Call, Calls

__all__ = ["Training", "arguments_of", "fields_of", "in_mode"]


@dataclass
class _Kept:
    inputs: Mapping[str, Tensor]
    arguments: Mapping[str, Any]
    seed: int | None


class Training:
    """The state of a role that trains. Every rank of the role makes each call."""

    def __init__(self, engine: Callable[[Mapping[str, Any]], Engine], mesh: ParallelMesh, students: int) -> None:
        """`engine(inputs)`: the role's engine, made with these inputs as the example if there is none yet. `students`: data
        ranks of the asking role, over which a gradient is averaged."""
        self._engine_for = engine
        self._built: Engine | None = None
        self._mesh = mesh
        self._share = mesh.data.size / students
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._joining: _Kept | None = None
        """A forward of this rank that nobody waits for, with which it joins in backwards of the others."""
        self._first_rates: list[float] = []

    @property
    def calls(self) -> Calls:
        """Name -> what answers it."""
        return {
            "train": self.forward,
            "evaluate": self.evaluate,
            "backward": self.backward,
            "norm": self.norm,
            "step": self.step,
            "drop": self.drop,
            "save": self.save,
            "load": self.load,
        }

    @property
    def _engine(self) -> Engine:
        if self._built is None:
            raise ModelError("no forward has gone to this role yet, so it has no weights to step, save or load")
        return self._built

    def forward(self, call: Call) -> Message:
        """A forward in training mode, without a graph; its inputs are kept until the caller has dropped the call."""
        arguments, seed = arguments_of(call)
        engine = self._with_rates({**call.tensors, **arguments})
        kept = _Kept(call.tensors, arguments, seed)
        if call.counts:
            self._kept[call.student, call.number] = kept
        else:
            self._joining = kept
        return packed(_evaluated(engine, call.tensors, arguments, seed))

    def evaluate(self, call: Call) -> Message:
        """A forward that no backward follows."""
        arguments, seed = arguments_of(call)
        engine = self._with_rates({**call.tensors, **arguments})
        return packed(_evaluated(engine, call.tensors, arguments, seed))

    def backward(self, call: Call) -> Message:
        """Add the gradient of a forward to the window; the gradients of its inputs."""
        kept = self._kept[call.student, call.options["of"]] if call.counts else self._joining
        assert kept is not None, "a rank that joins in a backward has joined in its forward"
        grads = {int(name): grad for name, grad in call.tensors.items()} if call.counts else {}
        wanted = call.options["wanted"]
        inputs = {n: t.detach().requires_grad_() if n in wanted else t for n, t in kept.inputs.items()}
        engine, share = self._engine, self._share / call.options["scale"]
        if engine.scaler is not None and call.options["scale"] != 1.0:
            engine.scaler.scale = call.options["scale"]  # both overflow together, as in one process

        def step(model: nn.Module, inputs: Any) -> Tensor:
            outputs = flat(_tensors_of(model(**inputs, **kept.arguments)))
            if call.counts:
                parts = [(outputs[i].float() * grad.float()).sum() for i, grad in grads.items()]
            else:
                parts = [output.float().sum() * 0 for output in outputs if output.requires_grad][:1]
            return engine.backward(torch.stack(parts).sum() * share, scale_wrt_gas=False).detach()

        with in_mode(engine, kept.seed), _buffers_kept(engine.model), torch.enable_grad():
            engine.run_window([inputs], step)
        return packed({name: self._whole(inputs[name]) for name in wanted})

    def _whole(self, leaf: Tensor) -> Tensor:
        """An input's gradient: the first stage has it, and ranks that split sequences have parts of it."""
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for axis in (self._mesh.pp, self._mesh.cp):
            if axis.size > 1:
                collectives.all_reduce(axis, grad, op="sum").wait()
        # Each rank of cp has the loss of all, of which its backward has made one part.
        return grad.to("cpu", copy=True) / (self._share * self._mesh.cp.size)

    def norm(self, call: Call) -> Message:
        """`squared`: of the window's gradient, over all ranks of the role."""
        return packed({"squared": self._engine.clip_grad_norm(0.0).double().square().cpu()})

    def step(self, call: Call) -> Message:
        """Multiply the gradient by `factor` (None: clip it by its own norm, as the role's config says) and step."""
        engine, factor = self._engine, call.options["factor"]
        if call.options["skipped"]:
            engine.zero_grad()
            if engine.scaler is not None:  # where the caller has none, the next window needs a lower scale
                engine.scaler.update(overflow=True)
            return packed({})
        if factor is None:
            most = engine.config.gradient_clipping
            limit = float(most) if isinstance(most, int | float) else 0.0
            factor = clip_coefficient(engine.clip_grad_norm(0.0), limit) if limit else 1.0
        if engine.lr_scheduler is None:
            for group, first in zip(engine.optimizer.param_groups, self._first_rates, strict=True):
                group["lr"] = first * call.options["rate"]
        engine.window.multiply(factor)
        engine.apply_gradients()
        if engine.lr_scheduler is not None and not engine.schedule_waits:
            engine.lr_scheduler.step()
        return packed({})

    def drop(self, call: Call) -> Message:
        """Abandon the window."""
        self._engine.zero_grad()
        return packed({})

    def save(self, call: Call) -> Message:
        """Write a Hugging Face model with training state; returns when it is complete."""
        self._engine.save_checkpoint(call.options["folder"])
        self._engine.writer.wait()
        return packed({})

    def load(self, call: Call) -> Message:
        """Restore a folder that `save` has written."""
        self._with_rates({}).load_checkpoint(call.options["folder"], weights_only=call.options["weights_only"])
        return packed({})

    def release(self, student: int, numbers: Sequence[int]) -> None:
        """Forget the inputs of these forwards of a data rank: no backward will come. Local."""
        for number in numbers:
            self._kept.pop((student, number), None)

    def _with_rates(self, inputs: Mapping[str, Any]) -> Engine:
        if self._built is None:
            self._built = self._engine_for(inputs)
            self._first_rates = [group["lr"] for group in self._built.optimizer.param_groups]
        return self._built


def arguments_of(call: Call) -> tuple[dict[str, Any], int | None]:
    """The plain arguments of the model, and the seed of a call in training mode, which differs between students."""
    arguments = dict(call.options)
    seed = arguments.pop(SEED, None)
    return arguments, None if seed is None else (seed + call.student + 1) % (1 << 63)


def _evaluated(engine: Engine, inputs: Mapping[str, Tensor], arguments: Mapping[str, Any], seed: int | None) -> Any:
    def call_model(model: Any, given: Any) -> dict[str, Any]:
        return fields_of(model(**given, **arguments))

    with in_mode(engine, seed):
        return engine.evaluate(inputs, call_model)


@contextlib.contextmanager
def in_mode(engine: Engine, seed: int | None) -> Iterator[None]:
    """Inside, the model is in training mode, with the dropout of `seed`; in evaluation mode without one."""
    device = engine.device
    engine.train(seed is not None)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Statistics that a forward updates, such as BatchNorm's, were updated by the first of two."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _tensors_of(output: Any) -> dict[str, Any]:
    """The fields of a model's output."""
    return {name: getattr(output, name) for name in getattr(output, "__dataclass_fields__", ())} or dict(output)


def fields_of(output: Any) -> dict[str, Any]:
    """The fields of a model's output, copied to the host. Read on every rank: what is not whole is gathered then."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to("cpu", copy=True)
        return tuple(map(copied, value)) if isinstance(value, list | tuple) else value

    return {name: copied(value) for name, value in _tensors_of(output).items()}
