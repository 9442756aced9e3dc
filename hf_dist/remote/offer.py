"""What a serving job says of its role to the job that asks: all that a stand-in of the model needs, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_dist.errors import RemoteError

__all__ = ["Offer"]


@dataclass(frozen=True)
class Offer:
    """Plain values: it crosses as JSON."""

    role: str
    """Its name in the file of the serving job."""
    ranks: int
    functions: tuple[str, ...]
    doors: tuple[tuple[str, int], ...] = ()
    """Of each data rank: host and port. A host "": that of the first door."""
    dtype: str = "fp32"
    """In which the model computes: fp32, bf16 or fp16."""
    config: Mapping[str, Any] | None = None
    """Of the model, as in config.json; None for a role without a model."""
    generation: Mapping[str, Any] | None = None

    def header(self) -> dict[str, Any]:
        """As the header of a message."""
        return {"offer": asdict(self)}

    @classmethod
    def of(cls, header: Mapping[str, Any], said_by: str) -> Offer:
        """That of a header. Raises `RemoteError` for one that has none, which `said_by` has sent."""
        try:
            said = dict(header["offer"])
            doors = tuple((str(host), int(port)) for host, port in said.pop("doors"))
            return cls(functions=tuple(said.pop("functions")), doors=doors, **said)
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteError(f"{said_by} sent no offer of this version of hf_dist: {error!r}") from error
