"""The user's options of `hf-dist bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Asked"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options, as `hf-dist bench --help` explains them."""

    model: str
    config: list[Path]
    more: list[Path] = field(default_factory=list)
    """The files after the first of `--config a.json b.json`."""
    engines: str = "hf_dist,fsdp2,ddp,deepspeed"
    steps: int = 20
    rounds: int = 3
    ranks: int | None = None
    seq: int = 512
    micro_batch: int = 1
    accumulation: int = 1
    """Microbatches per step and rank, if every rank reads different rows."""
    num_layers: int | None = None
    dtype: str = "bf16"
    data: str = "synthetic"
    output: Path = Path("hf_dist_bench")
    deepspeed_python: str | None = None
