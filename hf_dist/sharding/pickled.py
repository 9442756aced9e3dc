"""What `torch.save(model)`, `pickle` and `copy.deepcopy` make of a prepared model: an ordinary one, as after `unprepare`.

Each module and parameter gets a `__reduce_ex__` of its own, which pickle and deepcopy ask for before that of the class. A
module answers with a twin that lacks our hooks, methods and classes; a parameter with one that has elements of its own.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.guard import make_readable
from hf_dist.sharding.prepared import OWNER, own_class, raw_data
from hf_dist.sharding.single_rank_gather import gathers_alone
from hf_dist.sharding.undo_log import Traces

__all__ = ["copied_as_prepared", "copied_without_weights", "forget_copies", "make_copies_ordinary"]

ShardedModel = Any
"""The class in `runtime.py`; importing it here would be circular."""
_REDUCE = "__reduce_ex__"
_PREPARED, _ORDINARY = "as prepared", "ordinary"
_structure: ContextVar[str] = ContextVar("_structure", default="")


def copied_as_prepared() -> AbstractContextManager[None]:
    """Inside, `copy.deepcopy` keeps what preparing has changed in modules: for the planner, which runs such a copy on meta.

    The parameters have to be in deepcopy's `memo`. Local.
    """
    return _copied(_PREPARED)


def copied_without_weights() -> AbstractContextManager[None]:
    """Inside, `copy.deepcopy` makes an ordinary model wherever the weights are, which have to be in its `memo`. Local."""
    return _copied(_ORDINARY)


@contextmanager
def _copied(how: str) -> Iterator[None]:
    token = _structure.set(how)
    try:
        yield
    finally:
        _structure.reset(token)


def make_copies_ordinary(model: nn.Module, sharded: ShardedModel, traces: Traces) -> None:
    """Make pickles and copies of `model`, and of each of its modules, ordinary ones. Local.

    Pickling raises `ModelError` where this rank does not have all weights in memory.
    """
    for module in model.modules():
        module.__dict__[_REDUCE] = _Module(module, sharded, traces)
    trained = traces.trained_before()
    for param in model.parameters():
        if hasattr(param, OWNER):
            param.__dict__[_REDUCE] = _Parameter(param, trained.get(id(param)))


def forget_copies(param: nn.Parameter) -> None:
    """Leave pickling of `param` to its class again. Local."""
    param.__dict__.pop(_REDUCE, None)


class _Module:
    def __init__(self, module: nn.Module, sharded: ShardedModel, traces: Traces) -> None:
        self._module = weakref.ref(module)
        self._sharded = weakref.ref(sharded)
        self._traces = traces

    def __call__(self, protocol: Any) -> object:
        module = self._module()
        assert module is not None
        if _structure.get() == _PREPARED:
            twin: nn.Module = object.__new__(type(module))
            twin.__dict__.update({key: value for key, value in module.__dict__.items() if key != _REDUCE})
            return twin.__reduce_ex__(protocol)
        sharded = self._sharded()
        if sharded is not None and _structure.get() != _ORDINARY:
            _check_whole(module, sharded)
        ordinary = self._traces.ordinary_twin(module)
        reduced: Any = ordinary.__reduce_ex__(protocol)
        if type(ordinary) is type(module) or isinstance(reduced, str):
            return reduced
        # pickle refuses `__newobj__` of another class than that of the object it was asked for.
        return (copyreg._reconstructor, (type(ordinary), object, None), *reduced[2:])  # type: ignore[attr-defined]


class _Parameter:
    def __init__(self, param: nn.Parameter, trained: bool | None) -> None:
        self._param = weakref.ref(param)
        self._trained = trained
        """Whether it was trained before an evaluation froze it; None where nothing changed that."""

    def __call__(self, protocol: object) -> object:
        param = self._param()
        assert param is not None
        make_readable(param)
        with torch._C.DisableTorchFunctionSubclass():
            trained = param.requires_grad if self._trained is None else self._trained
            twin = nn.Parameter(raw_data(param).clone(), requires_grad=trained)  # else a file has the whole flat buffer
        twin.__class__ = own_class(type(param))
        twin.__dict__.update({k: v for k, v in param.__dict__.items() if not k.startswith("_hf_dist") and k != _REDUCE})
        return twin.__reduce_ex__(protocol)


def _check_whole(module: nn.Module, sharded: ShardedModel) -> None:
    params = {id(param) for param in module.parameters()}
    if not params:
        return
    cut = sharded.pipeline is not None or any(not s.held.everything for g in sharded.groups for s in g.layout.slots)
    own = [g for g in sharded.groups if any(id(p) in params for p in g.params)]
    freed = [g for g in own if not (g.full.is_current or g.is_replicated or gathers_alone(g))]
    if not cut and not freed:
        return
    instead = "Call hf_dist.unprepare(model) on every rank first; this makes it an ordinary model with all weights"
    if not cut:
        instead = (
            "Do it inside `with hf_dist.gathered(model):`, which every rank enters; rank 0 alone may write the file"
        )
    raise ModelError(
        f"{type(module).__name__} cannot be pickled or copied here (torch.save(model), pickle, copy.deepcopy): this rank has "
        f"only a part of its weights in memory. {instead}. A folder that from_pretrained reads needs neither: "
        "model.save_pretrained(folder), on every rank."
    )
