"""One rank on a GPU that is not there: tensors without elements, every operator of which goes into a trace.

Autograd is torch's own and runs hooks in a thread of the device, as on a GPU (`accelerator.cpp` lets it). What the host reads
of a tensor on the device is made up (true, one half, one) and noted as a wait, with the line that asked.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tests.gpu_sim import costs
from tests.gpu_sim.trace import COMPUTE, HOST, Point, Trace

aten = torch.ops.aten
_READ_BY_HOST = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.allclose.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default,
}  # fmt: skip
_NO_KERNEL = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.detach.default, aten.alias.default, aten.is_pinned.default, aten.lift_fresh.default,
}  # fmt: skip
_ROOT = f"{Path(__file__).parents[2]}/"
_OWN = ("/tests/gpu_sim/recorder.py", "/tests/gpu_sim/streams.py", "/tests/gpu_sim/nccl.py")
_UNNAMED = ("/site-packages/torch/", "/contextlib.py", "/unittest/", *_OWN)
_BACKWARD = "backward (autograd's thread)"


def where() -> str:
    """The innermost line that is neither torch's nor of the simulation."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _UNNAMED) and "<" not in file:
            if "/threading.py" in file:
                return _BACKWARD
            short = file.rpartition("/site-packages/")[2].removeprefix(_ROOT)
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return _BACKWARD


class Recorder(FakeTensorMode):
    """A mode: inside of it tensors have no elements, and `trace` gets what is done with them."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.trace = Trace(rank)
        self.stream_name: Callable[[], str] = lambda: COMPUTE
        self._numbers = itertools.count(1)
        self._blocks: dict[int, tuple[int, str, Any]] = {}  # storage -> (block, home, its weak reference)
        self._pinned: set[int] = set()  # blocks of host memory that the GPU reads and writes by itself
        self._known: dict[str, int] = {}  # what the host has waited for
        self._inside: tuple[set[int], set[int]] | None = None  # blocks that the compiled function here reads and writes

    @property
    def avoid_device_init(self) -> bool:
        """What `torch.tensor` makes is moved to the device by an operator, which is seen."""
        return True

    # ------------------------------------------------------------------ the host

    def host_waits(self, points: Iterable[Point], why: str) -> None:
        """The host is blocked until `points`; nothing if it knows that they are reached."""
        points = tuple(points)
        if not self.is_known(points):
            self.trace.block(points, why, where())
            self._known.update(points)

    def is_known(self, points: Iterable[Point]) -> bool:
        """Whether the host has waited for them already."""
        return all(self._known.get(stream, 0) >= length for stream, length in points)

    # ---------------------------------------------------------------- the memory

    def block_of(self, tensor: torch.Tensor) -> int:
        """A number for the memory of `tensor`, another one each time that memory is allocated."""
        with torch._C.DisableTorchFunctionSubclass():  # of freed weights one may ask no more
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            self._allocated(key, tensor.device.type == "cuda", weakref.ref(storage, lambda _: self._gone(key)))
        return self._blocks[key][0]

    def _allocated(self, key: int, on_gpu: bool, reference: Any) -> None:
        self._blocks[key] = next(self._numbers), self.stream_name() if on_gpu else HOST, reference

    def _gone(self, key: int) -> None:
        block, home, _ = self._blocks.pop(key)
        if home not in (HOST, ""):
            self.trace.free(block, home, where())

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """`storage.resize_(nbytes)`: freed at once, or allocated for the stream that is current."""
        key = storage._cdata
        if key not in self._blocks:
            return
        block, home, reference = self._blocks[key]
        if home == HOST:
            return
        if home:
            self.trace.free(block, home, where())
        self._blocks[key] = next(self._numbers), self.stream_name() if nbytes else "", reference

    def lock(self, tensor: torch.Tensor) -> None:
        """Page-lock memory of the host."""
        self._pinned.add(self.block_of(tensor))

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        """Whether a copy between this host memory and the GPU goes on without the host."""
        return isinstance(tensor, FakeTensor) and self.block_of(tensor) in self._pinned

    # ------------------------------------------------------------- the operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func in _READ_BY_HOST:
            if any(t.is_cuda for t in tensors):
                self._launch(func, tensors, [])
                self.host_waits((self.trace.point(self.stream_name()),), func._schema.name)
            if (answer := _made_up(func, tensors[0])) is not None:
                return answer
        if func is aten._pin_memory.default:
            return self._pin(tensors[0])
        if func is aten.is_pinned.default:
            return self.is_page_locked(tensors[0])
        if func is aten._scaled_mm.default:
            _refuse_layout(args[0], args[1])
        if func is aten.silu_backward.default:  # its fake version is made of fp32 operators that no kernel has
            out = super().__torch_dispatch__(aten.empty_like.default, types, args[:1], {})
        else:
            wanted = kwargs.pop("pin_memory", None)
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if wanted:
                self.lock(out)
        self._note(func, args, kwargs, tensors, out)
        return out

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self.lock(copy)
        return copy

    def _note(self, func: Any, args: Any, kwargs: Any, ins: list[torch.Tensor], out: Any) -> None:
        name = func._schema.name
        if name.startswith("prim::") or "sym_" in name:
            return
        outs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        returns = func._schema.returns
        if func in _NO_KERNEL or any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            for tensor in outs:
                self.block_of(tensor)
            return
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        written = [
            leaf
            for a, value in given
            if a.alias_info is not None and a.alias_info.is_write
            for leaf in tree_leaves(value)
        ]
        changed = [x for x in written if isinstance(x, torch.Tensor)]
        apart = {id(x) for x in changed}
        reads = [x for x in ins if id(x) not in apart]
        writes = list({id(x): x for x in (*changed, *outs)}.values())
        self._launch(func, reads, writes, costs.operator_seconds(func, args, kwargs, out, [*reads, *writes]))
        if func in (aten.copy_.default, aten._to_copy.default):
            into, source = (args[0], args[1]) if func is aten.copy_.default else (out, args[0])
            calm = kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2])
            self._copied(into, source, bool(calm))

    def _launch(self, func: Any, reads: list[torch.Tensor], writes: list[torch.Tensor], seconds: float = 0.0) -> None:
        """Of host memory only what is page-locked: with the rest the GPU is done before the host goes on."""
        used = [[t for t in side if t.numel() and (t.is_cuda or self.is_page_locked(t))] for side in (reads, writes)]
        if not any(used):
            return
        blocks = [tuple(self.block_of(t) for t in side) for side in used]
        if self._inside is not None:
            in_place = () if func is aten.copy_.default else blocks[1]
            self._inside[0].update(blocks[0], in_place)
            self._inside[1].update(blocks[1])
            return
        what = func._schema.name.rpartition("::")[2]
        stream = self.stream_name() if any(t.is_cuda for t in (*reads, *writes)) else HOST
        self.trace.launch(stream, what, where(), reads=blocks[0], writes=blocks[1], seconds=seconds)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as Inductor compiles it: one kernel, which reads what it is given and writes its result."""

        def kernel(*args: Any) -> Any:
            self._inside = (set(), set())
            try:
                out = function(*args)
                read, written = self._inside
            finally:
                self._inside = None
            given, made = ([x for x in tree_leaves(side) if isinstance(x, torch.Tensor)] for side in (args, out))
            reads = [x for x in given if self.block_of(x) in read or self.block_of(x) not in written]
            writes = [*(x for x in given if self.block_of(x) in written), *made]
            seconds = costs.LAUNCH + sum(map(costs.nbytes_of, [*reads, *writes])) / costs.MEMORY
            blocks = [tuple(self.block_of(x) for x in side) for side in (reads, writes)]
            what = function.__name__.lstrip("_")
            self.trace.launch(self.stream_name(), what, where(), reads=blocks[0], writes=blocks[1], seconds=seconds)
            return out

        return kernel

    def _copied(self, into: torch.Tensor, source: torch.Tensor, calm: bool) -> None:
        if {into.device.type, source.device.type} != {"cpu", "cuda"} or not into.numel():
            return
        on_host = into if into.device.type == "cpu" else source
        if isinstance(source, FakeTensor) and source.constant is not None and source.numel() == 1 and calm:
            return
        if not calm or not self.is_page_locked(on_host):
            kind = "copy" if not calm else "copy of memory that is not page-locked"
            text = f"{kind}, {source.device.type} to {into.device.type}, {source.numel()} elements"
            self.host_waits((self.trace.point(self.stream_name()),), text)


