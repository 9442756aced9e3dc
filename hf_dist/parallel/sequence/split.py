"""A model whose forward runs on a part of each sequence: hooks at its entry and exit. The model is not replaced.

The hook before the forward gets whole rows, equal on every rank that shares them, and passes on this rank's positions. The
hook after it makes the outputs whole. So the code outside (Trainer, TRL, metrics, a custom loss) sees one process's model,
and all ranks compute the same loss. Weights, gradients and optimizer are not affected.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_dist.dist.mesh import MeshAxis, ParallelMesh
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.model_config import field, text_config, values
from hf_dist.parallel.sequence.forward import SequenceAxes, current, enter
from hf_dist.parallel.sequence.inputs import OTHER_KINDS, Arguments, Cut, bound, cut_inputs
from hf_dist.parallel.sequence.layout import layout_for
from hf_dist.parallel.sequence.outputs import whole_outputs
from hf_dist.parallel.sequence.pairs import cut_pair, hold_pair, is_pair
from hf_dist.parallel.sequence.whole_rows import hold_whole_rows
from hf_dist.tensors import pytree
from hf_dist.tensors.random_streams import Streams, drops

_KEY = "sequence_parallel_size"


class SplitSequence:
    """Hooks of one model. Parts run through all of it, or its backbone, or the backbone without its token pooling."""

    def __init__(self, model: nn.Module, axes: SequenceAxes) -> None:
        """Install the hooks. Raises `ModelError` for a model whose config says that it cannot be split."""
        from hf_dist.parallel.sequence import attention  # imports transformers, which other kinds of models do not need

        self.axes = axes
        self.model = _inner(model)
        refuse_by_config(self.model)
        self.is_mean = False
        """Whether the model's loss ignores `num_items_in_batch`."""
        self.knows_packing = True
        """Whether the model separates packed documents by their positions; some of HF's models do not."""
        self.enabled = True
        self.num_calls = 0
        """Number of attention calls on parts of a sequence."""
        region = _region(model, self.model)
        self.at_once = region is not model or _pools(region)
        self.verified: frozenset[str] | None = None
        """Tensor arguments that the model was tried with on parts; None before that. Others are refused when they come."""
        self.parts: dict[str, str] = {}
        """Outputs that are not those of the whole -> what differs. They are refused when they are read."""
        self.refused: dict[str, str] = {}
        """Arguments that it was tried with and is another model with -> what differs."""
        self.arguments = Arguments.of(region, region if self.at_once else self.model)
        self.num_mixers = hold_whole_rows(self.model, axes, self._count_call)
        """Number of layers that mix positions by heads or channels instead of attention."""
        self.is_pair = is_pair(self.model)
        """Whether the model is an encoder and a decoder."""
        if self.is_pair:
            hold_pair(self.model, axes)
        self._documents_of = attention.documents_of
        self._cut: Cut | None = None
        self._register = attention.register
        self.kernel = _set_attention(self.model, attention.register)
        self._streams = Streams(axes.cp.rank) if drops(model) else None
        for module in self.model.modules():
            if _looks_at_longest(module):
                module.register_forward_pre_hook(_weakly(self._with_whole_positions), with_kwargs=True)
                module.register_forward_hook(_weakly(self._own_frequencies))
            if _counts_positions(module):
                module.register_forward_pre_hook(_weakly(self._with_own_positions), with_kwargs=True)
        region.register_forward_pre_hook(_weakly(self._before), with_kwargs=True)
        _last_of(region).register_forward_hook(_weakly(self._make_whole))
        region.register_forward_hook(_weakly(self._leave), always_call=True)

    def describe(self) -> str:
        """One line for the start-up report."""
        layout = self.axes.layout
        return f"each row on {layout.size} ranks ({layout.describe()}), attention by {self.kernel}"

    def _count_call(self) -> None:
        self.num_calls += 1

    @contextmanager
    def attending_by(self, kernel: str) -> Iterator[None]:
        """Inside, forwards attend by another kernel."""
        own, other = (self._register(name) for name in (self.kernel, kernel))
        _rename(self.model, own, other)
        try:
            yield
        finally:
            _rename(self.model, other, own)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, forwards run on whole rows."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, object]) -> object:
        given = bound(self.arguments, args, kwargs)
        if not self.enabled or current() is not None or _has_cache(given):
            return None
        self._refuse_unverified(given)
        config = self.model.config
        caches = given.get("use_cache")
        caches = bool(getattr(config, "use_cache", False) if caches is None else caches)
        if module.training and any(getattr(m, "gradient_checkpointing", False) for m in module.modules()):
            caches = False  # HF's default
        documents_of = self._documents_of if self.knows_packing and not caches else None
        if self.is_pair:
            cut = cut_pair(self.model, given, self.axes)
        else:
            cut = cut_inputs(self.arguments, given, self.axes, documents_of)
        self._cut = cut
        enter(cut.forward)
        if self._streams is not None and module.training:
            self._streams.own()  # the tokens differ from other ranks'
        return (), cut.kwargs

    def _refuse_unverified(self, given: Mapping[str, object]) -> None:
        name = type(self.model).__name__
        for key, value in given.items():
            is_given = value is not None and value is not False
            if key in self.refused and is_given:
                raise ModelError(
                    f"{_KEY}: {name} is another model on parts of a sequence when it is called with {key} "
                    f"({self.refused[key]}). Leave {key} out, or remove the key."
                )
            # In a list or an output, too: features of images that were computed before.
            is_rows = any(isinstance(x, torch.Tensor) and x.dim() > 0 for x in pytree.leaves(value))
            if self.verified is not None and is_rows and key not in self.verified and key not in OTHER_KINDS:
                raise ModelError(
                    f"{_KEY}: {name} was called with {key}, and whether parts of it belong to parts of the rows is not known. "
                    f"Leave {key} out, or remove the key."
                )

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        """Runs also if the forward has raised."""
        if self._cut is not None:
            self._cut = None
            enter(None)
            if self._streams is not None:
                self._streams.alike()

    def _make_whole(self, module: nn.Module, args: object, output: object) -> object:
        cut = self._cut
        if cut is None:
            return None
        self._leave(module, args, output)
        self.num_calls += cut.forward.num_calls
        return whole_outputs(output, cut, is_mean=self.is_mean, at_once=self.at_once, parts=self.parts)

    def _with_whole_positions(self, module: nn.Module, args: Any, kwargs: dict[str, object]) -> object:
        """Compute frequencies that depend on the batch's longest position from the whole rows."""
        forward = current()
        if forward is None:
            return None
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": forward.position_ids}
        return (args[0], forward.position_ids, *args[2:]), kwargs

    def _with_own_positions(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> object:
        """Pass positions of the whole row to learned embeddings, which count from the first token that they see."""
        forward = current()
        given = args[2] if len(args) > 2 else kwargs.get("position_ids")
        if forward is None or (given is not None and given.dim() > 1):
            return None
        own = forward.own.clamp(max=forward.real_length - 1)  # learned positions may end with the row
        return args[:2], {**kwargs, "position_ids": own}

    def _own_frequencies(self, module: nn.Module, args: object, output: Any) -> object:
        forward = current()
        return None if forward is None else tuple(t[:, forward.own] for t in output)


def _has_cache(given: dict[str, object]) -> bool:
    """Whether a call belongs to a generation: it has states of earlier tokens, or asks for them (parts of a row have none)."""
    return given.get("use_cache") is True or any(
        given.get(name) is not None for name in ("past_key_values", "cache_params", "encoder_outputs")
    )


def _weakly(method: Callable[..., object]) -> Callable[..., object]:
    """A hook that ends with its object. A copy of the model shares it instead of copying process groups."""
    reference = weakref.WeakMethod(method)

    def hook(*args: object, **kwargs: object) -> object:
        found = reference()
        return None if found is None else found(*args, **kwargs)

    return hook


def sequence_axes(mesh: ParallelMesh, model: nn.Module, wanted: str | tuple[int, int]) -> SequenceAxes:
    """How the ranks of `cp` share a sequence of this model. Collective over world: creates groups if two exchanges are mixed.

    Raises `ConfigError` if `wanted` does not fit the model's heads.
    """
    heads = heads_of(_inner(model)) // math.gcd(heads_of(_inner(model)), mesh.tp.size)
    layout = layout_for(mesh.cp.size, heads, wanted)
    if layout is None:
        raise _misfit(mesh.cp.size, heads, wanted)
    lines = mesh.axes.lines("cp")
    n = layout.ulysses
    neighbours = [line[i * n : (i + 1) * n] for line in lines for i in range(layout.outer)]
    across = [line[i::n] for line in lines for i in range(n)]
    if layout.outer == 1:
        return SequenceAxes(mesh.cp, mesh.cp, MeshAxis("cp", 1, 0, None), layout)
    if n == 1:
        return SequenceAxes(mesh.cp, MeshAxis("cp", 1, 0, None), mesh.cp, layout)
    return SequenceAxes(mesh.cp, mesh.groups.connected("cp", neighbours), mesh.groups.connected("cp", across), layout)


def split_sequence(model: nn.Module, mesh: ParallelMesh, wanted: str | tuple[int, int]) -> SplitSequence | None:
    """Split the sequences of `model` over the ranks of `cp`; None if `cp` is 1. Every rank calls it, after sharding.

    `wanted`: `hf_dist.sequence_parallel`. Raises `ModelError` or `ConfigError` for models that cannot be split.
    """
    if mesh.cp.size == 1:
        return None
    return SplitSequence(model, sequence_axes(mesh, model, wanted))


def as_split(model: nn.Module, batch: Callable[[], Mapping[str, object]]) -> Callable[[], Mapping[str, object]]:
    """Makes `batch()` plus the arguments that a forward on parts adds, on whole rows, to plan a pipeline with.

    Local. Raises `ModelError` on every rank for a model whose parts cannot be stages; only one rank calls the result.
    """
    if is_pair(_inner(model)):
        raise ModelError(
            f"{_KEY}: {type(model).__name__} has an encoder and a decoder, whose rows are not split in a pipeline. Remove "
            "pipeline.stages or the key."
        )
    return functools.partial(_with_arguments_of_parts, model, batch)


def _with_arguments_of_parts(model: nn.Module, batch: Callable[[], Mapping[str, object]]) -> Mapping[str, object]:
    given = batch()
    arguments = Arguments.of(model, _inner(model))
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return given
    extra: dict[str, object] = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1])[None],
    }
    if "labels" in given and arguments.shifts:
        extra["shift_labels"] = given["labels"]
    if "labels" in given:
        extra["num_items_in_batch"] = torch.tensor(ids.numel())
    new = {name: value for name, value in extra.items() if name not in given and arguments.takes(name)}
    split: Mapping[str, object] = pytree.copied(given, **new)
    return split


