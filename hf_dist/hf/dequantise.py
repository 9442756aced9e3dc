"""FP8 and MXFP4 checkpoints trained in bf16: each rank reads and dequantises only its own part.

transformers dequantises on load if the quantization config says so, and always where no GPU supports the format. During a
streamed load, two of its functions are replaced: they return lazy tensors that are dequantised when they are read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from hf_dist.checkpoint.dequantised import BlockScaled, Mxfp4
from hf_dist.checkpoint.recording import made_of, stored

__all__ = ["dequantised_as_read", "dequantises"]

_METHODS = ("fp8", "mxfp4")


def dequantises(quantizer: Any) -> bool:
    """Whether a load with this quantizer yields ordinary weights, by a conversion that this module supports."""
    config = quantizer.quantization_config
    method = str(getattr(config.quant_method, "value", config.quant_method))
    return method in _METHODS and bool(getattr(config, "dequantize", False))


@contextmanager
def dequantised_as_read() -> Iterator[None]:
    """Inside, transformers' conversions of stored FP8 and MXFP4 tensors read no data."""
    fp8: object = importlib.import_module("transformers.integrations.finegrained_fp8")
    mxfp4: object = importlib.import_module("transformers.integrations.mxfp4")
    with ExitStack() as stack:
        for owner, name, instead in (
            (getattr(fp8, "Fp8Dequantize", None), "_dequantize_one", _block_scaled),
            (mxfp4, "dequantize_convertops", _mxfp4),
        ):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, instead(getattr(owner, name))))
        yield


def _block_scaled(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dequantize_one(
        self: object, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        values, factors = stored(quantized), stored(scales)
        known = values is not None and factors is not None and quantized.dtype == values.dtype
        if not known or values is None or factors is None or not BlockScaled.fits(values, factors):
            return stock(self, quantized, scales, output_dtype=output_dtype)
        wide = scales.dtype if scales.dtype.is_floating_point and scales.element_size() >= 2 else torch.bfloat16
        return made_of(quantized, BlockScaled(values, factors, scales.dtype, output_dtype or wide))

    return dequantize_one


def _mxfp4(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values, exponents = stored(blocks), stored(scales)
        if values is None or exponents is None or not Mxfp4.fits(values, exponents):
            return stock(blocks, scales, dtype)
        return made_of(blocks, Mxfp4(values, exponents, dtype)).transpose(1, 2).contiguous()

    return dequantize
