"""What a rank does in the tests of weights that are no longer finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from tests.hf.recipes import Recipe

AT = 3
"""The optimizer step whose loss is nan."""


class Poisoned:
    """An override that makes one step's loss nan."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """HF's, times nan in one step."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        if self.state.global_step == AT - 1:  # type: ignore[attr-defined]
            loss = loss * float("nan")
        return (loss, outputs) if return_outputs else loss


def poisoned(folder: Path, stage: int, config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Six steps with a checkpoint after each: what was said, what is left, what the manifests tell, the error if any."""
    from hf_dist import DistTrainer, DistTrainingArguments
    from hf_dist.checkpoint import folder as folders
    from hf_dist.checkpoint import save
    from hf_dist.hf.callbacks import finite

    lines: list[str] = []
    config = {"zero_optimization": {"stage": stage}, **config}
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, **changes}
    error = ""
    with mock.patch.object(save, "say", lines.append), mock.patch.object(finite, "say", lines.append):
        trainer = Recipe(override=Poisoned).build(
            DistTrainer, DistTrainingArguments, folder, 2, dist_config=config, **arguments
        )
        try:
            trainer.train()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    left = sorted(path.name for path in folders.numbered(folder))
    manifests = {name: json.loads((folder / name / folders.MANIFEST).read_text()) for name in left}
    told = [line for line in lines if "finite" in line]
    return {"said": told, "left": left, "error": error, "bad": {n: m.get("not_finite") for n, m in manifests.items()}}
