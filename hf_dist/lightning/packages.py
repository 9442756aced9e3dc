"""Lightning under its two names, `lightning` and `pytorch_lightning`, whose classes are unrelated."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from hf_dist.errors import ModelError

__all__ = ["imported_package", "joined", "module_of"]

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def imported_package() -> str:
    """The package whose Trainer the script has imported."""
    return next((name for name in _NAMES if name in sys.modules), _NAMES[0])


@functools.cache
def joined(own: Any, package: str) -> Any:
    """The class `own`, derived also from the class of `package` that `own.lightning_base` names.

    Raises `ModelError` if Lightning no longer calls the methods that `own` overrides: it would train without the engine.
    """
    package = _NAMES[0] if package == "lightning" else package
    module, _, name = own.lightning_base.rpartition(".")
    base = getattr(importlib.import_module(f"{package}.{module}"), name)
    if issubclass(own, base):
        return own
    overridden = {key for kind in own.__mro__[:-1] for key in vars(kind) if not key.startswith("_")}
    lost = sorted(key for key in overridden - _OF_OURS if not hasattr(base, key))
    if lost:
        version = importlib.import_module(package).__version__
        raise ModelError(
            f"{package} {version}: {name} has no {', '.join(lost)} any more, which hf_dist overrides. Install a version that "
            "it was written for: pip install 'lightning>=2.5,<2.7'"
        )
    return type(own.__name__, (own, base), {"_package": package, "__module__": own.__module__, "__doc__": own.__doc__})


_OF_OURS = {"lightning_base", "strategy_name"}


def module_of(joint: Any, name: str) -> Any:
    """Module `name` of the package beneath a joint class."""
    return importlib.import_module(f"{joint._package}.{name}")