def _misfit(size: int, heads: int, wanted: str | tuple[int, int]) -> ConfigError:
    path, fits = "hf_dist.sequence_parallel", [n for n in range(1, size + 1) if size % n == 0 and heads % n == 0]
    if isinstance(wanted, tuple):
        found = f'{{"ulysses": {wanted[0]}, "ring": {wanted[1]}}}'
        expected = f'is not {size} ranks ({_KEY}) with a divisor of the model\'s {heads} heads for "ulysses"'
    else:
        found, expected = wanted, f"cannot share {heads} heads among the {size} ranks of {_KEY}"
    best = max(fits)
    remedy = (
        f'Use "auto" (ulysses {best} x gather {size // best} here), "gather" or "ring", or a divisor of {heads} ranks.'
    )
    return ConfigError(Problem(path, found, expected, remedy))


_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")


def heads_of(model: nn.Module) -> int:
    """Query heads of a model's attention; 1 if its config does not tell."""
    config: object = getattr(model, "config", None)
    found = [n for name in _HEADS for n in values(text_config(config), name)]
    counts = [n for n in found if isinstance(n, int)]
    return math.gcd(*counts) if counts else 1


def refuse_by_config(model: nn.Module) -> None:
    """Raise `ModelError` if a model's config shows a use of the sequence that cannot be split."""
    config: object = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not hasattr(config, "_attn_implementation"):
        raise ModelError(
            f"{_KEY}: {name} is not a transformers model, and its attention cannot be reached. Remove the key."
        )
    if field(text_config(config), "vocab_size") is None:
        raise ModelError(
            f"{_KEY}: {name} reads no tokens of a vocabulary, and only rows of tokens are split. Remove the key."
        )


