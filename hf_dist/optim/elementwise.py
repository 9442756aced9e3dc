"""Whether an optimizer may be stepped on fragments: does each element's update depend on that element alone?

[Note: element-wise optimizers] The engine gives the optimizer 1-D fragments, cut where the ranks' shards end. An update
that reads the whole tensor (its shape, its norm, a sum over it) would come out different on every number of ranks
without an error. That is decided here, once, before the first step.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hf_dist.errors import ConfigError, Problem

__all__ = ["check_elementwise"]

logger = logging.getLogger(__name__)

_FACTORED = "keeps row and column statistics of the whole matrix"
_MATRIX = "works on the whole matrix"
_NORM = "scales the update by a norm of the whole tensor"
_SUM = "sets its step size from a sum over all parameters"

# Names in lower case, without "_" and "8bit". They come before the probe, which some pass by chance: those that begin
# like Adam and change later, or treat a matrix as small as the probe's element by element.
_WHOLE_TENSOR: dict[str, str] = {
    **dict.fromkeys(("adafactor", "adalomo", "came", "sm3", "adammini", "galoreadafactor"), _FACTORED),
    **dict.fromkeys(
        ("muon", "muonwithauxadam", "shampoo", "distributedshampoo", "soap", "kron", "galoreadamw"), _MATRIX
    ),
    **dict.fromkeys(("apolloadamw", "qapolloadamw", "qgaloreadamw"), _MATRIX),
    **dict.fromkeys(("lamb", "fusedlamb", "nvlamb", "lars", "novograd", "fusednovograd", "stableadamw"), _NORM),
    **dict.fromkeys(("prodigy", "dadaptadam", "dadaptlion", "dadaptsgd", "dadaptadagrad"), _SUM),
    "lbfgs": "searches along a direction of all parameters at once",
    "lomo": "updates parameters during the backward pass",
    "sparseadam": "takes sparse gradients, and a fragment's is dense",
}

_SHAPE = (6, 4)
_NUM_STEPS = 3


class _CannotProbe(Exception):
    """The optimizer cannot be built or stepped outside the training run, so nothing was learned."""


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Return if `optimizer` may be stepped on fragments of tensors; see [Note: element-wise optimizers].

    Steps a second instance, built from the same options, on a matrix and on its flattened halves, each half alone as
    on its own rank. `optimizer` and the random state are left as they are. An optimizer that cannot be built a second
    time passes with one warning per class. Call it on every rank before the first step; it does not communicate.

    Raises:
        ConfigError: the update of an element depends on other elements.
    """
    cls = type(optimizer)
    reason = _known_reason(cls)
    if reason is None:
        try:
            reason = _probed_reason(optimizer)
        except _CannotProbe as error:
            _warn_once(f"{cls.__module__}.{cls.__qualname__}", str(error))
    if reason is not None:
        fix = 'Use an element-wise optimizer such as "AdamW".'
        raise ConfigError(Problem("optimizer", cls.__name__, f"{reason}, but a rank holds only fragments of it", fix))


def _known_reason(cls: type) -> str | None:
    """Why a class known by its own name or that of a base is not element-wise."""
    names = (base.__name__.lower().replace("_", "").replace("8bit", "") for base in cls.__mro__)
    return next((_WHOLE_TENSOR[name] for name in names if name in _WHOLE_TENSOR), None)


def _probed_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the class of `optimizer` is not element-wise, under the options of any of its param groups."""
    distinct = {repr(sorted(options.items(), key=lambda item: item[0])): options for options in _options(optimizer)}
    for options in distinct.values():
        if (reason := _compare(type(optimizer), optimizer.defaults, options)) is not None:
            return reason
    return None


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each param group, with a learning rate that the probe can see the effect of."""
    # Warm-up may have put lr at 0 by now, and a tiny lr drowns in fp32 rounding. A scheduler's own keys are dropped,
    # except what the optimizer may read: unknown keys in a group do no harm.
    groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
    return [{**group, **_usable(group)} for group in groups]


def _usable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replacements for the options that would blind or stop a probe on CPU."""
    usable: dict[str, Any] = {}
    if isinstance(options.get("lr"), (int, float, torch.Tensor)):  # None: the class derives it
        usable["lr"] = 1.0
    if options.get("capturable"):
        usable["capturable"] = False  # for accelerators only
    return usable


def _compare(cls: type, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    start, gradients = _toy()
    arguments = _constructor_arguments(cls, defaults)
    try:
        whole = _run(cls, arguments, options, start, gradients).flatten()
    except Exception as error:  # any failure of foreign code means the same: nothing learned
        raise _CannotProbe(f"{type(error).__name__}: {error}") from error
    fragments = zip(start.flatten().chunk(2), gradients.flatten(1).chunk(2, dim=1), strict=True)
    try:
        halves = torch.cat([_run(cls, arguments, options, half, half_grads) for half, half_grads in fragments])
    except Exception as error:  # it just took the same values as a matrix
        return f"cannot step a 1-D tensor ({type(error).__name__}: {error})"
    moved = (whole - start.flatten()).abs().max()
    if not (torch.isfinite(whole).all() and moved > 0):
        raise _CannotProbe("it did not move the parameters of the probe")
    # Room for the rounding of kernels that handle the end of a tensor apart; a whole-tensor update is off by far more.
    same = torch.allclose(whole, halves, rtol=1e-4, atol=1e-3 * float(moved))
    return None if same else "updates an element by the values of others"


def _constructor_arguments(cls: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that the constructor takes: torch's AdamW, for one, records more than it accepts."""
    try:
        names = set(inspect.signature(cls).parameters)
    except ValueError as error:
        raise _CannotProbe(str(error)) from error
    return {k: v for k, v in {**defaults, **_usable(defaults)}.items() if k in names}


def _run(
    cls: type,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    start: torch.Tensor,
    gradients: torch.Tensor,  # one per step along dim 0
) -> torch.Tensor:
    """`start` after one step of a fresh optimizer for each of `gradients`."""
    parameter = torch.nn.Parameter(start.clone())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # an update that draws random numbers draws the same ones in each run
        optimizer = cls([{"params": [parameter], **options}], **arguments)
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # schedule-free optimizers refuse to step before
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    return parameter.detach()


def _toy() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (6, 4) and its gradients (3, 6, 4), without symmetries that a whole-tensor update could hide in."""
    numel = _SHAPE[0] * _SHAPE[1]
    index = torch.arange(numel, dtype=torch.float32, device="cpu")
    start = torch.cos(1.7 * index + 0.3).reshape(_SHAPE)
    # The halves grow at different rates from step to step: an update that is clipped or normalized by a root mean
    # square over the tensor is then clipped differently in the matrix and in each half.
    growth = torch.where(index < numel // 2, 3.0, 10.0).to(index)
    gradients = [torch.sin((0.7 + 0.3 * step) * index + step + 0.5) * growth**step for step in range(_NUM_STEPS)]
    return start, torch.stack(gradients).reshape(_NUM_STEPS, *_SHAPE)


@functools.cache
def _warn_once(name: str, cause: str) -> None:
    logger.warning(
        "cannot tell whether %s is element-wise (%s): if an update depends on a whole tensor, results are wrong",
        name,
        cause,
    )
