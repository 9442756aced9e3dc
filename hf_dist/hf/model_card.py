"""The model card that a Trainer writes: hf_dist, its version and the layout stand beside the other versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hf_dist.checkpoint.model_files import PLAN
from hf_dist.engine.engine import Engine
from hf_dist.version import __version__

__all__ = ["ModelCardMixin"]

_VERSIONS = re.compile(r"^### Framework versions\n\n(?:- .*\n)+", re.MULTILINE)
_OURS = "- hf_dist"


class ModelCardMixin:
    """Part of `DistTrainer`."""

    args: Any

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """The stock card, with what trained the model. Local; rank 0 writes."""
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        path, own = Path(self.args.output_dir, "README.md"), self.dist_engine  # type: ignore[attr-defined]
        if own is not None and self.is_world_process_zero() and path.is_file():  # type: ignore[attr-defined]
            card = path.read_text(encoding="utf-8")
            path.write_text(with_framework(card, own), encoding="utf-8")


def with_framework(card: str, engine: Engine) -> str:
    """`card` with our lines at the end of its list of versions; unchanged without such a list, or where they are there."""
    found = _VERSIONS.search(card)
    if found is None or _OURS in found.group():
        return card
    stage = engine.config.zero_optimization.stage
    lines = [
        f"{_OURS} {__version__} ({engine.mesh.describe()}; ZeRO stage {stage})",
        f"  - `{PLAN}`, if it is there, is for exports and resumes by hf_dist; `from_pretrained` does not read it",
    ]
    return card[: found.end()] + "".join(f"{line}\n" for line in lines) + card[found.end() :]
