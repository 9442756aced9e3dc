"""Checks that a folder holds the model: a saved one before it is renamed, another program's before it is read.

Of a saved one, a rank reads headers only; the writers have checked the values. A missing name would load as random weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from hf_dist.checkpoint.folder import STATE
from hf_dist.checkpoint.safetensors_source import SafetensorsFile
from hf_dist.checkpoint.weight_file import difference
from hf_dist.checkpoint.weight_plan import WeightPlan
from hf_dist.errors import CheckpointError, first_of

__all__ = ["check_needed", "check_planned", "check_shapes", "refuse_missing", "refuse_unknown"]

Shape = tuple[int, ...]
_AFTER = "the folder would load with random weights and was not given its name"


def check_needed(plan: WeightPlan, needed: Mapping[str, Shape]) -> None:
    """Raise `CheckpointError` if a parameter of `needed` (name -> shape) is missing from `plan`. Local."""
    absent = sorted(needed.keys() - plan.by_param.keys())
    if absent:
        raise CheckpointError(
            f"{absent[0]} of the model has no place in its weight files ({len(absent)} parameters in all): {_AFTER}. Its class "
            "leaves them out when it is saved; please report it."
        )


def check_planned(folder: Path, plan: WeightPlan) -> None:
    """Raise `CheckpointError` if the weight files below `folder` do not hold exactly what `plan` says. Local.

    The writer has checked them as well, but a library's code may have written into the folder since.
    """
    for file in plan.files:
        found = difference(folder, file)
        if found is not None:
            raise CheckpointError(f"{found}: {_AFTER}. Another program wrote that file; save again.")


def check_shapes(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Raise `CheckpointError` if a library's code wrote a tensor of the model empty or in parts. Local.

    `shapes`: shapes of the whole parameters, by full name. A library may rename them, so a tensor is compared only if exactly
    one parameter ends in the same words. What a library leaves out is its own decision, as under DDP.
    """
    for path in sorted(folder.rglob("*")):
        if STATE in path.relative_to(folder).parts or path.suffix not in (".safetensors", ".bin") or not path.is_file():
            continue
        for name, shape in _shapes(path).items():
            known = list(_same_words(name, shapes))
            if len(known) == 1 and shapes[known[0]] != shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {shape}, {known[0]} of the model has {shapes[known[0]]}: {_AFTER}. The code "
                    "that saves keeps a reference to a part of the weights; take them from the model at the moment of saving."
                )


def _same_words(name: str, shapes: Mapping[str, Shape]) -> Iterator[str]:
    if name in shapes:
        yield name
        return
    yield from (n for n in shapes if n.endswith(f".{name}") or name.endswith(f".{n}"))


def _shapes(path: Path) -> dict[str, Shape]:
    """Shapes of the tensors in a safetensors file or a pickled state dict; empty for any other pickled object."""
    if path.suffix == ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in SafetensorsFile(path).tensors().items()}
    try:
        state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # training arguments and similar
        return {}
    found = state.items() if isinstance(state, dict) else ()
    return {name: tuple(value.shape) for name, value in found if isinstance(value, torch.Tensor)}


def refuse_unknown(model: nn.Module, names: Iterable[str], folder: Path) -> None:
    """Raise `CheckpointError` for stored tensors that the model does not have: they would be dropped."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    more = [n for n in names if n not in known and not any(re.search(pattern, n) for pattern in ignored)]
    if more:
        raise CheckpointError(
            f"{folder} holds {len(more)} tensors that the model does not have: {first_of(more)}. {_ANOTHER_MODEL}"
        )


def refuse_missing(model: nn.Module, names: Collection[str], folder: Path) -> None:
    """Raise `CheckpointError` for parameters, or all names of a tied one, that a checkpoint does not have."""
    params = dict(model.named_parameters(remove_duplicate=False))
    read = {id(param) for name, param in params.items() if name not in names}
    lost = [name for name in names if name in params and id(params[name]) not in read]
    if lost:
        raise CheckpointError(f"{folder} does not hold {first_of(lost)}. {_ANOTHER_MODEL}")


_ANOTHER_MODEL = (
    "It was saved from another model, or under names that only from_pretrained knows: load it with that, and start without "
    "resume_from_checkpoint."
)
