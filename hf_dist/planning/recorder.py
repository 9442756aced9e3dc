"""Records what a forward keeps for its backward, on meta, without computing or allocating.

`saved_tensors_hooks` show what autograd saves. Each storage counts once, for the block whose forward saves it first.
Attention counts as a fused kernel: inputs, output and one fp32 number per row and head, no score matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from hf_dist.config import DistConfig
from hf_dist.float8.choice import Choice
from hf_dist.float8.convert import planned_layers
from hf_dist.float8.stacks import matrices_of
from hf_dist.memory.activation.checkpoint import is_block, keep_costly
from hf_dist.memory.activation.tiled_mlp import mlps_of
from hf_dist.parallel.experts.exchange import EvenExchange
from hf_dist.parallel.experts.spread import expert_counts, find_experts
from hf_dist.parallel.pipeline.meta import PRODUCTS, MetaTrace, meta_twin, on_meta, to_meta
from hf_dist.planning.activations import Activations, AttentionCall, Block, Work
from hf_dist.planning.eights import Eights, total
from hf_dist.planning.fused import FusedKernels
from hf_dist.planning.sliced import MetaPeers, Sliced, crossed_backward
from hf_dist.sharding.precision import precision_for
from hf_dist.tensors import pytree

_NO_KERNEL = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten._unsafe_view,
}
"""Operations that only allocate."""
_ALL = -2
"""Marks the return values of `all`."""


def measure_activations(
    model: nn.Module,
    config: DistConfig,
    batch: Mapping[str, object],
    args: Sequence[object] = (),
    slices: Sliced | None = None,
    ep: int = 1,
) -> Activations:
    """Run `model(*args, **batch)` on meta in the dtype of `config`. Local; `model` (real or on meta) stays as it was.

    `batch`: arguments without labels; only its tensor shapes matter. `slices`: what one rank runs of a model whose matrices
    are split. `ep`: over how many ranks its experts are spread. Raises whatever the model raises on meta.
    """
    model = meta_twin(model)
    precision = precision_for(config, model)
    for name, p in model.named_parameters():
        p.data = p.data.to(precision.compute_dtype(name, p.dtype))
    for module in model.modules():
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        ):
            hooks.clear()  # hooks of a sharded model would gather weights
        if hasattr(module, "gradient_checkpointing"):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010
    model.train()
    choice = planned_layers(model, config, expert_counts(model))  # by the experts' own implementation
    _group_experts(model)
    for experts in find_experts(model).values() if ep > 1 else ():
        experts.__dict__["forward"] = EvenExchange(experts, ep)
    peers = slices.cut(model) if slices is not None else None
    trace = _Unpadded(
        list(model.parameters()), read=lambda p: frozenset(), decide=lambda s: None, drawn=lambda: frozenset()
    )
    recorder = _Recorder(model, trace, peers)
    if choice is not None:
        recorder.watch_eights(choice.of_slices())
    arguments, named = to_meta((tuple(args), dict(batch)))
    recorder.ignore((arguments, named))
    with (
        on_meta(trace),
        _fused_attention(recorder),
        recorder,
        saved_tensors_hooks(recorder.pack, lambda nothing: nothing),
    ):
        output = model(*arguments, **named)
    recorder.found.rest.flops += trace.flops - sum(block.work.flops for block in recorder.found.blocks)
    recorder.found.backward = crossed_backward(pytree.leaves(output))
    return recorder.found


def _group_experts(model: nn.Module) -> None:
    """Give each expert its share of the rows: a loop over experts would give each all rows, because meta has no routing."""
    chosen = getattr(getattr(model, "config", None), "_experts_implementation", None)
    can: Any = getattr(model, "_can_set_experts_implementation", lambda: False)
    if chosen == "eager" and can():
        choose: Any = model.set_experts_implementation
        choose("grouped_mm")


class _Unpadded(MetaTrace):
    """Answers "yes" when HF asks whether all mask elements are true, so that HF makes no mask for a batch without padding."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: object = None) -> object:
        """Run one operation on meta."""
        packet = func.overloadpacket
        if packet is torch.ops.aten._local_scalar_dense and _ALL in self.sources(args[0]):
            return True
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return self.mark(out, frozenset({_ALL})) if packet is torch.ops.aten.all else out


