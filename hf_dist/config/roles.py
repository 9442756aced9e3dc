"""`hf_dist.roles`: which ranks of a start are which role, and what a role other than the trainer runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hf_dist.config import accepts
from hf_dist.config.spelling import did_you_mean
from hf_dist.config.values import BadValue
from hf_dist.errors import ConfigError, Problem

__all__ = [
    "RoleConfig",
    "asking_role",
    "averaging_role",
    "jobs_of",
    "local_sizes",
    "plain_roles",
    "roles_of",
    "serves_jobs",
]

_EXAMPLE = 'Write {"trainer": {"ranks": "rest"}, "teacher": {"ranks": 2, "model": "path", "config": "teacher.json"}}.'
_ADDRESS = 'Write "host:port", or "$NAME" and set that variable.'


class RoleConfig(BaseModel):
    """One role. The one that serves nothing, and is in no other job, is the trainer: it runs the script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int | Literal["rest"] | None = None
    """Neighbouring ranks; "rest": those that the other roles leave. None for a role of another job."""
    model: str = ""
    """A folder or hub ID with the model that the role serves."""
    config: str | dict[str, Any] | None = None
    """The layout of the role: a file or an object of this schema. None: ZeRO-3. With an `optimizer`, if the role trains."""
    functions: tuple[str, ...] = ()
    """What `hf_dist.remote_call` may run there: "module:function", or "module" for all of its functions."""
    clip: Literal["joint", "own"] = "joint"
    """Of a role that trains: whether its gradient is clipped by one norm over all roles, or by its own, as `config` says."""
    averages: bool = False
    """Whether the role is the server that replicas of the trainer meet (`local_sgd.mode`)."""
    replicas: int = 1
    """Of the trainer: the jobs that its ranks are divided into, each of which trains a model of its own."""
    job: str = ""
    """`host:port` of a role of another job, or `$NAME`: what that variable of the environment says."""
    port: int = 0
    """At which other jobs may ask the role; its further data ranks take the ports after it. 0: only the trainer asks."""

    @property
    def asks(self) -> bool:
        """Whether it runs the script."""
        return not (self.model or self.functions or self.averages or self.job)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of a role of another job. Raises `ConfigError` if the variable is not set or is no address."""
        said = os.path.expandvars(self.job)
        host, _, port = said.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(Problem("hf_dist.roles", repr(said), "is no address of a role", _ADDRESS))
        return host.strip("[]"), int(port)


_ROLE: accepts.JsonSchema = {
    "type": "object",
    "properties": {
        "ranks": {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "rest"}]},
        "model": {"type": "string"},
        "config": {"type": ["string", "object", "null"]},
        "functions": {"type": "array", "items": {"type": "string"}},
        "clip": {"enum": ["joint", "own"]},
        "averages": {"type": "boolean"},
        "replicas": {"type": "integer", "minimum": 1},
        "job": {"type": "string"},
        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
    "anyOf": [{"required": ["ranks"]}, {"required": ["job"]}],
    "additionalProperties": False,
}


@accepts.taking({"type": "object", "additionalProperties": _ROLE}, "an object with roles")
def plain_roles(value: object) -> dict[str, Any]:
    """The section as it was written, if it is right. Raises `BadValue`."""
    return {name: role.model_dump(exclude_defaults=True) for name, role in roles_of(value).items()}


def roles_of(value: object) -> dict[str, RoleConfig]:
    """The roles in the order of the file; {} if there are none. Raises `BadValue`."""
    if value == {}:
        return {}
    if not isinstance(value, Mapping):
        raise BadValue("is not an object with at least two roles", _EXAMPLE)
    found = {str(name): _role(str(name), section) for name, section in value.items()}
    askers = [name for name, role in found.items() if role.asks]
    if serves_jobs(found):
        _check_serving(found)
        return found
    if len(found) < 2:
        raise BadValue("is not an object with at least two roles", _EXAMPLE)
    if len(askers) != 1:
        what = (
            f"has {len(askers)} roles with neither model nor functions ({', '.join(askers)})"
            if askers
            else "has a model, functions or a server in every role"
        )
        raise BadValue(f"{what}; one, the trainer, has neither and runs the script", _EXAMPLE)
    _check_replicas(found)
    return found


def _check_replicas(roles: Mapping[str, RoleConfig]) -> None:
    """Raise `BadValue` for replicas of another role than the trainer, and for roles that several replicas would ask."""
    servers = [name for name, role in roles.items() if role.averages]
    if len(servers) > 1:
        raise BadValue(f"has several roles that average: {', '.join(servers)}", "Keep one.")
    for name, role in roles.items():
        if role.replicas > 1 and not role.asks:
            raise BadValue(f"has {name}.replicas: {role.replicas}; only the trainer has replicas", "Remove the key.")
        if role.averages and (role.model or role.functions or role.config is not None):
            raise BadValue(f"has {name}, which averages and has a model, functions or a config", "Keep only its ranks.")
    asked = [name for name, role in roles.items() if not role.asks and not role.averages]
    if asked and roles[asking_role(roles)].replicas > 1:
        raise BadValue(
            f"has replicas of the trainer beside {', '.join(asked)}, which serves one trainer", "Remove one of them."
        )


def _role(name: str, section: object) -> RoleConfig:
    if not isinstance(section, Mapping):
        raise BadValue(f"has a role {name!r} that is no object", _EXAMPLE)
    for key in section:
        if key not in RoleConfig.model_fields:
            raise BadValue(
                f"has the key {name}.{key}, which no role has. {did_you_mean(str(key), RoleConfig.model_fields)}",
                _EXAMPLE,
            )
    if "job" in section:
        return _role_of_job(name, section)
    ranks = section.get("ranks")
    if ranks != "rest" and (type(ranks) is not int or ranks < 1):
        raise BadValue(f'has {name}.ranks: {ranks!r}, which is neither a number from 1 nor "rest"', _EXAMPLE)
    config, model = section.get("config"), section.get("model", "")
    if not isinstance(config, str | Mapping | None) or not isinstance(model, str):
        raise BadValue(
            f"has a {name} whose model is no path, or whose config is neither a path nor an object", _EXAMPLE
        )
    functions = section.get("functions", ())
    if not isinstance(functions, list | tuple) or not all(isinstance(each, str) for each in functions):
        raise BadValue(f"has {name}.functions: {functions!r}, which is no list of names", _EXAMPLE)
    clip = section.get("clip", "joint")
    if clip not in ("joint", "own"):
        raise BadValue(f'has {name}.clip: {clip!r}, which is neither "joint" nor "own"', _EXAMPLE)
    replicas = section.get("replicas", 1)
    if type(replicas) is not int or replicas < 1:
        raise BadValue(f"has {name}.replicas: {replicas!r}, which is no number from 1", _EXAMPLE)
    layout = dict(config) if isinstance(config, Mapping) else config
    return RoleConfig(
        ranks=ranks,
        model=model,
        functions=tuple(functions),
        clip=clip,
        config=layout,
        averages=_averages(name, section),
        replicas=replicas,
        port=_port(name, section),
    )


def _averages(name: str, section: Mapping[str, object]) -> bool:
    averages = section.get("averages", False)
    if type(averages) is not bool:
        raise BadValue(f"has {name}.averages: {averages!r}, which is neither true nor false", _EXAMPLE)
    return averages


def averaging_role(roles: Mapping[str, RoleConfig]) -> str:
    """The name of the role that averages replicas."""
    return next(name for name, role in roles.items() if role.averages)


def _port(name: str, section: Mapping[str, object]) -> int:
    port = section.get("port", 0)
    if type(port) is not int or not 0 <= port < 65536 or ("port" in section and not port):
        raise BadValue(f"has {name}.port: {port!r}, which is no port from 1 to 65535", _EXAMPLE)
    return port


def _role_of_job(name: str, section: Mapping[str, object]) -> RoleConfig:
    job, model = section["job"], section.get("model", "")
    if not isinstance(job, str) or not job:
        raise BadValue(f"has {name}.job: {job!r}, which is no address", _ADDRESS)
    more = [key for key in section if key not in ("job", "model", "averages")]
    if more:
        raise BadValue(
            f"has {name}, a role of another job, with {', '.join(more)}", "Say that in the file of that job."
        )
    if not isinstance(model, str):
        raise BadValue(f"has a {name} whose model is no path", _EXAMPLE)
    return RoleConfig(job=job, model=model, averages=_averages(name, section))


def serves_jobs(roles: Mapping[str, RoleConfig]) -> bool:
    """Whether the start serves other jobs, and runs no script."""
    return any(role.port for role in roles.values())


def _check_serving(roles: Mapping[str, RoleConfig]) -> None:
    for name, role in roles.items():
        if not role.port or role.asks:
            what = "runs the script" if role.asks else "has no port"
            raise BadValue(
                f"has {name}, which {what}, beside roles that other jobs ask", "Start it as a job of its own."
            )


def jobs_of(value: object) -> dict[str, str]:
    """Role of another job -> where that is, as it is written."""
    return {name: role.job for name, role in roles_of(value).items() if role.job}


def local_sizes(roles: Mapping[str, RoleConfig]) -> dict[str, int | str]:
    """The roles of this start, with their ranks."""
    return {name: role.ranks for name, role in roles.items() if role.ranks is not None}


def local_replicas(roles: Mapping[str, RoleConfig]) -> dict[str, int]:
    """Role of this start -> the replicas that it is divided into. Where their server is in another job, each is a job."""
    apart = any(role.averages and role.job for role in roles.values())
    return {name: 1 if apart else role.replicas for name, role in roles.items()}


def asking_role(roles: Mapping[str, RoleConfig]) -> str:
    """The name of the role that runs the script; "" in a start that serves other jobs."""
    return next((name for name, role in roles.items() if role.asks), "")
