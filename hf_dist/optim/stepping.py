"""Decides what an optimizer must see to step a parameter: any interval of elements, or the whole tensor.

[Note: element-wise optimizers] The engine gives the optimizer 1-D fragments, cut where the ranks' shards end. An update
that reads the whole tensor (its shape, its norm, a sum over it) would silently give a different result on every number of
ranks, so such an optimizer gets whole tensors instead ([Note: owners]). An optimizer whose updates read several parameters is
refused. The decision is made here, once, before the first step: torch's own classes and a few others are known, the rest are
tried on small tensors in two ways, as a new object of the class (below) and as a copy of the user's (`observed.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, Problem
from hf_dist.log import warn
from hf_dist.optim.compressed import Compressed
from hf_dist.optim.muon import is_muon
from hf_dist.optim.observed import CannotObserve, Parts, as_fragments, as_wholes, one_process, stepped_as

__all__ = ["Sight", "Stepping", "check_whole", "like", "sight_of"]


_SUM = "sets its step size from a sum over all parameters"
_SENDS = "communicates by itself, between ranks that hold whole tensors"

# Names in lower case, without "_" and "8bit". They are checked before the probe, which some classes pass by chance: those that
# start like Adam and change later, or that treat a matrix as small as the probe's element-wise.
_WHOLE_TENSOR = frozenset(
    (
        *("adafactor", "adalomo", "came", "sm3", "adammini", "muon", "shampoo", "soap", "kron"),
        *("lamb", "fusedlamb", "nvlamb", "lars", "novograd", "fusednovograd", "stableadamw"),
    )
)
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("prodigy", "dadaptadam", "dadaptlion", "dadaptsgd", "dadaptadagrad"), _SUM),
    **dict.fromkeys(("distributedshampoo", "muonwithauxadam"), _SENDS),
    "lbfgs": "searches along a direction of all parameters at once",
    **dict.fromkeys(("lomo", "adalomo"), "updates parameters during the backward pass"),
    **dict.fromkeys(
        ("lorafaoptimizer", "riemannianpreconditionedoptimizer"), "updates lora_A or lora_B from the other one"
    ),
    "sparseadam": "takes sparse gradients, and those of the engine are dense",
    "grokadamw": "keeps tensors in its param groups, which no checkpoint would hold",
}
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"]
)
"""torch's own; a probe of them takes longer than the rest of what an engine does for its optimizer."""
_WHOLE_MODULES = ("galore_torch", "q_galore_torch", "apollo_torch")
"""Packages whose classes are named AdamW but project whole matrices."""


class Stepping(Enum):
    """What an optimizer must see."""

    FRAGMENTS = "fragments"
    """Any interval of a tensor is enough."""
    WHOLE = "whole tensors"
    """Each tensor in one piece and in its own shape."""
    MUON = "whole matrices"
    """Only the momentum of each matrix in one piece, to orthogonalise it."""


@dataclass(frozen=True)
class Sight:
    """What an optimizer sees in a step."""

    stepping: Stepping = Stepping.FRAGMENTS
    keeps_places: bool = False
    """Whether its groups keep parameters that this rank does not step, because their place in the group matters."""
    skips_missing: bool = False
    """Whether it is known to skip parameters without a gradient, so that nothing needs to be taken out of its groups."""


_SHAPE = (6, 4)
_NUM_STEPS = 3


class _CannotProbe(Exception):
    """The optimizer cannot be built or stepped outside the training run, so the probe gave no answer."""


def sight_of(optimizer: torch.optim.Optimizer) -> Sight:
    """What `optimizer` must see; see [Note: element-wise optimizers].

    Steps a second instance, built from the same options, on a matrix and on its flattened halves, each half alone as
    on its own rank, and copies of `optimizer` as two ranks would step it. Leaves `optimizer` and the random state unchanged.
    If neither can be done, whole tensors are assumed, with one warning per class. Local; call it on every rank before the first
    step.

    Raises:
        ConfigError: an update depends on other parameters, or the class is known to need data that no rank has.
    """
    cls = type(optimizer)
    if cls in _ELEMENTWISE:  # no subclass, which may do anything
        return Sight(skips_missing=True)
    if isinstance(optimizer, Compressed):  # what it needs of whole tensors, it adds up itself
        return Sight(skips_missing=True)
    if is_muon(optimizer):
        return Sight(Stepping.MUON)
    names = [base.__name__.lower().replace("_", "").replace("8bit", "") for base in cls.__mro__]
    for name in names:
        if name in _REFUSED:
            raise _refused(optimizer, _REFUSED[name])
    if any(n in _WHOLE_TENSOR for n in names) or _package(cls) in _WHOLE_MODULES or _keeps_blocks(optimizer):
        return Sight(Stepping.WHOLE)
    try:
        built: Stepping | None = _probed(optimizer)
    except _CannotProbe:
        built = None
    try:
        seen = _observed(optimizer)
    except CannotObserve as error:
        if built is None:
            _warn_once(f"{cls.__module__}.{cls.__qualname__}", str(error))
        return Sight(built or Stepping.WHOLE)
    return replace(seen, stepping=Stepping.WHOLE) if built is Stepping.WHOLE else seen


