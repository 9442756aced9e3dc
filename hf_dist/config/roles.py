"""`hf_dist.roles`: which ranks of a start are which role, and what a role other than the trainer runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hf_dist.config import accepts
from hf_dist.config.spelling import did_you_mean
from hf_dist.config.values import BadValue

__all__ = ["RoleConfig", "asking_role", "averaging_role", "plain_roles", "roles_of"]

_EXAMPLE = 'Write {"trainer": {"ranks": "rest"}, "teacher": {"ranks": 2, "model": "path", "config": "teacher.json"}}.'


class RoleConfig(BaseModel):
    """One role. The one with neither model nor functions is the trainer: it runs the script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int | Literal["rest"]
    """Neighbouring ranks; "rest": those that the other roles leave."""
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

    @property
    def asks(self) -> bool:
        """Whether it runs the script."""
        return not self.model and not self.functions and not self.averages


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
    },
    "required": ["ranks"],
    "additionalProperties": False,
}


@accepts.taking({"type": "object", "additionalProperties": _ROLE}, "an object with roles")
def plain_roles(value: object) -> dict[str, Any]:
    """The section as it was written, if it is right. Raises `BadValue`."""
    return {name: role.model_dump() for name, role in roles_of(value).items()}


def roles_of(value: object) -> dict[str, RoleConfig]:
    """The roles in the order of the file; {} if there are none. Raises `BadValue`."""
    if value == {}:
        return {}
    if not isinstance(value, Mapping) or len(value) < 2:
        raise BadValue("is not an object with at least two roles", _EXAMPLE)
    found = {str(name): _role(str(name), section) for name, section in value.items()}
    askers = [name for name, role in found.items() if role.asks]
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
    averages, replicas = section.get("averages", False), section.get("replicas", 1)
    if type(averages) is not bool:
        raise BadValue(f"has {name}.averages: {averages!r}, which is neither true nor false", _EXAMPLE)
    if type(replicas) is not int or replicas < 1:
        raise BadValue(f"has {name}.replicas: {replicas!r}, which is no number from 1", _EXAMPLE)
    layout = dict(config) if isinstance(config, Mapping) else config
    return RoleConfig(
        ranks=ranks,
        model=model,
        functions=tuple(functions),
        clip=clip,
        config=layout,
        averages=averages,
        replicas=replicas,
    )


def averaging_role(roles: Mapping[str, RoleConfig]) -> str:
    """The name of the role that averages replicas."""
    return next(name for name, role in roles.items() if role.averages)


def asking_role(roles: Mapping[str, RoleConfig]) -> str:
    """The name of the role that runs the script."""
    return next(name for name, role in roles.items() if role.asks)
