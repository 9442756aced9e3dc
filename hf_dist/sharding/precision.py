"""The dtype of each model state. One value, chosen at build time and printed in the start-up report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_dist.config import DistConfig, settled
from hf_dist.sharding.label_dtypes import MixedDtypes, cast_but_targets
from hf_dist.sharding.quantised import is_packed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Name in the config and on the command line -> dtype."""
MASTER_DTYPE = torch.float32
"""Dtype of master weights, unless the config asks for a narrower one."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run."""

    compute: torch.dtype = torch.float32
    """Weights and activations in forward and backward (bf16 with `bf16.enabled`, fp16 with `fp16.enabled`)."""
    reduce: torch.dtype = torch.float32
    """Gradients on the wire (`communication_data_type`)."""
    grads: torch.dtype = torch.float32
    """Accumulated gradients (`data_types.grad_accum_dtype`)."""
    masters: torch.dtype = MASTER_DTYPE
    """Master weights of parameters that compute in less than fp32 (`bf16.bf16_master_weights_and_grads`)."""
    states: torch.dtype = torch.float32
    """Optimizer states at rest (`bf16.bf16_optimizer_states`); the step itself computes in fp32."""
    autocast: torch.dtype | None = None
    """Target dtype of `torch.autocast` around forward (`torch_autocast`); None without autocast."""
    keep_fp32: frozenset[str] = frozenset()
    """Full names of parameters and buffers that the model's author wants in fp32 whatever the compute dtype."""
    keeps_bits: bool = False
    """Whether frozen weights keep the bits that `compute` has no room for, because they are saved with those that train."""
    float8: frozenset[str] = frozenset()
    """Full names of weights that multiply in float8, which rounds them for each product."""
    as_loaded: frozenset[str] = frozenset()
    """Full names of frozen parameters that keep their loaded dtype: packed 4-bit weights, a half-precision base."""

    def compute_dtype(self, name: str, loaded: torch.dtype) -> torch.dtype:
        """The dtype of parameter `name` in forward and backward; integers (quantized weights) stay as they are."""
        if not loaded.is_floating_point or name in self.as_loaded:
            return loaded
        return torch.float32 if name in self.keep_fp32 else self.compute

    def frozen_dtype(self, compute: torch.dtype, loaded: Iterable[torch.dtype]) -> torch.dtype:
        """The dtype in which frozen weights rest that compute in `compute`; `loaded`: those in which they were loaded."""
        if not self.keeps_bits or not compute.is_floating_point:
            return compute
        return max([compute, *loaded], key=lambda dtype: dtype.itemsize)

    def master_dtype(self, compute: torch.dtype) -> torch.dtype:
        """The dtype of the weights that the optimizer steps, for parameters that compute in `compute`."""
        return MASTER_DTYPE if compute == torch.float32 else self.masters

    @property
    def reduced(self) -> torch.dtype:
        """The dtype of a reduced gradient before it is added to the accumulated one: the wider of `reduce` and `grads`."""
        return torch.promote_types(self.reduce, self.grads)

    def wire(self, ranks: int) -> torch.dtype:
        """The dtype handed to a reduction over `ranks` ranks. A single rank sends nothing, so it keeps the wider dtype."""
        return self.reduce if ranks > 1 else self.reduced

    def cast_inputs(
        self, module: nn.Module, args: Any, kwargs: Any, *, keeps_casts: bool = False
    ) -> tuple[object, AbstractContextManager[object] | None]:
        """((args, kwargs) for the model, context manager around its forward); None for no change. See [Note: dtypes of inputs].

        `keeps_casts`: let autocast cache the cast of a weight until the forward ends, as under DDP. With sharded weights, that
        cache would hold the whole model.
        """
        if self.autocast is not None:
            device = next((p.device.type for p in module.parameters()), "cpu")
            return None, torch.autocast(device, self.autocast, cache_enabled=keeps_casts)
        if self.compute == torch.float32:
            return None, None
        inputs, has_targets = cast_but_targets(module, args, kwargs, self.compute)
        return inputs, MixedDtypes(self.compute) if has_targets else None

    def rows(self) -> list[tuple[str, str]]:
        """(state, dtype) rows for the start-up report."""

        def short(dtype: torch.dtype) -> str:
            return str(dtype).removeprefix("torch.")

        rows = [
            ("weights and activations", short(self.compute)),
            ("gradients on the wire", short(self.reduce)),
            ("gradient accumulation", short(self.grads)),
        ]
        if self.masters == self.states:
            rows.append(("master weights, optimizer state", short(self.masters)))
        else:
            rows += [("master weights", short(self.masters)), ("optimizer state", short(self.states))]
        if self.autocast is not None:
            rows.append(("autocast around forward", short(self.autocast)))
        if self.keep_fp32 and self.compute != torch.float32:
            rows.append(("kept in float32 by the model's author", f"{len(self.keep_fp32)} parameters and buffers"))
        if self.as_loaded:
            rows.append(("kept as loaded, below adapters", f"{len(self.as_loaded)} parameters"))
        return rows


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `device` has no instructions for matrix products in `dtype`, which are then many times slower than in fp32.

    True on most CPUs: bf16 needs AVX-512, AMX, or SVE with BF16. Without them, torch uses its own loop instead of oneDNN.
    """
    supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    ask = getattr(torch.ops.mkldnn, supported, None) if supported and device.type == "cpu" else None
    return ask is not None and not ask()


def precision_for(config: DistConfig, model: nn.Module) -> Precision:
    """The dtypes of the run. bf16 and fp16 runs accumulate and reduce in fp32 unless the config asks for a narrower dtype."""
    compute = DTYPES[config.dtype]
    reduce = DTYPES[config.communication_data_type or "fp32"]
    narrow = settled(config.bf16.enabled) and config.bf16.bf16_master_weights_and_grads
    grads = DTYPES[config.data_types.grad_accum_dtype or ("bf16" if narrow else "fp32")]
    return Precision(
        compute=compute,
        reduce=reduce,
        grads=grads,
        masters=torch.bfloat16 if narrow else MASTER_DTYPE,
        states=torch.bfloat16 if settled(config.bf16.enabled) and states_in_bf16(config) else torch.float32,
        autocast=DTYPES[config.torch_autocast.dtype] if config.torch_autocast.enabled else None,
        keep_fp32=_kept_in_fp32(model, compute),
        # Below adapters the base is not saved. A model that is only evaluated is not, either.
        keeps_bits=not hasattr(model, "peft_config") and any(p.requires_grad for p in model.parameters()),
        as_loaded=_kept_as_loaded(model, compute),
    )


def states_in_bf16(config: DistConfig) -> bool:
    """Whether the config asks, by either of two keys, for optimizer states that rest in bf16."""
    section = config.optimizer.params if config.optimizer is not None else {}
    return config.bf16.bf16_optimizer_states or section.get("fp32_optimizer_states") is False


def _kept_as_loaded(model: nn.Module, compute: torch.dtype) -> frozenset[str]:
    """Names of packed weights and, unless half precision is configured, of the frozen half-precision base below adapters.

    PEFT casts between a half-precision base and its fp32 adapters in every layer, without autocast. An fp32 base would take
    twice the memory and give other numbers than one process.
    """
    below_adapters = hasattr(model, "peft_config") and compute == torch.float32
    return frozenset(
        n
        for n, p in model.named_parameters()
        if is_packed(p) or (below_adapters and not p.requires_grad and p.dtype in (torch.float16, torch.bfloat16))
    )


def _kept_in_fp32(model: nn.Module, compute: torch.dtype) -> frozenset[str]:
    """Names of parameters and buffers that the model's author wants in fp32, as `from_pretrained` finds them.

    HF's `_keep_in_fp32_modules*` are patterns, found anywhere in a name (`mlp.gate.weight`, `build_glob_alternation`); the
    non-strict list applies to fp16 only. BatchNorm's parameters and statistics too: its kernels accept half-precision inputs
    only with weights in the dtype of the statistics.
    """
    if compute == torch.float32:
        return frozenset()
    patterns: set[str] = set()
    for module in model.modules():
        patterns.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if compute == torch.float16:
            patterns.update(getattr(module, "_keep_in_fp32_modules", None) or ())
    wanted = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in sorted(patterns)) or "$^")
    norms = {id(x) for m in model.modules() if isinstance(m, _BatchNorm) for x in (*m.parameters(), *m.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return frozenset(name for name, x in named if id(x) in norms or wanted.search(name))
