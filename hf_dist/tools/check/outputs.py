"""What the Trainer's `predict` gives after a training: every output of the model beside the loss, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_dist.dist import collectives
from hf_dist.engine.engine import Engine
from hf_dist.errors import HfDistError, ModelError
from hf_dist.tensors import pytree
from hf_dist.tools.check.data import Batch, joined

__all__ = ["Outputs", "differences", "few_rows", "keep", "names_in", "predicted"]

Outputs = dict[str, torch.Tensor]
"""Name, such as `hidden_states.2`, in the model's order -> (rows, ...) in fp32."""
_MOST = 1 << 26
"""Logits that are kept: 256 MiB in fp32."""


def few_rows(rows: Sequence[Batch], vocabulary: int) -> list[Batch]:
    """As many of the rows as have no more logits than fit, one at least."""
    tokens = max((x.shape[1] for x in rows[0].values() if x.dim() == 2), default=1)
    return list(rows[: max(1, _MOST // max(tokens * vocabulary, 1))])


def predicted(trainer: Any, rows: Sequence[Batch], known: Mapping[str, bool] | None = None) -> tuple[Outputs, str]:
    """The outputs for these rows, and why some of them are not there, if the layout refuses to give them.

    `known`: what `names_in` gives; without, one forward of the whole model in this process tells it. Collective over world.
    """
    of_rows = _names(trainer.model, rows) if known is None else known
    refused = _refused(trainer, list(of_rows), rows[0])
    if next(iter(of_rows), "") in refused:
        raise ModelError(next(iter(refused.values())))
    left_out = {name.partition(".")[0] for name in refused}
    ignored = sorted(left_out | {*_ignored(trainer.model)}) if refused else None
    given = trainer.predict(rows, ignore_keys=ignored).predictions
    names = [name for name in of_rows if name.partition(".")[0] not in left_out]
    leaves = [torch.as_tensor(x).float() for x in pytree.leaves(given)]
    found = dict(zip(names, leaves, strict=False))
    for name in found:
        if not of_rows[name]:
            found[name] = torch.empty(0)
    return found, next(iter(refused.values()), "")


def _refused(trainer: Any, names: Sequence[str], row: Batch) -> dict[str, str]:
    """Name of an output that any rank cannot read -> its error. A rank that finds it in `predict` leaves the others there."""
    engine: Engine | None = getattr(trainer, "dist_engine", None)
    if engine is None:
        return {}
    refused: dict[str, str] = {}

    def read(model: Any, batch: Any) -> torch.Tensor:
        output = model(**batch)
        for name in names if isinstance(output, Mapping) else ():
            top, _, number = name.partition(".")
            leaves = pytree.leaves(output.get(top))
            try:
                leaves[int(number or 0)].detach()
            except HfDistError as error:
                refused[name] = str(error).splitlines()[0]
            except IndexError:  # this layout does not give it at all
                continue
        return torch.zeros(())

    trainer.model.eval()
    engine.evaluate(trainer._prepare_inputs(dict(row)), read)
    return {
        name: why
        for found in collectives.all_gather_object(engine.mesh.control, refused)
        for name, why in found.items()
    }


def _ignored(model: Any) -> Sequence[str]:
    return getattr(model.config, "keys_to_ignore_at_inference", None) or ["past_key_values"]


@torch.no_grad()
def _names(model: Any, rows: Sequence[Batch]) -> dict[str, bool]:
    """Those of the outputs that HF's `prediction_step` keeps, one for each tensor -> whether its first dimension is the rows.

    The logits of routers have all tokens there, so HF joins them, and cuts them off, at other places with other batches.
    """
    pair = joined(rows[:2])
    output = model.eval()(**(rows[0] if pair is None else pair))
    if not isinstance(output, Mapping):
        return {}
    kept = {name: value for name, value in output.items() if name not in ("loss", *_ignored(model))}
    return {
        name if isinstance(value, torch.Tensor) else f"{name}.{number}": pair is None
        or leaf.shape[:1] == (len(rows[:2]),)
        for name, value in kept.items()
        for number, leaf in enumerate(pytree.leaves(value))
        if isinstance(leaf, torch.Tensor)
    }


def keep(outputs: Outputs, file: str) -> None:
    """Write them for another run, in their order."""
    save_file({f"{place:03d} {name}": x.contiguous() for place, (name, x) in enumerate(outputs.items())}, file)


def names_in(file: str) -> dict[str, bool]:
    """The names of the outputs in a file, in the model's order -> whether they are of rows; the others are written empty."""
    with safe_open(file, framework="pt") as written:
        return {key.partition(" ")[2]: written.get_slice(key).get_shape() != [0] for key in sorted(written.keys())}


def differences(outputs: Outputs, file: str, *, refused: str = "") -> dict[str, float]:
    """Norm of each output's difference from that of the run that wrote the file, relative; of those of rows.

    An output that is not there differs infinitely, unless the layout has said why (`refused`).
    """
    found: dict[str, float] = {}
    of_rows = names_in(file)
    with safe_open(file, framework="pt") as expected:
        for key in sorted(expected.keys()):
            name = key.partition(" ")[2]
            if not of_rows[name]:
                continue
            if name in outputs:
                own, theirs = outputs[name].double(), expected.get_tensor(key).double()
                same = own.shape == theirs.shape
                found[name] = float((own - theirs).norm() / theirs.norm().clamp(min=1e-12)) if same else float("inf")
            elif not refused:
                found[name] = float("inf")
    return found
