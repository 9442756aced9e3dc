"""One module per engine, with the engine's name: `make(work, contender, rank)` returns an object with `run(meter)`.

To add an engine: a module beside this one, and one line below.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ENGINES", "Kind"]


@dataclass(frozen=True)
class Kind:
    """What is known about an engine before it is imported."""

    takes_config: bool = False
    """Runs once per config."""
    is_ours: bool = False
    """Counts its bytes itself."""
    needs: tuple[str, ...] = ()
    """Required packages; if one is missing, the engine is skipped."""


ENGINES = {
    "hf_dist": Kind(takes_config=True, is_ours=True),
    "fsdp2": Kind(),
    "ddp": Kind(),
    "deepspeed": Kind(takes_config=True, needs=("deepspeed",)),
    "hf_dist_trainer": Kind(takes_config=True, is_ours=True),
    "accelerate_fsdp2": Kind(),
}
