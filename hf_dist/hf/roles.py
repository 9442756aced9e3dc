"""A start with roles: each process becomes a member of one, and a role with a model serves it until the trainer has ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from hf_dist.config import DistConfig, axes_of
from hf_dist.config.roles import RoleConfig, asking_role, local_replicas, local_sizes, roles_of, serves_jobs
from hf_dist.dist import excepthook
from hf_dist.dist.axes import Axes
from hf_dist.dist.mesh import leave_job
from hf_dist.dist.roles import Place, divide, place
from hf_dist.dist.secret import Secret
from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.model_class import model_config, told_config
from hf_dist.log import say_once
from hf_dist.planning.role_parts import role_dtype, role_layout
from hf_dist.remote.asking import Asker, asker_of
from hf_dist.remote.offer import Offer
from hf_dist.sharding.precision import DTYPES

__all__ = ["enter", "remote_model"]

REPLICA = "HF_DIST_REPLICA"
"""Which replica a start is, where each is a job of its own."""
_asking: DistConfig | None = None


def enter(config: DistConfig) -> None:
    """Divide the start as `hf_dist.roles` says. Returns on the ranks of the trainer; the others serve, and exit then. A start
    that serves other jobs goes on until it is ended from outside.

    Every process of the start calls it, before torch.distributed starts. Repeated calls and a config without roles are no-ops.
    """
    global _asking
    roles = roles_of(config.hf_dist.roles)
    if not roles:
        return
    excepthook.install()
    if serves_jobs(roles) or any(role.job for role in roles.values()):
        Secret.of_environment()  # before anything is loaded
    where = divide(local_sizes(roles), local_replicas(roles), _whole_replica(roles))
    if where.role.kind == asking_role(roles):
        _asking = config
        return
    role = roles[where.role.name]
    if not serves_jobs(roles):
        _stay_for_the_trainer(where.role.name)
    if role.averages:
        said = _averages(where, role, config, roles[asking_role(roles)].replicas if asking_role(roles) else None)
    else:
        from hf_dist.hf.serving_model import serve_role

        said = f"answered {serve_role(where, role, role_layout(role))} calls; the trainer has ended"
    if where.rank == 0:
        say_once(f"role {where.role.name}: {said}")
    leave_job()
    sys.exit(0)


def _stay_for_the_trainer(name: str) -> None:
    """Outlive a first SIGTERM or SIGUSR1, which launchers send to every process: the trainer saves then."""
    for number in (signal.SIGTERM, signal.SIGUSR1):

        def told(number: int, _: object) -> None:
            say_once(f"role {name}: told to end; it stays until the trainer has ended")
            signal.signal(number, signal.SIG_DFL)

        if threading.current_thread() is threading.main_thread():
            signal.signal(number, told)


def _averages(where: Place, role: RoleConfig, config: DistConfig, replicas: int | None) -> str:
    """Meet replicas of this start, `replicas` of them, or of other jobs, until the process is ended."""
    from hf_dist.engine.build import mesh_for
    from hf_dist.parallel.local_sgd import meeting_point
    from hf_dist.parallel.local_sgd.server import ReplicaServer

    server = ReplicaServer(mesh_for(role_layout(role), device="cpu").world, config.local_sgd, replicas)
    if replicas is None:
        meeting_point.open_doors(where, server.guests, role.port)
    else:
        meeting_point.expect_replicas(where, server.guests, replicas)
    return server.run()


def _whole_replica(roles: Mapping[str, RoleConfig]) -> tuple[int, int] | None:
    """(number, of how many), if this start is one of several replicas whose server is in another job. Raises `ConfigError`."""
    of = roles[asking_role(roles)].replicas if asking_role(roles) else 1
    if not any(role.averages and role.job for role in roles.values()):
        return None
    said = os.environ.get(REPLICA, "" if of > 1 else "0")
    if not said.isdecimal() or int(said) >= of:
        what = f"is not the number of this replica among the {of} of hf_dist.roles.{asking_role(roles)}.replicas"
        raise ConfigError(
            Problem(REPLICA, said, what, f"Set it to another number from 0 to {of - 1} in each of their jobs.")
        )
    return int(said), of


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
    said = roles[role]
    if not said.model and not said.job:
        served = [name for name, each in roles.items() if each.model]
        raise ConfigError(
            Problem("hf_dist.roles", repr(role), f"is no role with a model; those are {', '.join(served)}", "")
        )
    if trains:
        _check_trains(role, said)
    asker, offer = reached(role, said, where, config)
    made = _standing_in(role, said, asker, offer, axes_of(config, where.role.size))
    if trains:
        made.will_train(joint_norm=said.clip == "joint")
    return made


def _check_trains(role: str, said: RoleConfig) -> None:
    path = f"hf_dist.roles.{role}"
    if said.job:
        what = "is in another job, which outlives this one, so its weights cannot be trained here"
        raise ConfigError(Problem(f"{path}.job", repr(said.job), what, "Give the role ranks of this start."))
    if role_layout(said).optimizer is None:
        fix = 'Add "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}} to it.'
        raise ConfigError(Problem(f"{path}.config", "", "has no optimizer, and the role is to train", fix))


def _standing_in(role: str, said: RoleConfig, asker: Asker, offer: Offer | None, axes: Axes) -> Any:
    from hf_dist.hf.remote_model import generation_of, stand_in

    path, generation = f"hf_dist.roles.{role}.model", said.model if offer is None else said.model or offer.generation
    if offer is not None and offer.config is None:
        what = f"has no model; it runs {', '.join(offer.functions)}"
        raise ConfigError(Problem(f"hf_dist.roles.{role}.job", repr(said.job), what, ""))
    given = None if offer is None or said.model else offer.config
    model = model_config(said.model, said_by=path) if given is None else told_config(given, said_by=path)
    dtype = DTYPES[role_dtype(role_layout(said)) if offer is None else offer.dtype]
    return stand_in(asker, model, axes, dtype=dtype, generation=generation_of(generation))


def reached(role: str, said: RoleConfig, where: Place, config: DistConfig) -> tuple[Asker, Offer | None]:
    """This rank's end towards a role, and what a role of another job has said of itself. Every rank of the trainer calls it.

    Waits for a role of another job to be there, and for its turn.
    """
    axes, seconds = axes_of(config, where.role.size), config.hf_dist.stall_report_seconds
    if not said.job:
        return asker_of(where, role, axes, seconds), None
    from hf_dist.remote.visiting import ToJob

    def way(student: int, students: int, leads: bool) -> ToJob:
        return ToJob(where.store, role, said.address, student, students, leads=leads)

    asker = asker_of(where, role, axes, seconds, way)
    assert isinstance(asker.way, ToJob)
    return asker, asker.way.offer