def text_batch(model: nn.Module, micro: int, seq: int) -> dict[str, object]:
    """Arguments of a text model for `micro` samples of `seq` tokens, without padding."""
    config: object = getattr(model, "config", None)
    batch: dict[str, object] = {"input_ids": torch.zeros(micro, seq, dtype=torch.long, device="meta")}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"]
    if hasattr(config, "use_cache"):
        batch["use_cache"] = False
    return batch


class _Recorder(TorchDispatchMode):
    """Adds up what is saved, by block. As a dispatch mode it also sees which outputs are costly."""

    def __init__(self, model: nn.Module, trace: MetaTrace, peers: MetaPeers | None = None) -> None:
        super().__init__()
        self.found = Activations()
        self._trace, self._peers = trace, peers
        self._before = 0  # flops at the start of the block
        self._work = self.found.rest
        self._send_from(self.found.rest)
        self._block: Block | None = None
        self._input: int | None = None
        self._seen: set[int] = set()
        self._shared: set[int] = set()
        """Arguments of blocks other than hidden states: masks, positions."""
        self._alive: list[object] = []  # kept alive: a freed storage would pass its number to the next one
        self._kernels = FusedKernels(self._number)
        self.ignore([*model.parameters(), *model.buffers()])
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        weight = getattr(head, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            self.found.vocabulary, self.found.width = weight.shape
            self.found.learns = weight.requires_grad
            self.found.cuts_vocabulary = peers is not None and peers.cuts_vocabulary
            head.register_forward_hook(self._after_head)
        self._cast: int | None = None  # number of the input that was cast to float8 last
        self._before_stacks = 0  # flops
        self._mlp: int | None = None  # number of the input of the running MLP
        for module in mlps_of(model):
            module.register_forward_pre_hook(self._enter_mlp)
            module.register_forward_hook(self._leave_mlp)
        for path, module in model.named_modules():
            if is_block(module):
                module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
                module.register_forward_hook(self._leave)

    def ignore(self, tree: object) -> None:
        """Mark tensors that are not activations."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self._seen.add(self._number(leaf))

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return int(storage._cdata)

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            self._block = Block(path)
            if self.found.blocks:  # it was no end
                self.found.outside += self.found.after
                self.found.after = self.found.largest_after = 0
            self._input = self._cast = None
            self._before = self._trace.flops
            self._send_from(self._block.work)
            self.found.blocks.append(self._block)
            if isinstance(hidden, torch.Tensor):
                self._block.input = hidden.untyped_storage().nbytes()
                self._input = self._number(hidden)
            leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x is not hidden]
            self._shared.update(self._number(leaf) for leaf in leaves)

        return hook

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        assert self._block is not None
        self._block.work.fused += self._kernels.product(_tensors(output))  # blocks are compiled one by one
        self._block.work.flops += self._trace.flops - self._before
        self._block = self._input = None
        self._send_from(self.found.rest)

    def _send_from(self, work: Work) -> None:
        """Count the following collectives and moved bytes for this part of the model."""
        self._work = work
        if self._peers is not None:
            self._peers.crossed, self._peers.early = work.crossed, work.early

    def attends(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, *, causal: bool
    ) -> None:
        """Record one attention call; causal kernels compute half of the scores."""
        work = self.found.rest if self._block is None else self._block.work
        widths = key.shape[-1] + value.shape[-1]
        rows, heads, length, _ = query.shape
        flops = 2 * rows * heads * length * key.shape[-2] * widths // (2 if causal else 1)
        work.attention.append(AttentionCall(rows, length, heads, key.shape[1], widths, query.element_size(), flops))
        self._trace.flops += flops
        work.fused += self._kernels.product([query, key, value], [out])

    def watch_eights(self, choice: Choice) -> None:
        """Count the products of these layers and stacked experts."""
        for layer in choice.chosen.values():
            layer.register_forward_hook(self._after_layer)
        for experts in choice.stacks.values():
            experts.register_forward_pre_hook(self._before_experts)
            experts.register_forward_hook(self._after_experts)

    def _after_layer(self, layer: nn.Module, args: Any, output: object) -> None:
        x: torch.Tensor = args[0]
        weight: Any = layer.weight
        outputs = x.numel() // x.shape[-1] * weight.numel() // x.shape[-1]
        is_new, self._cast = self._number(x) != self._cast, self._number(x)
        more = Eights(2 * x.shape[-1] * outputs, x.numel(), x.numel() if is_new else 0, weight.numel(), outputs)
        self._work.eights = total([self._work.eights, more])

    def _before_experts(self, experts: nn.Module, args: object) -> None:
        self._before_stacks = self._trace.flops

    def _after_experts(self, experts: nn.Module, args: object, output: object) -> None:
        flops, stacks = self._trace.flops - self._before_stacks, list(matrices_of(experts).values())
        rows = flops // max(1, sum(2 * stack.shape[1] * stack.shape[2] for stack in stacks))  # of all experts together
        inputs, outputs = (rows * sum(stack.shape[dim] for stack in stacks) for dim in (2, 1))
        more = Eights(flops, inputs, inputs, sum(stack.numel() for stack in stacks), outputs)
        self._work.experts = total([self._work.experts, more])

    def _enter_mlp(self, module: nn.Module, args: Any) -> None:
        self._mlp = self._number(args[0]) if args and isinstance(args[0], torch.Tensor) else None

    def _leave_mlp(self, module: nn.Module, args: object, output: object) -> None:
        self._mlp = None

    def _after_head(self, module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            self.found.rows += output.numel() // output.shape[-1]
            self.found.logit = output.element_size()

    def pack(self, tensor: torch.Tensor) -> None:
        """Called when autograd saves `tensor`. Saves nothing: a node that holds its own output would never be freed."""
        number = self._number(tensor)
        if self._block is not None:
            self._block.work.again = dict(self._block.work.crossed)
        if number in self._seen:
            return
        self._seen.add(number)
        nbytes = tensor.untyped_storage().nbytes()
        if tensor.shape and tensor.shape[-1] == self.found.vocabulary and self._block is None:
            return
        if number in self._shared:
            self.found.outside += nbytes
            return
        if self._block is None:
            if not self.found.blocks:
                self.found.before += nbytes
                return
            self.found.after += nbytes
            self.found.largest_after = max(self.found.largest_after, nbytes)
            return
        self._block.saved += nbytes
        self._block.largest = max(self._block.largest, nbytes)
        if self._mlp is not None and number != self._mlp:
            self._block.mlp += nbytes
        if number == self._input:
            self._block.saved_input = nbytes

    def add_costly(self, *outputs: torch.Tensor) -> None:
        """Record outputs that selective checkpointing keeps."""
        if self._block is not None:
            self._block.costly += sum(t.numel() * t.element_size() for t in outputs)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Run the operation and record it."""
        out = func(*args, **(kwargs or {}))
        if self._block is not None and keep_costly(None, func, *args, **(kwargs or {})) is CheckpointPolicy.MUST_SAVE:
            self.add_costly(*(t for t in tree_leaves(out) if isinstance(t, torch.Tensor)))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and func._overloadpacket not in _NO_KERNEL:
            self._count(func._overloadpacket in PRODUCTS, _tensors((args, kwargs)), _tensors(out))
        return out

    def _count(self, is_product: bool, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Add the bytes that a kernel moves. Those of a product count with its operations."""
        if is_product:
            self._work.fused += self._kernels.product(given, made)
            return
        tensors = {id(t): t for t in (*given, *made)}
        self._work.moved += sum(t.numel() * t.element_size() for t in tensors.values())
        self._kernels.waits(given, made)


def _tensors(tree: object) -> list[torch.Tensor]:
    """Without parameters."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter)]


class _FusedAttention(torch.autograd.Function):
    """Saves what a fused attention kernel saves, without computing."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (B, H, L, D) in the memory order of (B, L, H, D), as kernels return it, and one number per row."""
        *batch, heads, length, _ = query.shape
        out = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-2, -3)
        rows = query.new_empty(*batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, rows)
        ctx.mark_non_differentiable(rows)
        return out, rows

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> object:
        """Not implemented: nothing is computed."""
        raise NotImplementedError


@contextmanager
def _fused_attention(recorder: _Recorder) -> Iterator[None]:
    before = nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.requires_grad:  # T5's bias: no fused kernel computes its gradient
            return before(query, key, value, attn_mask, *args, **kwargs)
        out, rows = _FusedAttention.apply(query, key, value, attn_mask)
        recorder.attends(query, key, value, out, causal=bool(kwargs.get("is_causal", False)))
        recorder.add_costly(out, rows)
        return out

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = before
