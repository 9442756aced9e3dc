"""Activation checkpointing: HF's own flag on its own blocks, with our checkpoint function.

HF models have a flag on every block (`gradient_checkpointing`) and call `_gradient_checkpointing_func(forward, *args)` if it
is set. Hooks of the block, including those of sharding, stay outside that call. `gradient_checkpointing` of TrainingArguments,
`model.gradient_checkpointing_enable()` and the `activation_checkpointing` section all lead here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.log import warn_once
from hf_dist.memory.activation.host_copies import HostCopies, HostCopy
from hf_dist.memory.activation.tape import Tape
from hf_dist.memory.activation.tiled_mlp import tile_mlps

_SECTION = "activation_checkpointing"
_FLAG = "gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"})


class BlockCheckpoint:
    """The checkpoint function that HF's blocks call. Optionally offloads the block's input and keeps costly outputs."""

    def __init__(self, keywords: Mapping[str, Any], *, on_host: bool = False, selective: bool = False) -> None:
        """`keywords`: for `torch.utils.checkpoint.checkpoint`, as in `gradient_checkpointing_kwargs`; `on_host`: keep block
        inputs on the host; `selective`: keep costly outputs."""
        self.keywords = {"use_reentrant": False, **keywords}
        self.selective = selective
        self.host_copies = HostCopies() if on_host else None
        self._passed = dict(self.keywords)
        if selective:
            self._passed["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_costly)

    def __reduce__(self) -> Any:
        """Give a copied model its own buffers."""
        return _rebuild, (self.keywords, self.host_copies is not None, self.selective)

    def __call__(self, function: Callable[..., object], *args: object, **kwargs: Any) -> object:
        """Run `function(*args, **kwargs)` and recompute it in backward."""
        if not torch.compiler.is_compiling():  # the tape would break the graph: nothing of the block is compiled
            function = functools.partial(Tape().call, function)
        copies = self.host_copies
        if copies is None or not args or not isinstance(args[0], torch.Tensor):
            return checkpoint(function, *args, **self._passed, **kwargs)
        # Offload only the hidden states. Other arguments (masks, encoder states) are shared by all blocks and stay alive.
        hidden = args[0]

        def pack(tensor: torch.Tensor) -> torch.Tensor | HostCopy:
            return copies.put(tensor) if tensor is hidden else tensor

        def unpack(saved: torch.Tensor | HostCopy) -> torch.Tensor:
            return copies.get(saved) if isinstance(saved, HostCopy) else saved

        with saved_tensors_hooks(pack, unpack):
            return checkpoint(function, *args, **self._passed, **kwargs)


def _rebuild(keywords: Mapping[str, object], on_host: bool, selective: bool) -> BlockCheckpoint:
    return BlockCheckpoint(keywords, on_host=on_host, selective=selective)


def keep_costly(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Policy of selective checkpointing: keep outputs of matrix products and attention kernels, recompute all others."""
    index = _is_costly(op)
    if index is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    # A kernel that draws dropout must run again: without its draw, later kernels would see other random numbers.
    draws = kwargs.get("dropout_p", args[index] if len(args) > index else 0.0)
    return CheckpointPolicy.PREFER_RECOMPUTE if draws else CheckpointPolicy.MUST_SAVE


