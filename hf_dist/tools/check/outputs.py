"""What the Trainer's `predict` gives after a training: every output of the model beside the loss, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_dist.errors import HfDistError
from hf_dist.tensors import pytree
from hf_dist.tools.check.data import Batch

__all__ = ["Outputs", "differences", "few_rows", "keep", "predicted"]

Outputs = dict[str, torch.Tensor]
"""Name, such as `hidden_states.2`, in the model's order -> (rows, ...) in fp32."""
_MOST = 1 << 26
"""Logits that are kept: 256 MiB in fp32."""


def few_rows(rows: Sequence[Batch], vocabulary: int) -> list[Batch]:
    """As many of the rows as have no more logits than fit, one at least."""
    tokens = max((x.shape[1] for x in rows[0].values() if x.dim() == 2), default=1)
    return list(rows[: max(1, _MOST // max(tokens * vocabulary, 1))])


def predicted(trainer: Any, rows: Sequence[Batch], known: Sequence[str] | None = None) -> tuple[Outputs, str]:
    """The outputs for these rows, and why those beside the first are not among them, if a layout refuses to give them.

    `known`: their names; without, one forward of the whole model in this process tells them. Collective over world.
    """
    names = list(known) if known is not None else _names(trainer.model, rows[0])
    why = ""
    try:
        given = trainer.predict(rows).predictions
    except HfDistError as error:
        if len(names) < 2:
            raise
        why = str(error).splitlines()[0]
        beside = {name.partition(".")[0] for name in names[1:]}
        given = trainer.predict(rows, ignore_keys=sorted(beside | {*_ignored(trainer.model)})).predictions
        names = names[:1]
    leaves = [torch.as_tensor(x).float() for x in pytree.leaves(given)]
    return dict(zip(names, leaves, strict=False)), why


def _ignored(model: Any) -> Sequence[str]:
    return getattr(model.config, "keys_to_ignore_at_inference", None) or ["past_key_values"]


@torch.no_grad()
def _names(model: Any, row: Batch) -> list[str]:
    """Those of the outputs that HF's `prediction_step` keeps, one for each tensor."""
    output = model.eval()(**row)
    if not isinstance(output, Mapping):
        return []
    kept = {name: value for name, value in output.items() if name not in ("loss", *_ignored(model))}
    return [
        name if isinstance(value, torch.Tensor) else f"{name}.{number}"
        for name, value in kept.items()
        for number, _ in enumerate(pytree.leaves(value))
    ]


def keep(outputs: Outputs, file: str) -> None:
    """Write them for another run, in their order."""
    save_file({f"{place:03d} {name}": x.contiguous() for place, (name, x) in enumerate(outputs.items())}, file)


def differences(outputs: Outputs | None, file: str, *, refused: str = "") -> dict[str, float]:
    """Norm of each output's difference from that of the run that wrote the file, relative. None: the names alone, with 0.

    An output that is not there differs infinitely, unless the layout has said why (`refused`).
    """
    found: dict[str, float] = {}
    with safe_open(file, framework="pt") as expected:
        for key in sorted(expected.keys()):
            name = key.partition(" ")[2]
            if outputs is None:
                found[name] = 0.0
            elif name in outputs:
                own, theirs = outputs[name].double(), expected.get_tensor(key).double()
                same = own.shape == theirs.shape
                found[name] = float((own - theirs).norm() / theirs.norm().clamp(min=1e-12)) if same else float("inf")
            elif not refused:
                found[name] = float("inf")
    return found
