"""How many parameters a model has where each rank holds a slice or a stage of it. Local: any rank may ask alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.param_slice import held_slice

__all__ = ["count_whole", "elements"]

_METHOD = "num_parameters"


def elements(whole: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Elements of all parameters of a model of which slices may be here; other stages' must be in `whole`, at least on meta.

    Source: transformers `ModuleUtilsMixin.num_parameters` and `trainer_pt_utils.get_model_param_count`.
    """
    tables = {id(m.weight) for m in whole.modules() if isinstance(m, nn.Embedding)} if exclude_embeddings else set()
    counted = (p for p in whole.parameters() if id(p) not in tables and (p.requires_grad or not only_trainable))
    return sum(held_slice(p).whole_numel for p in counted)


def count_whole(model: nn.Module, whole: nn.Module) -> None:
    """Let transformers' `num_parameters` of `model` and of the models in it count what other ranks hold, too.

    `whole`: `model`, or what it was before it was cut into stages.
    """
    for name, module in model.named_modules():
        if hasattr(type(module), _METHOD):
            replace_method(module, _METHOD, _counter(whole.get_submodule(name)))


def _counter(whole: nn.Module) -> Callable[..., int]:
    def num_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> int:
        return elements(whole, *args, **kwargs)

    return num_parameters
