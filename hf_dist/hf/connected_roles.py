"""Which engine's optimizer step steps a role that trains: that of the model that has the stand-in, or is prepared with it."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dist.engine.engine import Engine
from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.remote_call import know_mesh
from hf_dist.hf.remote_model import RemoteModel

__all__ = ["connect_prepared", "connect_roles"]


def connect_roles(engine: Engine) -> None:
    """Let the optimizer step of `engine` step the roles that train within its model, too. A change after a build."""
    know_mesh(engine.mesh)
    inside = [module for module in engine.model.modules() if isinstance(module, RemoteModel)]
    for module in inside:
        module.bind(engine.mesh)
    is_trained = any(param.requires_grad for param in engine.model.parameters())
    waiting = [_waiting.pop(0) for _ in range(len(_waiting))] if is_trained else []
    for module in {id(m): m for m in (*inside, *waiting) if m.trains}.values():
        _connect(engine, module)


_waiting: list[RemoteModel] = []
"""Prepared before the model that is trained."""


def connect_prepared(model: RemoteModel, engines: Sequence[Engine]) -> None:
    """Let the first of `engines`, or the next one that is made, step the role of a model that was prepared by itself. Local."""
    if not model.trains or model.is_connected:
        return
    if engines:
        _connect(engines[0], model)
    else:
        _waiting.append(model)


def _connect(engine: Engine, model: RemoteModel) -> None:
    """Let the optimizer step of `engine` step the role of `model`, too."""
    for axis, path in (("pp", "pipeline.stages"), ("cp", "sequence_parallel_size")):
        if engine.mesh.axes.size(axis) > 1:
            raise ConfigError(
                Problem(
                    path, str(engine.mesh.axes.size(axis)), f"cannot train through role {model.role}",
                    "Split the trainer by ZeRO or tensor_parallel; the role itself may have any layout.",
                )
            )  # fmt: skip
    engine.window.beside.append(model.connected())