def _observed(optimizer: torch.optim.Optimizer) -> Sight:
    """What a copy of `optimizer` must see to step as in one process. Raises `ConfigError` if two ranks cannot."""
    wanted = stepped_as(optimizer, one_process)
    if not all(torch.isfinite(values).all() for values in wanted.values()):
        raise CannotObserve("its weights do not stay finite")
    start = stepped_as(optimizer, one_process, steps=0)
    if all(torch.equal(values, start[n]) for n, values in wanted.items()):
        raise CannotObserve("it moved no weight")
    ways: list[tuple[Stepping, Callable[[int], Parts], bool]] = [
        (stepping, ranks, keeps)
        for stepping, ranks in ((Stepping.FRAGMENTS, as_fragments), (Stepping.WHOLE, as_wholes))
        for keeps in (False, True)
    ]
    for stepping, ranks, keeps in ways:
        try:
            both = [stepped_as(optimizer, ranks(rank), keeps_places=keeps) for rank in range(2)]
        except CannotObserve:
            continue
        joined = {n: torch.cat([own[n] for own in both]) for n in wanted}
        if all(_alike(values, joined[n], start[n]) for n, values in wanted.items() if joined[n].numel()):  # else frozen
            return Sight(stepping, keeps)
    raise _refused(optimizer, "updates a parameter from the values of others")


def check_whole(stepping: Stepping, optimizer: torch.optim.Optimizer, config: DistConfig) -> None:
    """Raise `ConfigError` if the config would give parts of tensors to an optimizer that must see whole ones. Local."""
    if stepping is Stepping.FRAGMENTS:
        return
    found = f"{type(optimizer).__name__} of {_package(type(optimizer))}"
    needs = f"is not available with {found}, which must see {stepping.value}"
    offload = config.zero_optimization.offload_optimizer
    device = offload.device if offload is not None else "none"
    if device == "nvme" or (device == "cpu" and stepping is Stepping.WHOLE):
        other = 'Set it to "none", or use an element-wise optimizer such as "AdamW".'
        raise ConfigError(Problem("zero_optimization.offload_optimizer.device", f'"{device}"', needs, other))
    for key in ("bf16_optimizer_states", "bf16_master_weights_and_grads"):
        if getattr(config.bf16, key):
            fix = 'Set it to false, or use an element-wise optimizer such as "AdamW".'
            raise ConfigError(Problem(f"bf16.{key}", "true", needs, fix))
    if config.hf_dist.optimizer_in_backward:
        fix = 'Remove the key, or use an element-wise optimizer such as "AdamW".'
        raise ConfigError(Problem("hf_dist.optimizer_in_backward", "true", needs, fix))


def _refused(optimizer: torch.optim.Optimizer, reason: str) -> ConfigError:
    cls = type(optimizer)
    fix = 'Use an optimizer that steps each parameter by itself, such as "AdamW".'
    return ConfigError(Problem("optimizer", f"{cls.__name__} of {_package(cls)}", reason, fix))


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _keeps_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether states have fewer than 16 bits: bitsandbytes has an argument for it; torchao's classes always do."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    return bits == 8 or any(hasattr(base, "_subclass_zeros") for base in type(optimizer).__mro__)


def _probed(optimizer: torch.optim.Optimizer) -> Stepping:
    """What the class of `optimizer` must see, with the options of any of its param groups."""
    distinct = {repr(sorted(options.items(), key=lambda item: item[0])): options for options in _options(optimizer)}
    found = Stepping.FRAGMENTS
    for options in distinct.values():
        if not _is_elementwise(type(optimizer), optimizer.defaults, options):
            found = Stepping.WHOLE
            if not _is_by_itself(type(optimizer), optimizer.defaults, options):
                raise _refused(optimizer, "updates a parameter from the values of others")
    return found


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """The options of each param group, with a learning rate whose effect the probe can see."""
    # Warm-up may have set lr to 0 by now, and the effect of a tiny lr drowns in fp32 rounding. Other keys are kept, even a
    # scheduler's: unknown keys in a group do no harm.
    groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
    return [{**group, **_usable(group)} for group in groups]


def _usable(options: Mapping[str, object]) -> dict[str, object]:
    """Replacements for options that would hide updates from the probe or stop it on CPU."""
    usable: dict[str, object] = {}
    if isinstance(options.get("lr"), (int, float, torch.Tensor)):  # None: the class derives it
        usable["lr"] = 1.0
    if options.get("capturable"):
        usable["capturable"] = False  # works on accelerators only
    return usable