def _last_of(region: nn.Module) -> nn.Module:
    """The module whose outputs become whole: only the layers of `region` if it pools their tokens afterwards."""
    layers = getattr(region, "encoder", None)
    return layers if _pools(region) and isinstance(layers, nn.Module) else region


def _pools(region: nn.Module) -> bool:
    """Whether a module makes one vector of a row's tokens (BERT's, of the first one)."""
    return getattr(region, "pooler", None) is not None


def _inner(model: nn.Module) -> nn.Module:
    """The HF model beneath an adapter."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _has_vocabulary_head(model: nn.Module) -> bool:
    find = getattr(model, "get_output_embeddings", None)
    return find is not None and isinstance(find(), nn.Module)


def _backbone(model: nn.Module) -> nn.Module:
    return getattr(model, "base_model", model)


def _region(model: nn.Module, inner: nn.Module) -> nn.Module:
    """The whole model if its loss is per token; otherwise the backbone, whose hidden states a head reads whole.

    A head of pretraining reads pooled tokens beside those of each position.
    """
    backbone = _backbone(inner)
    return model if _has_vocabulary_head(inner) and not _pools(backbone) else backbone


def _looks_at_longest(module: nn.Module) -> bool:
    types = getattr(module, "rope_type", None)
    if types is None or "position_ids" not in inspect.signature(module.forward).parameters:
        return False
    names = types.values() if isinstance(types, dict) else [types]
    return any("dynamic" in str(name) or name == "longrope" for name in names)


def _counts_positions(module: nn.Module) -> bool:
    """Whether an embedding of positions counts them from its input's length unless they are passed (BART's decoders)."""
    if not isinstance(module, nn.Embedding):
        return False
    names = list(inspect.signature(module.forward).parameters)
    return names[1:] == ["past_key_values_length", "position_ids"] and names[0] != "attention_mask"


def _set_attention(model: nn.Module, register: Any) -> str:
    """Set hf_dist's name in every config of the model, for the previous kernel."""
    config: Any = model.config
    kernel: str = config._attn_implementation
    prefix = "hf_dist_"
    if kernel.startswith(prefix):
        return kernel.removeprefix(prefix)
    _rename(model, kernel, register(kernel))
    return kernel


def _rename(model: nn.Module, kernel: str, name: str) -> None:
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for each in {id(each): each for each in configs}.values():
        if getattr(each, "_attn_implementation", None) == kernel:
            each._attn_implementation_internal = name


__all__ = ["SplitSequence", "as_split", "heads_of", "sequence_axes", "split_sequence"]