@functools.cache
def _is_costly(op: object) -> int | None:
    """Position of the operator's `dropout_p`, or a position past its arguments if it has none; None for a cheap operator."""
    schema = getattr(op, "_schema", None)
    if schema is None:  # a higher-order operator: flex attention
        return 1 << 30 if "attention" in str(op) else None
    name = schema.name.rpartition("::")[2]
    if name not in _MATMULS and (("attention" not in name and "attn" not in name) or "backward" in name):
        return None
    names = [argument.name for argument in schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else 1 << 30


def set_up_checkpointing(model: nn.Module, config: DistConfig) -> None:
    """Make the model's flags agree with the config section. Local; can be called again after HF's flag was set again.

    Raises `ConfigError` if the two contradict, `ModelError` for a model without HF's flags.
    """
    section = config.activation_checkpointing
    if section.mlp_tiles > 1:
        tile_mlps(model, section.mlp_tiles)
    asked, every = asks_for_checkpointing(config)
    owners = _owners(model)
    if not asked and not any(getattr(m, _FLAG) for m in owners):
        return
    if not owners:
        raise ModelError(
            f"{_SECTION} asks for activation checkpointing, but {type(model).__name__} has none: no module with the attribute "
            f"`{_FLAG}` (a GradientCheckpointingLayer of transformers). Remove the section's switches, or call "
            "torch.utils.checkpoint.checkpoint in the model."
        )
    if asked:
        _set_flags(owners, every, config)
    for found in dict.fromkeys(getattr(m, _FUNCTION, None) for m in owners):
        keywords = _keywords(found)
        if keywords is None:
            if section.cpu_checkpointing or section.selective:
                warn_once(
                    f"{_SECTION}: the model brings its own checkpoint function ({found!r}), which is left as it is"
                )
            continue
        ours = _function(keywords, section.cpu_checkpointing or _offloads(found), section.selective, config)
        for module in owners:
            if getattr(module, _FUNCTION, None) is found:
                setattr(module, _FUNCTION, ours)


def asks_for_checkpointing(config: DistConfig) -> tuple[bool, int | None]:
    """(whether the config itself enables checkpointing, checkpoint every n-th block or None if unspecified)."""
    section = config.activation_checkpointing
    every = section.every_n_layers or config.pipeline.activation_checkpoint_interval or None
    return bool(every or section.cpu_checkpointing or section.selective), every


def describe_checkpointing(model: nn.Module) -> list[str]:
    """Rows for the start-up report; empty without checkpointing."""
    owners = [m for m in _owners(model) if getattr(m, _FLAG)]
    if not owners:
        return []
    all_blocks = [m for m in _owners(model) if is_block(m)]
    on = sum(1 for m in all_blocks if getattr(m, _FLAG))
    blocks = f"{on} of {len(all_blocks)} blocks" if all_blocks else "all blocks"
    function = getattr(next((m for m in owners if is_block(m)), owners[0]), _FUNCTION, None)
    rows = [f"{blocks} run again in backward"]
    if isinstance(function, BlockCheckpoint) and function.host_copies is not None:
        rows.append("inputs of these blocks rest on the host")
    if isinstance(function, BlockCheckpoint) and function.selective:
        rows.append("outputs of matrix products and attention are kept")
    return rows


def _owners(model: nn.Module) -> list[nn.Module]:
    """Modules that have HF's flag themselves (PEFT's wrappers only forward the attribute)."""
    return [m for m in model.modules() if _FLAG in m.__dict__ or hasattr(type(m), _FLAG)]


def is_block(module: nn.Module) -> bool:
    """Whether HF's models call the module through `_gradient_checkpointing_func`."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _set_flags(owners: list[nn.Module], every: int | None, config: DistConfig) -> None:
    """Set the flags as the section says. If the model already has some set (every n-th block), they must agree."""
    blocks = [m for m in owners if is_block(m)]
    now = [bool(getattr(m, _FLAG)) for m in blocks]
    wanted = [every is None or i % every == 0 for i in range(len(blocks))]
    if any(now) and not all(now):
        if every is not None and now != wanted:
            path = f"{_SECTION}.every_n_layers"
            if not config.activation_checkpointing.every_n_layers:
                path = "pipeline.activation_checkpoint_interval"
            raise ConfigError(
                Problem(
                    path,
                    str(every),
                    f"differs from the model, where {sum(now)} of {len(now)} blocks are checkpointed (every_n_layers of "
                    "gradient_checkpointing_kwargs)",
                    "Keep one of the two.",
                    config.at_line(path),
                )
            )
        wanted = now
    for module in owners:
        setattr(module, _FLAG, True)
    for module, flag in zip(blocks, wanted, strict=True):
        setattr(module, _FLAG, flag)


def _keywords(function: object) -> dict[str, object] | None:
    """The arguments of torch's checkpoint in the function that HF installed; None for any other function."""
    if function is None or function is checkpoint:
        return {}
    if isinstance(function, BlockCheckpoint):
        return function.keywords
    if isinstance(function, functools.partial) and (function.func is checkpoint or _offloads(function)):
        return dict(function.keywords)
    return None


def _offloads(function: object) -> bool:
    """Whether the function implements HF's `offload=True`: a closure of `activation_checkpointing_enable`, or ours."""
    if isinstance(function, BlockCheckpoint):
        return function.host_copies is not None
    inner = getattr(function, "func", None)
    return "activation_checkpointing_enable" in getattr(inner, "__qualname__", "")


def _function(keywords: dict[str, object], on_host: bool, selective: bool, config: DistConfig) -> BlockCheckpoint:
    if selective and (keywords.get("use_reentrant") or "context_fn" in keywords):
        key = "context_fn" if "context_fn" in keywords else "use_reentrant"
        path = f"{_SECTION}.selective"
        raise ConfigError(
            Problem(
                path,
                "true",
                f"contradicts {key} in gradient_checkpointing_kwargs",
                f"Remove {key} there.",
                config.at_line(path),
            )
        )
    return BlockCheckpoint(keywords, on_host=on_host, selective=selective)
