"""Which linear layers compute in eight bits, and why the others do not.

Left alone: the first and the last layer (as accelerate's torchao recipe does), layers whose weight other code reads past their
forward, layers whose sizes are no multiple of 16 (cuBLAS takes no others), adapters' own matrices, routers of experts, frozen
packed layers, and those that `skip` names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_dist.float8.direct_reads import direct_reads
from hf_dist.float8.linear import is_linear

__all__ = ["MULTIPLE", "Choice", "choose", "named"]

MULTIPLE = 16
"""Of both sizes of a matrix, for cuBLAS."""
_ROUTERS = ("router", "gate")
"""Last words of the names of layers whose outputs are experts."""


@dataclass(frozen=True)
class Choice:
    """The layers of one model, or of this rank's share of it."""

    chosen: Mapping[str, nn.Module]
    """Path -> layer."""
    left: Mapping[str, Sequence[str]]
    """Reason -> paths of layers that stay as they are."""

    def of_slices(self) -> Choice:
        """The same after layers were cut: without those whose slices have sizes that cuBLAS does not take."""
        fits = {path: layer for path, layer in self.chosen.items() if not _odd(layer)}
        cut = [path for path in self.chosen if path not in fits]
        return Choice(fits, {**self.left, "whose slices have such sizes": cut} if cut else self.left)

    @property
    def weights(self) -> frozenset[str]:
        """Full names of the layers' weights."""
        return frozenset(f"{path}.weight" for path in self.chosen)

    def rows(self) -> list[str]:
        """Lines for the start-up report."""
        kept = [f"{len(paths)} {reason}" for reason, paths in self.left.items() if paths]
        return [
            f"{len(self.chosen)} linear layers multiply in float8",
            *([f"left alone: {', '.join(kept)}"] if kept else []),
        ]


def choose(model: nn.Module, *, experts: Collection[int] = (), skip: Collection[str] = ()) -> Choice:
    """Divide the linear layers of a whole model. Local.

    `experts`: numbers of experts of its mixtures; `skip`: names of layers or of modules around layers (`named`).
    """
    ends, read = _ends_of(model), direct_reads(model)
    chosen: dict[str, nn.Module] = {}
    left: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if _is_matrix(module):
            reason = "whose weight other code reads" if path in read else _reason(path, module, ends, experts, skip)
            if reason is None:
                chosen[path] = module
            else:
                left.setdefault(reason, []).append(path)
        elif _is_stacked(module):
            left.setdefault("stacked experts", []).append(path)
    return Choice(chosen, left)


def named(path: str, name: str) -> bool:
    """Whether `name` is the path, or whole words of it: of a module or of one around it."""
    return f".{name}." in f".{path}."


def _ends_of(model: nn.Module) -> tuple[str, str]:
    """Paths of the first and the last linear layer of a whole model; empty without any. Adapters' matrices do not count."""
    paths = [path for path, module in model.named_modules() if _is_matrix(module) and not _is_adapter(path)]
    return (paths[0], paths[-1]) if paths else ("", "")


def _reason(
    path: str, layer: nn.Module, ends: tuple[str, str], experts: Collection[int], skip: Collection[str]
) -> str | None:
    name = path.rsplit(".", 1)[-1]
    if any(named(path, one) for one in skip):
        return "named in skip"
    if _is_adapter(path):
        return "of adapters"
    if path in ends:
        return "first and last"
    if not is_linear(layer):
        return "with a forward of their own"
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    if not weight.is_floating_point() or weight.dim() != 2:
        return "packed"
    if experts and any(word in name for word in _ROUTERS) and weight.shape[0] in (1, *experts):
        return "routers"
    if _odd(layer):
        return f"with sizes that are no multiple of {MULTIPLE}"
    return None


def _odd(layer: nn.Module) -> bool:
    return any(size % MULTIPLE for p in (layer.weight,) if isinstance(p, nn.Parameter) for size in p.shape)


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_linear(module)


def _is_adapter(path: str) -> bool:
    return any(part.startswith("lora_") for part in path.split("."))


def _is_stacked(module: nn.Module) -> bool:
    return any(p is not None and p.dim() == 3 and p.is_floating_point() for p in module._parameters.values())
