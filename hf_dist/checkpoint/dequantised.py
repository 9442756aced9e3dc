"""A tensor that is stored quantised, read as dequantised numbers; any interval can be read by itself.

    BlockScaled   float8 values and a scale for each block of a matrix (DeepSeek-V3, "fp8")
    Mxfp4         two 4-bit floats per byte and one exponent per 32 of them (gpt-oss, "mxfp4")

Both are leaves of a `WeightSource` like a `FileTensor`, and equal transformers' own conversions bit for bit. Source:
transformers 5.23, `integrations/finegrained_fp8.py` and `integrations/mxfp4.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from safetensors import safe_open

from hf_dist.checkpoint.safetensors_source import FileTensor

__all__ = ["BlockScaled", "Mxfp4"]

_GROUP = 32
"""Elements of MXFP4 that share one exponent."""
_BIAS = 127
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _Dequantised(FileTensor):
    """Values in one stored tensor, scales in another, perhaps in another file."""

    def __init__(self, values: FileTensor, scales: FileTensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.values, self.scales = values, scales
        self.file, self.name = values.file, f"{values.name} dequantised"
        self.shape, self.numel, self.dtype = shape, math.prod(shape), dtype

    def describe(self) -> str:
        """Describes both tensors."""
        return f"{self.values.describe()} {self.scales.describe()} {self.dtype}"

    def element(self, opened: object, index: int) -> torch.Tensor:
        """One element, through safetensors' own reader, which also opens the scales' file."""
        with safe_open(self.scales.file.path, framework="pt") as other:
            return self._dequantise(index, index + 1, _Mapped(self.values, opened), _Mapped(self.scales, other))[0]

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` with elements [start, stop), reading only the values and scales that they need."""
        if stop > start:
            out.copy_(self._dequantise(start, stop, self.values, self.scales))

    def _dequantise(self, start: int, stop: int, values: object, scales: object) -> torch.Tensor:
        raise NotImplementedError


class _Mapped:
    """A stored tensor read through an already opened safetensors reader."""

    def __init__(self, tensor: FileTensor, opened: Any) -> None:
        self.dtype = tensor.dtype
        self._all = opened.get_tensor(tensor.name).reshape(-1)

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Like `FileTensor.read`."""
        out.copy_(self._all[start:stop])


class BlockScaled(_Dequantised):
    """(..., rows, columns) split into (..., a, b) equal blocks with one scale each."""

    def __init__(self, values: FileTensor, scales: FileTensor, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """`scale_dtype`: the dtype in which the scales are used."""
        super().__init__(values, scales, values.shape, dtype)
        self._scale_dtype = scale_dtype
        rows, self._columns = values.shape[-2:]
        down, self._across = scales.shape[-2:]
        self._height, self._width = rows // down, self._columns // self._across

    @staticmethod
    def fits(values: FileTensor, scales: FileTensor) -> bool:
        """Whether `values` and `scales` have this form."""
        if values.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or not scales.dtype.is_floating_point:
            return False
        if len(values.shape) < 2 or len(values.shape) != len(scales.shape) or values.shape[:-2] != scales.shape[:-2]:
            return False
        return all(s and v % s == 0 for v, s in zip(values.shape[-2:], scales.shape[-2:], strict=True))

    def _dequantise(self, start: int, stop: int, values: Any, scales: Any) -> torch.Tensor:
        stored = torch.empty(stop - start, dtype=values.dtype)
        values.read(start, stop, stored)
        first, last = start // self._columns, -(-stop // self._columns)  # rows, over all matrices
        upper, lower = first // self._height, -(-last // self._height)  # rows of blocks
        factors = torch.empty((lower - upper) * self._across, dtype=scales.dtype)
        scales.read(upper * self._across, lower * self._across, factors)
        blocks = factors.to(self._scale_dtype).float().view(-1, self._across)
        of_row = torch.arange(first, last) // self._height - upper
        whole = blocks[of_row].repeat_interleave(self._width, 1).view(-1)
        return (stored.float() * whole[start - first * self._columns :][: stop - start]).to(self.dtype)


class Mxfp4(_Dequantised):
    """(..., 32 n) from bytes (..., n, 16) and exponents (..., n)."""

    def __init__(self, values: FileTensor, scales: FileTensor, dtype: torch.dtype) -> None:
        super().__init__(values, scales, (*values.shape[:-2], values.shape[-2] * _GROUP), dtype)
        self._table = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=dtype)

    @staticmethod
    def fits(values: FileTensor, scales: FileTensor) -> bool:
        """Whether `values` and `scales` have this form."""
        stored = values.dtype == scales.dtype == torch.uint8
        return stored and values.shape[:-1] == scales.shape and values.shape[-1] * 2 == _GROUP

    def _dequantise(self, start: int, stop: int, values: Any, scales: Any) -> torch.Tensor:
        first, last = start // _GROUP, -(-stop // _GROUP)
        stored = torch.empty((last - first) * _GROUP // 2, dtype=torch.uint8)
        exponents = torch.empty(last - first, dtype=torch.uint8)
        values.read(first * _GROUP // 2, last * _GROUP // 2, stored)
        scales.read(first, last, exponents)
        numbers = torch.stack((self._table[(stored & 15).long()], self._table[(stored >> 4).long()]), -1)
        scaled = torch.ldexp(numbers.view(-1, _GROUP), exponents.to(torch.int32).unsqueeze(1) - _BIAS)
        return scaled.reshape(-1)[start - first * _GROUP :][: stop - start].to(self.dtype)
