"""A start with roles: each process becomes a member of one, and a role with a model serves it until the trainer has ended."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hf_dist.config import DistConfig, axes_of
from hf_dist.config.roles import RoleConfig, asking_role, roles_of
from hf_dist.dist import excepthook
from hf_dist.dist.mesh import leave_job
from hf_dist.dist.roles import Place, divide, place
from hf_dist.errors import ConfigError, Problem
from hf_dist.log import say_once
from hf_dist.planning.role_parts import role_layout
from hf_dist.sharding.precision import DTYPES

__all__ = ["enter", "remote_model"]

_asking: DistConfig | None = None


def enter(config: DistConfig) -> None:
    """Divide the start as `hf_dist.roles` says. Returns on the ranks of the trainer; the others serve, and exit then.

    Every process of the start calls it, before torch.distributed starts. Repeated calls and a config without roles are no-ops.
    """
    global _asking
    roles = roles_of(config.hf_dist.roles)
    if not roles:
        return
    excepthook.install()
    where = divide({name: role.ranks for name, role in roles.items()}, {name: r.replicas for name, r in roles.items()})
    if where.role.kind == asking_role(roles):
        _asking = config
        return
    role = roles[where.role.name]
    if role.averages:
        from hf_dist.engine.build import mesh_for
        from hf_dist.parallel.local_sgd.meeting_point import expect_replicas
        from hf_dist.parallel.local_sgd.server import ReplicaServer

        replicas = roles[asking_role(roles)].replicas
        server = ReplicaServer(mesh_for(role_layout(role), device="cpu").world, config.local_sgd, replicas)
        expect_replicas(where, server.guests, replicas)
        said = server.run()
    else:
        from hf_dist.hf.serving_model import serve_role

        said = f"answered {serve_role(where, role, role_layout(role))} calls; the trainer has ended"
    if where.rank == 0:
        say_once(f"role {where.role.name}: {said}")
    leave_job()
    sys.exit(0)


def asking_config(role: str) -> tuple[dict[str, RoleConfig], Place, DistConfig]:
    """The roles, this process's place, and the trainer's config, for a call of `role`. Raises `ConfigError` without it."""
    where = place()
    if where is None or _asking is None:
        raise ConfigError(
            Problem(
                "hf_dist.roles", "", f"is missing, so there is no role {role!r}",
                'Add it to the JSON: "hf_dist": {"roles": {"trainer": {"ranks": "rest"}, "' + role + '": {"ranks": 1, "model": '
                '"path"}}}, and create the DistTrainingArguments (or DistAccelerator) before this call.',
            )
        )  # fmt: skip
    roles = roles_of(_asking.hf_dist.roles)
    if role not in roles or role == where.role.kind:
        others = ", ".join(name for name in roles if name != where.role.kind)
        raise ConfigError(Problem("hf_dist.roles", repr(role), f"is none of the other roles, which are {others}", ""))
    return roles, where, _asking


def remote_model(role: str, *, trains: bool = False) -> Any:
    """The model of another role, as a module of its own class without weights. Every rank of the trainer calls it.

    Usable as `teacher_model=`, `ref_model=`, `reward_model=` of TRL's trainers, or in a loop of one's own (prepared
    where ranks share rows). A call sends this data rank's rows; the answer is waited for when a part of it is read.
    `trains`: gradients flow through it, and its weights are stepped at their place, by the optimizer in the role's config,
    whenever the optimizer here steps. It is a part of the model that is trained here, or prepared beside it.
    Raises `ConfigError` if the config names no such role, or one without an optimizer is to train.
    """
    roles, where, config = asking_config(role)
    if not roles[role].model:
        served = [name for name, each in roles.items() if each.model]
        raise ConfigError(
            Problem("hf_dist.roles", repr(role), f"is no role with a model; those are {', '.join(served)}", "")
        )
    from hf_dist.hf.remote_model import stand_in

    layout = role_layout(roles[role])
    axes, seconds = axes_of(config, where.role.size), config.hf_dist.stall_report_seconds
    made = stand_in(where, role, roles[role].model, axes, dtype=_dtype_of(layout), tells_after=seconds)
    if trains:
        if layout.optimizer is None:
            path, fix = (
                f"hf_dist.roles.{role}.config",
                'Add "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}} to it.',
            )
            raise ConfigError(Problem(path, "", "has no optimizer, and the role is to train", fix))
        made.will_train(joint_norm=roles[role].clip == "joint")
    return made


def _dtype_of(config: DistConfig) -> torch.dtype:
    """In which the role computes."""
    name = next((name for name in ("bf16", "fp16") if getattr(config, name).enabled is True), "fp32")
    return DTYPES[name]
