"""Does a saved folder hold the model? Names and shapes are read back from the files before the folder gets its name.

Headers only, by one rank: the values are checked by whoever wrote them. A name that is missing would load as random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hf_dist.checkpoint.folder import STATE
from hf_dist.checkpoint.safetensors_source import SafetensorsFile
from hf_dist.checkpoint.weight_file import difference
from hf_dist.checkpoint.weight_plan import WeightPlan
from hf_dist.errors import CheckpointError

__all__ = ["check_needed", "check_planned", "check_shapes"]

Shape = tuple[int, ...]
_AFTER = "the folder would load with random weights and was not given its name"


def check_needed(plan: WeightPlan, needed: Mapping[str, Shape]) -> None:
    """Raise `CheckpointError` where a parameter of `needed` (name -> shape) has no place in `plan`. Local."""
    absent = sorted(needed.keys() - plan.by_param.keys())
    if absent:
        raise CheckpointError(
            f"{absent[0]} of the model has no place in its weight files ({len(absent)} parameters in all): {_AFTER}. Its class "
            "leaves them out when it is saved; please report it."
        )


def check_planned(folder: Path, plan: WeightPlan) -> None:
    """Raise `CheckpointError` where the weight files below `folder` do not hold exactly what `plan` says. Local.

    The writer has looked as well, but code of a library may have written into the folder since.
    """
    for file in plan.files:
        found = difference(folder, file)
        if found is not None:
            raise CheckpointError(f"{found}: {_AFTER}. Somebody else wrote that file; save again.")


def check_shapes(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Raise `CheckpointError` where code of a library has written a tensor of the model empty or in parts. Local.

    `shapes`: of the whole parameters, by full name. A library gives them names of its own, so a tensor is compared only
    where one parameter alone has the same last words; what it leaves out is its own decision, as under DDP.
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
    """Of the tensors in a safetensors file, or in a pickled state dict; nothing of any other pickled object."""
    if path.suffix == ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in SafetensorsFile(path).tensors().items()}
    try:
        state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # training arguments and the like
        return {}
    found = state.items() if isinstance(state, dict) else ()
    return {name: tuple(value.shape) for name, value in found if isinstance(value, torch.Tensor)}
