"""The roles of a config, each as a job of its own, for the commands that look at a start before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_dist.config import DistConfig, load_config
from hf_dist.config.roles import RoleConfig, asking_role, local_replicas, local_sizes, roles_of
from hf_dist.dist.roles import dealt

__all__ = ["Part", "parts_of", "role_dtype", "role_layout"]

_ZERO3 = {"zero_optimization": {"stage": 3}}


@dataclass(frozen=True)
class Part:
    """The ranks of one role, or of the whole start if it has no roles."""

    name: str
    """"" for a start without roles."""
    first: int
    ranks: int
    config: DistConfig
    model: str | None
    """What a role serves, "" for functions only or a server of replicas; None for the one that runs the script."""
    averages: bool = False
    """Whether it is the server of replicas."""
    replicas: int = 1
    """Of the one that runs the script: there are so many like it, on ranks after it."""

    @property
    def title(self) -> str:
        """`role teacher, ranks 2-3`; "" for a start without roles."""
        last = self.first + self.ranks - 1
        places = f"ranks {self.first}-{last}" if last > self.first else f"rank {last}"
        more = f", the first of {self.replicas} replicas" if self.replicas > 1 else ""
        return f"role {self.name}, {places}{more}" if self.name else ""

    @property
    def trains(self) -> bool:
        """Whether the role has an optimizer, or runs the script."""
        return self.model is None or self.config.optimizer is not None


def role_layout(role: RoleConfig) -> DistConfig:
    """The config of a role with a model: ZeRO-3 if it names none."""
    return load_config(role.config if role.config is not None else _ZERO3)


def role_dtype(layout: DistConfig) -> str:
    """In which a role of this layout computes: fp32, bf16 or fp16."""
    return next((name for name in ("bf16", "fp16") if getattr(layout, name).enabled is True), "fp32")


def parts_of(config: DistConfig, world: int) -> list[Part]:
    """The roles of a start of `world` ranks; the one that runs the script is the first. Raises `ConfigError`.

    Roles of other jobs are none of them.
    """
    roles = roles_of(config.hf_dist.roles)
    if not roles:
        return [Part("", 0, world, config, None)]
    asker = asking_role(roles)
    places = dealt(local_sizes(roles), world, local_replicas(roles))

    def found() -> Iterator[Part]:
        for name in sorted(places, key=lambda name: name != asker):
            role, place = roles[name], places[name]
            own = config if name == asker else role_layout(role)
            model = None if name == asker else role.model
            yield Part(name, place.first, place.size, own, model, role.averages, role.replicas)

    return list(found())
