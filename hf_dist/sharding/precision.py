"""Which dtype each model state has. One value, chosen at build time, printed in the start-up report."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MASTER_DTYPE = torch.float32
"""Master weights and optimizer state, always."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run. Master weights and optimizer state are fp32 in each of them."""

    compute: torch.dtype = torch.float32
    """Weights and activations in forward and backward (bf16 with `bf16.enabled`, fp16 with `fp16.enabled`)."""
    reduce: torch.dtype = torch.float32
    """Gradients on the wire (`communication_data_type`)."""
    grads: torch.dtype = torch.float32
    """Accumulated gradients (`data_types.grad_accum_dtype`)."""
    keep_fp32: frozenset[str] = frozenset()
    """Full names of parameters that the model's author wants in fp32 whatever the compute dtype."""

    def compute_dtype(self, name: str, loaded: torch.dtype) -> torch.dtype:
        """The dtype of parameter `name` in forward and backward; integers (quantized weights) stay as they are."""
        if not loaded.is_floating_point:
            return loaded
        return torch.float32 if name in self.keep_fp32 else self.compute

    def rows(self) -> list[tuple[str, str]]:
        """(what, dtype) for the report."""

        def short(dtype: torch.dtype) -> str:
            return str(dtype).removeprefix("torch.")

        rows = [
            ("weights and activations", short(self.compute)),
            ("gradients on the wire", short(self.reduce)),
            ("gradient accumulation", short(self.grads)),
            ("master weights, optimizer state", short(MASTER_DTYPE)),
        ]
        if self.keep_fp32 and self.compute != torch.float32:
            rows.append(("kept in float32 by the model's author", f"{len(self.keep_fp32)} parameters"))
        return rows
