"""A model as one rank of a split runs it: parameters sliced in place, crossings added to its own modules by hooks.

Nothing is wrapped or replaced. A parameter keeps its object and name; its `shape` becomes that of the slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.memory.loss.lazy_logits import LazyLogits
from hf_dist.memory.loss.vocabulary import VocabularySplit
from hf_dist.model_config import field, text_config
from hf_dist.parallel.tensor import tp_collectives
from hf_dist.parallel.tensor.head import WholeHead
from hf_dist.parallel.tensor.overlap import Crossed, splits_backward
from hf_dist.parallel.tensor.peers import Peers
from hf_dist.parallel.tensor.plan import (
    COLUMN,
    GATHERED,
    ROW,
    WHOLE_EXPERTS,
    SplitPlan,
    output_and_input,
    pattern_of,
    stock_name,
    unwrapped,
)
from hf_dist.parallel.tensor.products import after, before, experts, look_up, rotary_part, sum_then_bias
from hf_dist.parallel.tensor.sequence import Regions, Stack, find_regions, recorded_routers, routers_in
from hf_dist.parallel.tensor.sizes import local_sizes
from hf_dist.parallel.tensor.slices import Kept, kept_slices
from hf_dist.parallel.tensor.whole_experts import compute_own_rows
from hf_dist.tensors.random_streams import Streams, drops
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["SplitModel"]

Keep = Callable[[nn.Parameter, TensorSlice], None]


def _forgetting(split: weakref.ref[SplitModel]) -> Callable[[torch.Tensor], None]:
    def hook(grad: torch.Tensor) -> None:
        if (found := split()) is not None:
            found._crossed.clear()

    return hook


class SplitModel:
    """One rank's part of a model, and the crossings on its modules. The modules hold it; it holds none of them."""

    def __init__(
        self,
        model: nn.Module,
        plan: SplitPlan,
        peers: Peers,
        *,
        keep: Keep,
        blocks: Mapping[str, nn.Module],
        overlap: bool = False,
    ) -> None:
        """Split `model` in place. Local; the same on every rank, except for the rank's part.

        `keep(param, slice)` slices one parameter; `blocks`: the repeated parts of `model`, by path; `overlap`: start sums of
        backward before weight gradients are computed.
        Raises `ModelError` for sizes that do not divide, before anything is split.
        """
        self.plan = plan
        self.peers = peers
        self._model = weakref.ref(model)
        base, self.prefix = unwrapped(model)
        self.kept = kept_slices(model, plan, peers.size, peers.rank)
        by_id = {id(p): self.kept[name] for name, p in model.named_parameters() if name in self.kept}
        self._by_alias = {
            name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in by_id
        }
        self.is_whole = False
        """Whether every parameter is temporarily whole, so that nothing crosses."""
        self._crossed: dict[int, tuple[Any, Crossed]] = {}
        self._streams = Streams(peers.rank) if drops(model) else None
        modules = dict(base.named_modules())
        self._readers = self.products_together(modules) if overlap else {}
        """Module with a column product -> the modules that read the same input, by their place in the model."""
        self._sizes = local_sizes(modules, plan, peers.size, self._slices_of)
        names = [
            name.removeprefix(self.prefix) for name, block in blocks.items() if not isinstance(block, nn.Embedding)
        ]
        self.regions = find_regions(modules, plan.modules, names) if plan.sequence else Regions()
        named = dict(model.named_parameters())
        self.shares = {name: self._share(name, p) for name, p in named.items()}
        """Elements of each whole parameter, and whether it is split."""
        self.summed = {name for name in named if self._is_partial(name.removeprefix(self.prefix))}
        """Whole parameters for which each rank has a part of the gradient."""
        for name in self.kept:
            keep(named[name], self.kept[name].held)
        self.compute_with_whole(False)
        self.vocabulary: VocabularySplit | None = None
        """Split of the head's logits, if they are split."""
        self._stacks: dict[str, Stack] = {}
        self._install(model, base, modules, blocks)

    def _install(
        self, model: nn.Module, base: nn.Module, modules: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module]
    ) -> None:
        """Install the crossings, by hooks."""
        _, head = output_and_input(base)
        for name, module in modules.items():
            style = self._style(name)
            if style is not None:
                self._cross(name, module, style, base, is_head=module is head)
        self._install_stacks(modules)
        model.register_forward_pre_hook(self._refuse_attentions, with_kwargs=True)
        if self.plan.sequence:
            model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
        for module in dict.fromkeys([*blocks.values(), model]):  # nothing reads their inner activations after them
            module.register_forward_hook(self._forget, always_call=True)

    # --------------------------------------------------------------------- sizes

    def _slices_of(self, module: str) -> Kept | None:
        """The kept part of a module's weight."""
        names = (f"{self.prefix}{module}.weight", f"{self.prefix}{module}.base_layer.weight")
        return next((self._by_alias[name] for name in names if name in self._by_alias), None)

    def compute_with_whole(self, is_whole: bool) -> None:
        """Set whether parameters are whole: then nothing crosses, and modules report the sizes of the whole model. Local."""
        self.is_whole = is_whole
        for size in self._sizes:
            size.show(is_whole)

    def _off(self) -> bool:
        return self.is_whole

    def _refuse_attentions(self, model: object, args: object, kwargs: dict[str, object]) -> None:
        """Refuse attention weights, which a loss would take for those of all heads."""
        asked = kwargs.get("output_attentions")
        config: object = getattr(model, "config", None)
        if not self._off() and (getattr(config, "output_attentions", False) if asked is None else asked):
            raise ModelError(
                f"tensor_parallel.autotp_size: output_attentions asks {type(model).__name__} for the attention of all heads, "
                "and a rank has the weights of its heads only. Remove it, or the key."
            )

    def continues(self, block: str, args: object, kwargs: object) -> None:
        """A pipeline stage begins at `block`, called with whole hidden states that parts of a sequence replace. Local."""
        if stack := self._stacks.get(block.removeprefix(self.prefix)):
            stack.continues(args, kwargs)

    # -------------------------------------------------------------- gradients

    def _is_partial(self, name: str) -> bool:
        """Whether each rank has a part of the gradient of a stock parameter that is not split."""
        if pattern_of(stock_name(name)) in self.plan.summed or self.regions.has_parts(name):
            return True
        part, _, rest = name.partition(".lora_")
        owner = part if rest else name.rpartition(".")[0]
        style = self.plan.modules.get(pattern_of(stock_name(owner)))
        if style == WHOLE_EXPERTS:  # from its own rows
            return True
        if style is None or not rest:
            return False
        return rest.startswith("A." if style in COLUMN else "B.") and style in (COLUMN | ROW)

    # --------------------------------------------------------------- crossings

    def _forget(self, module: nn.Module, args: object, output: object) -> None:
        self._crossed.clear()
        if self._streams is not None:
            self._streams.alike()

    def products_together(self, modules: Mapping[str, nn.Module]) -> dict[int, list[weakref.ref[nn.Module]]]:
        """Id of a product whose weight gradient can wait for a sum -> the products that read the same input."""
        by_parent: dict[str, list[nn.Module]] = {}
        for name, module in modules.items():
            if self._style(name) in COLUMN - GATHERED and splits_backward(module):
                by_parent.setdefault(name.rpartition(".")[0], []).append(module)
        return {id(one): [weakref.ref(m) for m in together] for together in by_parent.values() for one in together}

    def _style(self, name: str) -> str | None:
        return self.plan.modules.get(pattern_of(name)) if stock_name(name) == name else None

    def replicated(self, tensor: torch.Tensor, module: nn.Module | None = None) -> torch.Tensor:
        """`tensor` as the input of split products, I -> R: one crossing for all that read the same tensor (q, k, v; gate, up).

        `module`: the product that asks.
        """
        if not torch.is_grad_enabled() or not tensor.requires_grad:
            return tensor
        known = self._crossed.get(id(tensor))
        if known is None or known[0]() is not tensor:
            readers = [reader for ref in self._readers.get(id(module), ()) if (reader := ref()) is not None]
            crossed = (
                tp_collectives.to_replicated_early(tensor, self.peers, readers)
                if readers
                else Crossed(tp_collectives.to_replicated(tensor, self.peers))
            )
            known = self._crossed[id(tensor)] = weakref.ref(tensor), crossed
            # A recomputed block ends by an exception, without its hooks, so the crossing would keep the block's graph.
            crossed.tensor.register_hook(_forgetting(weakref.ref(self)))
        return known[1].entering(module)

    def _enter_columns(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...] | None:
        return None if self.is_whole or not args else (self.replicated(args[0], module), *args[1:])

    def _install_stacks(self, modules: Mapping[str, nn.Module]) -> None:
        """Install the crossings of regions, if there are any."""
        regions = self.regions
        recorded = recorded_routers(modules.values()) if regions.stacks else {}
        for owner, blocks in regions.stacks.items():
            stack = Stack(self.peers, self._off, self._streams)
            caller = modules[owner.rpartition(".")[0]] if isinstance(modules[owner], nn.ModuleList) else modules[owner]
            stack.install(caller, [modules[block] for block in blocks])
            self._stacks |= dict.fromkeys(blocks, stack)
            for block in blocks:
                for name, child in modules[block].named_children():
                    path = f"{block}.{name}"
                    inside = (modules[n] for n in modules if n == path or n.startswith(f"{path}."))
                    if readers := [m for m in inside if id(m) in self._readers]:
                        stack.read_by(child, readers)
                    if path in regions.children:
                        stack.region(child)
                        for router, index in routers_in(child, recorded):
                            stack.equal_gradient(router, index)
                    elif path in regions.products:
                        stack.ends(child) if self.plan.modules[pattern_of(path)] in ROW else stack.begins(child)
                    elif path in regions.whole:
                        stack.whole(child)
                    else:
                        self._install_between(stack, path, child, recorded)

    def _install_between(self, stack: Stack, path: str, child: nn.Module, recorded: Mapping[type, int]) -> None:
        """For a child between regions: routers with collected logits, and experts, which see all tokens in plain forwards."""
        for router, index in routers_in(child, recorded):
            stack.whole_rows(router, index)
        for name, module in child.named_modules():
            if self._style(f"{path}.{name}" if name else path) == WHOLE_EXPERTS:
                compute_own_rows(module, self.peers, lambda: stack.off and not self.is_whole, in_region=False)

    def _install_streams(self, module: nn.Module, style: str, *, is_region: bool) -> None:
        """Draw alike up to a column product, on each rank for its own columns after it, and alike again after a row product.

        See [Note: streams]. `is_region`: a region of the stack begins or ends here and decides what is drawn.
        """
        streams = self._streams
        if streams is None or style in GATHERED:
            return

        def switch(to: Callable[[], None]) -> Callable[..., None]:
            return lambda module, *_: to() if module.training and not self.is_whole else None

        if style in COLUMN or style == "packed_colwise":
            module.register_forward_pre_hook(switch(streams.alike))
            module.register_forward_hook(switch(streams.own))
        elif style in ROW or style in ("moe_tp_experts", "all_reduce"):
            module.register_forward_pre_hook(switch(streams.own))
            if not is_region:
                module.register_forward_hook(switch(streams.alike))

    def _inside(self, module: nn.Module, style: str, name: str) -> None:
        """For a module inside a region: its input is R or V, its output V or P."""
        peers = self.peers
        if style in GATHERED:
            if next(module.parameters(), None) is not None:  # else it belongs to another pipeline stage
                width = self._whole_width(name)[0]
                after(module, self._off, lambda out: tp_collectives.whole_columns_replicated(out, peers, width))
        elif style in ROW:
            if style != "rowwise":
                before(module, self._off, lambda x: x[..., slice(*tp_collectives.columns_of(peers, x.shape[-1]))])
            if peers.rank > 0:  # the end of the region sums the ranks' outputs
                sum_then_bias(module, peers, self._off, add=False)
        elif style == "moe_identity_expert":
            before(module, self._off, lambda x: x / peers.size)

    def _cross(self, name: str, module: nn.Module, style: str, base: nn.Module, *, is_head: bool) -> None:
        peers = self.peers
        self._install_streams(module, style, is_region=name in self.regions.products)
        if style == WHOLE_EXPERTS:
            in_region = self.regions.contains(name)
            if in_region or not self.regions.has_parts(name):
                compute_own_rows(module, peers, lambda: not self.is_whole, in_region=in_region)
            return
        if self.regions.contains(name) or name in self.regions.products:
            self._inside(module, style, name)
            return
        if style in COLUMN or style == "packed_colwise":
            module.register_forward_pre_hook(self._enter_columns)
            if style in GATHERED:
                self._gather(name, module, is_head=is_head)
        elif style in ROW:
            if style != "rowwise":
                before(module, self._off, lambda x: tp_collectives.to_columns(x, peers, x.shape[-1]))
            sum_then_bias(module, peers, self._off)
        elif style == "embedding_rowwise":
            if (kept := self._slices_of(name)) is not None:
                look_up(module, peers, self._off, kept)
        elif style == "embedding_colwise":
            self._gather(name, module, is_head=False)
        elif style == "mla_kv_a_proj":
            config: object = base.config
            rotary_part(module, peers, self._off, field(text_config(config), "qk_rope_head_dim"))
        elif style == "moe_tp_experts":
            experts(module, peers, self._off, self.replicated)
        elif style == "moe_identity_expert":
            before(module, self._off, lambda x: x / peers.size)
        elif style == "all_reduce":
            after(module, self._off, lambda out: tp_collectives.to_invariant(out, peers))

    def _gather(self, name: str, module: nn.Module, *, is_head: bool) -> None:
        """V -> I. Logits stay split until something other than the loss reads them."""
        if next(module.parameters(), None) is None:  # belongs to another pipeline stage
            return
        width, first = self._whole_width(name)
        peers = self.peers

        def gather(output: torch.Tensor) -> torch.Tensor:
            return tp_collectives.whole_columns(output, peers, width)

        if is_head:
            self.vocabulary = VocabularySplit(peers, first, width, gather, lambda: not self.is_whole)
            model = self._model()
            if isinstance(module, nn.Linear) and model is not None:
                self._head = WholeHead(model, module, peers, width, self._off)
        after(module, self._off, lambda out: out if isinstance(out, LazyLogits) else gather(out))

    def _whole_width(self, name: str) -> tuple[int, int]:
        """(columns of a module's whole output, the first local one)."""
        kept = self._slices_of(name)
        if kept is None:
            raise ModelError(
                f"tensor_parallel: the outputs of {name} are joined, and its weight is not cut: PEFT trains a copy of it "
                "(modules_to_save, trainable_token_indices). Leave it out of those, or use ZeRO-3 instead of tensor_parallel."
            )
        dim = next(d for d, some in enumerate(kept.held.ranges) if some != ((0, kept.held.whole[d]),))
        return kept.held.whole[dim], kept.held.ranges[dim][0][0]

    # -------------------------------------------------------------- what it is

    def _share(self, name: str, param: nn.Parameter) -> tuple[int, bool]:
        return param.numel(), name in self.kept

    def describe(self) -> str:
        """For example `2 ranks; 99.6% of the parameters are split (tp_plan of LlamaForCausalLM)`."""
        cut = sum(numel for numel, is_cut in self.shares.values() if is_cut)
        regions = "; parts of the sequence between regions" if self.plan.sequence else ""
        share = cut / max(sum(numel for numel, _ in self.shares.values()), 1)
        return f"{self.peers.size} ranks; {share:.1%} of the parameters are split ({self.plan.source}){regions}"


def _refuse_hidden_states(model: object, args: object, kwargs: dict[str, object]) -> None:
    """Refuse hidden states in training: between regions only a rank's part of the sequence would be recorded."""
    asked = kwargs.get("output_hidden_states")
    config: object = getattr(model, "config", None)
    if torch.is_grad_enabled() and (getattr(config, "output_hidden_states", False) if asked is None else asked):
        raise ModelError(
            "output_hidden_states in training: with hf_dist.sequence_regions each rank has a part of the sequence between the "
            'blocks. Set "hf_dist": {"sequence_regions": false}.'
        )
