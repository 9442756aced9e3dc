"""The guard: a parameter whose elements are not in memory answers metadata and raises, by name, for everything else.

Without the guard, reading such a parameter (`p.norm()`, `p + 1`, even `repr`) ends in a segmentation fault or in garbage. The
guard is a subclass assigned to `__class__`, so object, `isinstance`, name, shape and dtype stay. It costs nothing while the
parameter is gathered, because the class is then the original one.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_dist.errors import FreedParameterError, ModelError
from hf_dist.sharding.prepared import OWNER

LAZY = "_hf_dist_lazy"
"""Attribute of a parameter that is still in a file (`lazy.py`) and is filled at the first read."""


class GuardedOwner(Protocol):
    """What the guard calls when a guarded tensor is read."""

    @property
    def is_replicated(self) -> bool:
        """Whether all elements stay in memory between uses."""

    def make_readable(self, name: str) -> None:
        """Return when the elements are in memory, or raise `FreedParameterError` naming the parameter and the fix."""


# What a tensor answers without its elements: attributes (read), attributes (written), methods.
_READS = """shape dtype device requires_grad grad grad_fn is_leaf ndim layout is_cuda is_cpu is_meta is_sparse is_quantized
is_mps is_xpu is_nested itemsize nbytes output_nr retains_grad names volatile grad_dtype _backward_hooks
_post_accumulate_grad_hooks _version is_mkldnn is_sparse_csr"""
_WRITES = "requires_grad grad _backward_hooks _post_accumulate_grad_hooks grad_dtype"
_METHODS = """numel size dim stride is_floating_point is_complex is_contiguous element_size storage_offset requires_grad_
register_hook register_post_accumulate_grad_hook is_same_size get_device __len__ __hash__ nelement is_inference is_signed
is_pinned is_shared new_zeros new_ones new_empty new_full __dir__"""
# Functions that make a tensor of the same shape (Adagrad's constructor does).
_FACTORIES = "zeros_like ones_like full_like empty_like rand_like randn_like"


def _metadata() -> frozenset[object]:
    # The last one checks whether two tensors have compatible types, as `module.to` does.
    found: set[object] = {
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch._has_compatible_shallow_copy_type,
    }
    for name in _READS.split():
        descriptor: Any = getattr(torch.Tensor, name, None)
        if hasattr(descriptor, "__get__"):
            found.add(descriptor.__get__)
    for name in _WRITES.split():
        descriptor = getattr(torch.Tensor, name, None)
        if hasattr(descriptor, "__set__"):
            found.add(descriptor.__set__)
    found.add(torch.Tensor.grad.__delete__)  # type: ignore[union-attr]
    found.update(getattr(torch, name) for name in _FACTORIES.split())
    return frozenset(found | {getattr(torch.Tensor, name) for name in _METHODS.split()})


_METADATA = _metadata()
_EQUAL = (torch.equal, torch.Tensor.equal)
_ASSIGN: object = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a new object at each access, so never `is`
_ALIASES = (torch.Tensor.data.__get__, torch.Tensor.detach, torch.detach)  # type: ignore[attr-defined]


class _Guard:
    """The behaviour that `guarded_class` mixes into the class of a parameter."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # `repr` of a module with a ParameterDict
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if func is torch.Tensor.__repr__:
            tensor = args[0]
            return f"<parameter {_name(tensor)} not in memory, shape {tuple(tensor.shape)}, {tensor.dtype}>"
        if func is torch.Tensor.to and _changes_nothing(*args, **kwargs):
            return args[0]
        if func == _ASSIGN:
            if args[0] is args[1]:
                return None  # `module.to(...)` does this if `to` changed nothing
            release(args[0])  # a lazy parameter gets new elements: its own need not be read
        if func in _EQUAL and all(hasattr(t, LAZY) for t in args[:2]):  # HF compares tied weights, both in files
            return getattr(args[0], LAZY).equal(getattr(args[1], LAZY))
        if func in _ALIASES and not _is_replicated(args[0]):
            return _guarded_alias(args[0], func)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, _Guard):
                _make_readable(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # Reading may have restored the object's own class, whose method then applies.
    def __reduce_ex__(self, protocol: object) -> Any:
        make_readable(self)  # type: ignore[arg-type]
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if hasattr(self, LAZY) and isinstance(self, nn.Parameter):
            memo[id(self)] = getattr(self, LAZY).parameter(requires_grad=self.requires_grad)  # as lazy as the original
            return memo[id(self)]
        _make_readable(self)
        return super().__deepcopy__(memo) if isinstance(self, _Guard) else copy.deepcopy(self, memo)  # type: ignore[misc]


def guarded_class(cls: type) -> type:
    """The guarded subclass of a parameter class; one per class, so that `__class__` can switch back and forth."""
    return _twin(cls)


@functools.cache
def _twin(cls: type) -> type:
    return type(cls)(
        cls.__name__, (_Guard, cls), {"__slots__": (), "__module__": cls.__module__, "_hf_dist_plain": cls}
    )


def guard(param: torch.Tensor) -> None:
    """Refuse reads of `param`, or of an alias of it, from now on. Call `set_owner` first. Local."""
    if not isinstance(param, _Guard):
        param.__class__ = _twin(type(param))


def unguard(param: torch.Tensor) -> None:
    """Restore the original class of `param`; a no-op for an unguarded tensor. Local."""
    if isinstance(param, _Guard):
        param.__class__ = type(param)._hf_dist_plain  # type: ignore[attr-defined]


def is_guarded(param: torch.Tensor) -> bool:
    """Whether reads of `param` are refused, or wait for its owner. Local."""
    return isinstance(param, _Guard)


def is_left(param: torch.Tensor, owner: GuardedOwner) -> bool:
    """Whether `param` is guarded and has no owner but `owner`, which is being dropped. Local."""
    return is_guarded(param) and not hasattr(param, LAZY) and getattr(param, OWNER)[0]() in (None, owner)


def make_readable(tensor: torch.Tensor) -> None:
    """Return with the elements of a parameter in memory, or raise `FreedParameterError`; a no-op if unguarded. Local."""
    if isinstance(tensor, _Guard):
        _make_readable(tensor)
        unguard(tensor)


def release(tensor: torch.Tensor) -> None:
    """Make a lazy parameter, or an alias of one, ordinary without reading it; a no-op for any other tensor. Local."""
    if hasattr(tensor, LAZY):
        delattr(tensor, LAZY)
        unguard(tensor)


def set_owner(param: torch.Tensor, owner: Callable[[], GuardedOwner | None], name: str) -> None:
    """Record the owner that the guard calls, as a weak reference: a strong one would leave buffers to the cyclic collector."""
    setattr(param, OWNER, (owner, name))


def refuse_moves(model: nn.Module) -> None:
    """Make `model.to(...)`, `.half()`, `.cuda()` raise if they would change anything: parameters would stop being views.

    A call that changes nothing (`.to(the same device)`, which many loops make) passes. HF's `resize_token_embeddings` also
    raises: it would add parameters that belong to no shard and no optimizer.
    """
    refuse_method(model, "_apply", _refuse_change)
    for module in model.modules():
        if hasattr(type(module), _RESIZE):
            refuse_method(module, _RESIZE, _refuse_resize)


def replace_method(module: nn.Module, method: str, instead: Callable[..., object]) -> None:
    """Make `module.method(...)` call `instead(module, ...)`. Copies of the module keep the ordinary method."""
    module.__dict__[method] = _StandIn(module, method, instead, sharded=True)


def refuse_method(module: nn.Module, method: str, instead: Callable[..., object]) -> None:
    """Like `replace_method`, for an `instead` that raises `ModelError` because shards and optimizer know the parameters.

    Of a model that nobody trains (any more) the ordinary method runs, see `let_idle_models_change`.
    """
    replace_method(module, method, instead)
    module.__dict__[method].refuses = True


def let_idle_models_change(model: nn.Module, make_ordinary: Callable[[str], bool]) -> None:
    """Let refused methods of `model` run after `make_ordinary(method)`, which is False if somebody trains the model. Local."""
    for module in model.modules():
        for found in module.__dict__.values():
            if isinstance(found, _StandIn) and found.refuses:
                found.make_ordinary = make_ordinary


_RESIZE = "resize_token_embeddings"


class _StandIn:
    """Replaces one method of one module, held weakly; on a copy of the module it calls the ordinary method.

    After `module.__dict__[name] = _StandIn(module, name, instead, sharded=True)`, calls reach `instead(module, ...)`.
    """

    def __init__(self, module: nn.Module, method: str, instead: Callable[..., object], *, sharded: bool) -> None:
        self._module = weakref.ref(module)
        self._method = method
        self._instead = instead
        self._sharded = sharded
        self.refuses = False
        self.make_ordinary: Callable[[str], bool] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        # A copy has plain parameters of its own. `deepcopy` enters it in `memo` before it copies the attributes.
        return _StandIn(memo[id(self._module())], self._method, self._instead, sharded=False)

    def __call__(self, *args: object, **kwargs: object) -> object:
        module = self._module()
        assert module is not None
        if not self._sharded:
            return getattr(type(module), self._method)(module, *args, **kwargs)
        try:
            return self._instead(module, *args, **kwargs)
        except ModelError:
            if self.make_ordinary is None or not self.make_ordinary(self._method):
                raise
        return getattr(module, self._method)(*args, **kwargs)


def _refuse_resize(model: Any, new_num_tokens: int | None = None, *args: object, **kwargs: object) -> nn.Module:
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    if new_num_tokens in (None, embedding.weight.shape[0]) and not (args or kwargs.get("pad_to_multiple_of")):
        return embedding
    raise ModelError(
        f"{type(model).__name__}.{_RESIZE}({new_num_tokens}): the model is sharded by hf_dist, and its "
        f"{embedding.weight.shape[0]} rows are spread over the ranks and known to the optimizer. Resize before the model is "
        "prepared (before the Trainer is made, or before hf_dist.initialize), or after training: delete the engine, or call "
        "hf_dist.unprepare(model) on every rank, first; the next Trainer prepares it again."
    )


def _refuse_change(model: nn.Module, fn: Callable[..., Any], *args: object, **kwargs: object) -> nn.Module:
    for dtype, device in {(t.dtype, t.device): None for t in (*model.parameters(), *model.buffers())}:
        probe = fn(torch.empty(0, dtype=dtype, device=device))
        if (probe.dtype, probe.device) != (dtype, device):
            raise ModelError(
                f"{type(model).__name__} is sharded by hf_dist and cannot move from {dtype} on {device} to {probe.dtype} on "
                f"{probe.device} during training. Set the compute dtype in the config (bf16.enabled, fp16.enabled), and the "
                "device when the model is prepared; an evaluation needs no cast. After training: delete the engine, or call "
                "hf_dist.unprepare(model) on every rank, first."
            )
    return model


def check_still_frozen(groups: Iterable[Any]) -> None:
    """Raise `ModelError` if a parameter was unfrozen that was frozen when the model was sharded. Local, microseconds."""
    with torch._C.DisableTorchFunctionSubclass():  # reads an attribute of freed parameters too
        for group in groups:
            for slot, param in zip(group.layout.slots, group.params, strict=True):
                if param.requires_grad:
                    raise ModelError(
                        f"{slot.name} was unfrozen after the model was prepared: no rank has room for its gradient and "
                        "optimizer state, so it would not be trained. Prepare the model with it trainable and freeze it right "
                        "afterwards (requires_grad_(False)): it can then be unfrozen at any step. A checkpoint saved now "
                        "can be resumed by such a run."
                    )


def _name(tensor: object) -> str:
    if hasattr(tensor, LAZY):
        return cast(str, getattr(tensor, LAZY).name)
    return cast(str, getattr(tensor, OWNER, (None, "?"))[1])


def _is_replicated(tensor: object) -> bool:
    """Whether all elements are in memory or in flight, so that an alias of them needs no guard."""
    owner = None if hasattr(tensor, LAZY) else getattr(tensor, OWNER, (lambda: None, ""))[0]()
    return owner is not None and owner.is_replicated


def _make_readable(tensor: Any) -> None:
    lazy = getattr(tensor, LAZY, None)
    if lazy is not None:
        lazy.materialize(tensor)
        return
    reference, name = getattr(tensor, OWNER)
    owner = reference()
    if owner is None:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.untyped_storage().nbytes():  # an alias of elements that the owner has left whole
                return
        raise FreedParameterError(
            f"parameter {name} was read after the model that it belonged to was dropped. Keep the model for as long as its "
            "parameters are used."
        )
    owner.make_readable(name)


def _guarded_alias(tensor: torch.Tensor, func: Callable[..., object]) -> torch.Tensor:
    """`.data` and `.detach()` share the empty storage, so they are guarded too (and readable once gathered)."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = cast(torch.Tensor, func(tensor))
        alias.__class__ = _twin(torch.Tensor)
    mark = LAZY if hasattr(tensor, LAZY) else OWNER
    setattr(alias, mark, getattr(tensor, mark))
    return alias


def _changes_nothing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    if kwargs.get("copy"):
        return False
    other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("other")
    if other is not None:
        return bool(other.dtype == tensor.dtype and other.device == tensor.device)
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
    same_device = device is None or device == tensor.device or (device.type == "cpu" and tensor.device.type == "cpu")
    return same_device and dtype in (None, tensor.dtype)