def _is_elementwise(cls: type, defaults: Mapping[str, object], options: Mapping[str, object]) -> bool:
    """Whether stepping a matrix gives the same result as stepping its flattened halves separately."""
    start, gradients = _toy()
    arguments = _constructor_arguments(cls, defaults)
    try:
        (whole,) = _run(cls, arguments, options, [start], [gradients])
    except Exception as error:  # any failure of third-party code means that the probe has no answer
        raise _CannotProbe(f"{type(error).__name__}: {error}") from error
    fragments = zip(start.flatten().chunk(2), gradients.flatten(1).chunk(2, dim=1), strict=True)
    try:
        halves = torch.cat([_run(cls, arguments, options, [half], [grads])[0] for half, grads in fragments])
    except Exception:  # the matrix with the same values was just accepted
        return False
    if not (torch.isfinite(whole).all() and (whole - start).abs().max() > 0):
        raise _CannotProbe("it did not move the parameters of the probe")
    return _alike(whole.flatten(), halves, start.flatten())


def _is_by_itself(cls: type, defaults: Mapping[str, object], options: Mapping[str, object]) -> bool:
    """Whether one optimizer steps two matrices as two separate optimizers would."""
    start, gradients = _toy()
    arguments = _constructor_arguments(cls, defaults)
    starts, grads = [start, start.flip(0) * 3.0], [gradients, gradients.flip(1) * 0.25]
    together = _run(cls, arguments, options, starts, grads)
    apart = [_run(cls, arguments, options, [s], [g])[0] for s, g in zip(starts, grads, strict=True)]
    return all(_alike(a, b, s) for a, b, s in zip(together, apart, starts, strict=True))


def _alike(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> bool:
    # Tolerates the rounding of kernels that treat the end of a tensor separately; a whole-tensor update differs far more.
    return torch.allclose(one, other, rtol=1e-4, atol=1e-3 * float((one - start).abs().max()))


def _constructor_arguments(cls: type, defaults: Mapping[str, object]) -> dict[str, object]:
    """The defaults that the constructor accepts: torch's AdamW, for example, records more than it accepts."""
    try:
        names = set(inspect.signature(cls).parameters)
    except ValueError as error:
        raise _CannotProbe(str(error)) from error
    return {k: v for k, v in {**defaults, **_usable(defaults)}.items() if k in names}


def _run(
    cls: type,
    arguments: Mapping[str, object],
    options: Mapping[str, object],
    starts: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],  # of each one per step along dim 0
) -> list[torch.Tensor]:
    """`starts` after a new optimizer has stepped once with each of their gradients."""
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # so that a random update draws the same numbers in each run
        optimizer = _made(cls, arguments, options, parameters)
        for step in range(_NUM_STEPS):
            for parameter, grads in zip(parameters, gradients, strict=True):
                parameter.grad = grads[step].clone()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _made(
    cls: type, arguments: Mapping[str, object], options: Mapping[str, object], parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = cls([{"params": parameters, **options}], **arguments)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # type: ignore[attr-defined]  # schedule-free optimizers need it before a step
    return optimizer


def like(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], options: Mapping[str, object]
) -> torch.optim.Optimizer:
    """A second optimizer of the same class over `parameters`, with one param group of `options`, ready to step. Local.

    Raises any error of the class.
    """
    cls = type(optimizer)
    made = _made(cls, _constructor_arguments(cls, optimizer.defaults), {**options, **_usable(options)}, parameters)
    if hasattr(optimizer, "args"):  # bitsandbytes: includes the size from which on states have 8 bits
        made.args = optimizer.args  # type: ignore[attr-defined]
    return made


def _toy() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (6, 4) and its gradients (3, 6, 4), without symmetries that a whole-tensor update could hide in."""
    numel = _SHAPE[0] * _SHAPE[1]
    index = torch.arange(numel, dtype=torch.float32, device="cpu")
    start = torch.cos(1.7 * index + 0.3).reshape(_SHAPE)
    # The halves grow at different rates from step to step, so an update that is clipped or normalized by a root mean
    # square over the tensor differs between the matrix and each half.
    growth = torch.where(index < numel // 2, 3.0, 10.0).to(index)
    gradients = [torch.sin((0.7 + 0.3 * step) * index + step + 0.5) * growth**step for step in range(_NUM_STEPS)]
    return start, torch.stack(gradients).reshape(_NUM_STEPS, *_SHAPE)


@functools.cache
def _warn_once(name: str, cause: str) -> None:
    warn(
        f"cannot tell what {name} does with a part of a tensor ({cause}): each tensor is stepped whole by one rank, which "
        "costs time"
    )


def state_names(optimizer: torch.optim.Optimizer) -> frozenset[str] | None:
    """What the class keeps for a matrix after its first steps, such as `exp_avg`; None if only it knows. Local."""
    start, gradients = _toy()
    try:
        made = like(optimizer, [torch.nn.Parameter(start.clone())], _options(optimizer)[0])
        parameter = made.param_groups[0]["params"][0]
        for grads in gradients:
            parameter.grad = grads.clone()
            made.step()
        return frozenset(made.state[parameter])
    except Exception:  # third-party code
        return None
