"""`p.grad` on a rank that holds only a part of it: norms cover the whole gradient, products scale this rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ModelError

_BASE: Any = torch._C.TensorBase
_METADATA = {
    vars(_BASE)[name].__get__
    for name in (
        "dtype",
        "device",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
        "layout",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "_version",
    )
} | {torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.is_complex, torch.is_complex}
_PLAIN = (torch.Tensor.detach, torch.detach, _BASE.data.__get__)
_IN_PLACE = {
    getattr(torch.Tensor, name)
    for name in ("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "zero_", "neg_", "nan_to_num_")
} | {torch.Tensor.__imul__, torch.Tensor.__itruediv__}
_MOVES = (torch.Tensor.to, _BASE.data.__set__, torch._has_compatible_shallow_copy_type)
"""What `module.to(dtype)` does with gradients; some forwards call it (Switch's router), and it changes nothing."""
_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)
_FOREACH: dict[object, object] = {
    torch._foreach_mul_: torch.Tensor.mul_,
    torch._foreach_clamp_min_: torch.Tensor.clamp_min_,
    torch._foreach_clamp_max_: torch.Tensor.clamp_max_,
}


class GradientShard(torch.Tensor):
    """This rank's elements of a gradient, in place. Norms are collective over the ranks that hold the rest."""

    _whole: torch.Size
    _axis: MeshAxis | None
    _name: str

    @staticmethod
    def of(part: torch.Tensor, whole: torch.Size, axis: MeshAxis | None, name: str) -> GradientShard:
        """`part`: 1-D view into the gradient that will be stepped; `whole`: the parameter's shape; `axis`: the ranks that hold
        the rest. Under a pipeline `axis` is None and only metadata is answered: no rank sees all parameters' gradients."""
        shard = part.as_subclass(GradientShard)
        shard._whole, shard._axis, shard._name = whole, axis, name
        return shard

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(first, GradientShard):
                if func in _METADATA:
                    return func(first)
                if (answer := first._shape_answer(func, args[1:])) is not None:
                    return answer
                if func in _MOVES and first._stays(func, args[1:], kwargs):
                    return first if func is torch.Tensor.to else True
                if first._axis is None:
                    first._refuse_reading()
                if func in _PLAIN:  # detaching it has no effect: a gradient has no autograd history
                    return first
                if func in _IN_PLACE and all(_is_number(x) for x in (*args[1:], *kwargs.values())):
                    func(first, *args[1:], **kwargs)
                    return first
                if func in _NORMS:
                    return first._norm(*args[1:], **kwargs)
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                _unscale(*args)
                return None
            if func in _FOREACH and _is_number(args[1]):
                in_place: Any = _FOREACH[func]
                for tensor in cast(Any, first):
                    in_place(tensor, args[1])
                return None
        shard = next((x for x in args if isinstance(x, GradientShard)), None)
        name = shard._name if shard is not None else "a parameter"
        raise ModelError(
            f"{getattr(func, '__name__', func)} of the gradient of {name}: this rank holds a shard of it (ZeRO stage 1 to 3). "
            "p.grad supports norms, products with a number, clamp_ and zero_; torch.nn.utils.clip_grad_norm_ and "
            "clip_grad_value_ work. Call hf_dist.full_gradient(p) on every rank for the whole gradient."
        )

    def _stays(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether a move to a dtype or device, or to another memory, leaves this part as it is."""
        own = self.as_subclass(torch.Tensor)
        if func is torch.Tensor.to:
            moved: torch.Tensor = own.to(*args, **kwargs)
            return moved is own
        return isinstance(args[0], GradientShard) and args[0].data_ptr() == own.data_ptr()

    def _refuse_reading(self) -> None:
        raise ModelError(
            f"p.grad of {self._name}: each rank has only the gradients of its own part of the model (stages, slices of "
            "matrices). Clip with accelerator.clip_grad_norm_ or gradient_clipping. hf_dist.full_gradient(p) gives one whole "
            "gradient."
        )

    def _shape_answer(self, func: Callable[..., object], args: tuple[Any, ...]) -> object:
        if func == _BASE.shape.__get__:
            return self._whole
        if func is torch.Tensor.size:
            return self._whole[args[0]] if args else self._whole
        if func in (torch.Tensor.numel, torch.Tensor.nelement, torch.numel):
            return self._whole.numel()
        if func in (torch.Tensor.dim, _BASE.ndim.__get__):
            return len(self._whole)
        if func is torch.Tensor.__repr__:
            return f"<shard of the gradient of {self._name}, {super().numel()} of {self._whole.numel()} elements>"
        return None

    def _norm(self, p: Any = 2, ord: Any = None, **kwargs: object) -> torch.Tensor:
        asked = p if ord is None else ord
        degree = 2.0 if asked == "fro" else float(asked)
        if any(value is not None for key, value in kwargs.items() if key not in ("dtype", "keepdim")):
            raise ModelError(f"a norm along a dimension of the gradient of {self._name}: this rank holds a shard of it")
        own = self.as_subclass(torch.Tensor)
        is_max = degree == float("inf")
        if own.numel() == 0:
            value = torch.zeros((), dtype=torch.float32, device=own.device)
        else:
            value = torch.linalg.vector_norm(own, degree, dtype=torch.float32)
        assert self._axis is not None
        total = (value if is_max else value.pow(degree)).reshape(1)
        collectives.all_reduce(self._axis, total, op="max" if is_max else "sum").wait()
        return total[0] if is_max else total[0].pow(1.0 / degree)


def _unscale(grads: list[GradientShard], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """What `torch.amp.GradScaler` asks: each rank divides its part, and all learn if any found a value that is not finite."""
    for grad in grads:
        if grad._axis is None:
            grad._refuse_reading()
    plain = [grad.as_subclass(torch.Tensor) for grad in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse_scale)
    for axis in {id(grad._axis): grad._axis for grad in grads}.values():
        assert axis is not None
        collectives.all_reduce(axis, found_inf, op="max").wait()


def _is_number(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.ndim == 0
