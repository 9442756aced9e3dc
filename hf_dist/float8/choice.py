"""Which linear layers and stacks of experts compute in eight bits, and why the others do not.

Left alone: the first and the last layer (as accelerate's torchao recipe does), layers whose weight other code reads past their
forward, layers whose sizes are no multiple of 16 (cuBLAS takes no others; of 32 in MXFP8), adapters' own matrices, routers of
experts, frozen packed layers, stacks of experts that have no such product, and what `skip` names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hf_dist.float8.direct_reads import direct_reads
from hf_dist.float8.linear import is_linear
from hf_dist.float8.stacks import matrices_of, why_plain

__all__ = ["MULTIPLE", "Choice", "Kernels", "choose", "named"]

MULTIPLE = 16
"""Of both sizes of a matrix, for cuBLAS."""
_ROUTERS = ("router", "gate")
"""Last words of the names of layers whose outputs are experts."""


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a recipe take."""

    name: str = "float8"
    """In reports."""
    multiple: int = MULTIPLE
    """Of both sizes of a matrix."""
    transposed: bool = True
    """Whether weights may be (in, out)."""
    no_stacks: str = ""
    """Why stacks of experts stay as they are; empty: they multiply."""


@dataclass(frozen=True)
class Choice:
    """The layers of one model, or of this rank's share of it."""

    chosen: Mapping[str, nn.Module]
    """Path -> layer."""
    left: Mapping[str, Sequence[str]]
    """Reason -> paths of layers that stay as they are."""
    stacks: Mapping[str, nn.Module] = field(default_factory=dict)
    """Path -> module of stacked experts."""
    kernels: Kernels = Kernels()

    def of_slices(self) -> Choice:
        """The same after layers were cut: without those whose slices have sizes that the kernels do not take."""
        odd = [path for path, layer in (*self.chosen.items(), *self.stacks.items()) if _odd(layer, self.kernels)]
        chosen, stacks = ({p: m for p, m in part.items() if p not in odd} for part in (self.chosen, self.stacks))
        left = {**self.left, "whose slices have such sizes": odd} if odd else self.left
        return Choice(chosen, left, stacks, self.kernels)

    @property
    def weights(self) -> frozenset[str]:
        """Full names of the weights that multiply in eight bits."""
        stacked = (f"{path}.{name}" for path, module in self.stacks.items() for name in matrices_of(module))
        return frozenset(f"{path}.weight" for path in self.chosen).union(stacked)

    def rows(self) -> list[str]:
        """Lines for the start-up report."""
        kept = [f"{len(paths)} {reason}" for reason, paths in self.left.items() if paths]
        stacks = f"{len(self.stacks)} modules of experts multiply in {self.kernels.name}, with scales of rows"
        return [
            f"{len(self.chosen)} linear layers multiply in {self.kernels.name}",
            *([stacks] if self.stacks else []),
            *([f"left alone: {', '.join(kept)}"] if kept else []),
        ]


def choose(
    model: nn.Module, *, experts: Collection[int] = (), skip: Collection[str] = (), kernels: Kernels | None = None
) -> Choice:
    """Divide the linear layers and stacked experts of a whole model. Local.

    `experts`: numbers of experts of its mixtures; `skip`: names of layers or of modules around layers (`named`); `kernels`: of
    the recipe, default those of float8.
    """
    kernels = kernels or Kernels()
    ends, read = _ends_of(model), direct_reads(model)
    chosen: dict[str, nn.Module] = {}
    stacks: dict[str, nn.Module] = {}
    left: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if _is_matrix(module):
            reason = "whose weight other code reads" if path in read else _reason(path, module, ends, experts, skip)
            found, reason = chosen, reason or _misfit(module, kernels)
        elif matrices_of(module):
            found, reason = stacks, _reason_of_stacks(path, module, skip, kernels)
        else:
            continue
        if reason is None:
            found[path] = module
        else:
            left.setdefault(reason, []).append(path)
    return Choice(chosen, left, stacks, kernels)


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
    return None


def _misfit(layer: nn.Module, kernels: Kernels) -> str | None:
    if not (kernels.transposed or isinstance(layer, nn.Linear)):
        return f"with weights of (in, out), which {kernels.name} does not take"
    return f"with sizes that are no multiple of {kernels.multiple}" if _odd(layer, kernels) else None


def _reason_of_stacks(path: str, module: nn.Module, skip: Collection[str], kernels: Kernels) -> str | None:
    if any(named(path, one) for one in skip):
        return "named in skip"
    why = kernels.no_stacks or why_plain(module)
    if why is None and _odd(module, kernels):
        why = f"with sizes that are no multiple of {kernels.multiple}"
    return f"stacks of experts {why}" if why else None


def _odd(layer: nn.Module, kernels: Kernels) -> bool:
    weight = getattr(layer, "weight", None)  # a stage has no parameters of another one's layers
    weights = matrices_of(layer).values() or [p for p in (weight,) if isinstance(p, nn.Parameter)]
    return any(size % kernels.multiple for p in weights for size in p.shape[-2:])


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_linear(module)


def _is_adapter(path: str) -> bool:
    return any(part.startswith("lora_") for part in path.split("."))