def _made_up(func: Any, tensor: torch.Tensor) -> Any:
    if func in (aten.equal.default, aten.allclose.default, aten.is_nonzero.default):
        return True
    if func is not aten._local_scalar_dense.default or getattr(tensor, "constant", None) is not None:
        return None
    if tensor.dtype == torch.bool:
        return True
    return 0.5 if tensor.dtype.is_floating_point else 1


def answered(answer: Callable[[torch.Tensor], np.ndarray]) -> Any:
    """A context in which what the program reads by `host_read` is a wait, and has the elements that `answer` gives."""
    from hf_dist.tensors import host_read

    def on_host(tensor: torch.Tensor) -> np.ndarray:
        if tensor.is_cuda:
            tensor.cpu()
        return answer(tensor)

    return mock.patch.object(host_read, "on_host", on_host)


def follows_resizes(recorder: Recorder) -> Any:
    """A context in which `recorder` hears of storages that are resized."""
    original: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes == 0:
            recorder.resized(storage, 0)
        out = original(storage, nbytes)
        if nbytes:
            recorder.resized(storage, nbytes)
        return out

    return mock.patch.object(torch.UntypedStorage, "resize_", resize)


def _refuse_layout(one: torch.Tensor, other: torch.Tensor) -> None:
    """As cuBLAS does: rows of the first factor and columns of the second one after another, sizes that are multiples of 16."""
    if one.stride(-1) != 1 or other.stride(0) != 1:
        raise RuntimeError(
            f"_scaled_mm takes row-major by column-major, not strides {one.stride()} by {other.stride()}"
        )
    if any(size % 16 for size in (*one.shape[1:], *other.shape)):
        raise RuntimeError(f"_scaled_mm takes sizes that are multiples of 16, not {one.shape} by {other.shape}")
