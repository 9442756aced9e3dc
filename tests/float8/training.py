"""One process under torchao's own conversion, each rank's rows apart, and the same through the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.parallel.pipeline.zoo import VOCAB
from tests.sharding.wires import reference, training


@dataclass(frozen=True)
class Case(reference.Case):
    """A layout of `tests/sharding/wires`, and a recipe."""

    recipe: str = "rowwise"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    compiled: bool = False
    bf16: bool = True
    steps: int = 3
    in_bf16: tuple[int, ...] = ()
    """Steps without float8, of a job that is resumed with another config."""

    @property
    def data(self) -> int:
        """Ranks with rows of their own."""
        return self.world // (self.tp * self.pp * self.cp)


def model_of(case: Case) -> Any:
    """A Llama, a mixture ("qwen3_moe") or one of grouped products ("experts"), whose slices have sizes that the kernels take;
    other families as elsewhere."""
    if case.family not in ("llama", "qwen3_moe", "experts"):
        return training.model_of(case)
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    wide = case.recipe == "mxfp8"
    sizes: dict[str, Any] = {"hidden_size": 128 if wide else 64, "intermediate_size": 128 if wide else 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32 if wide else 16, "use_cache": False}
    sizes |= {"num_hidden_layers": 3, "vocab_size": VOCAB, "tie_word_embeddings": case.tied}
    implementation = "grouped_mm" if case.family == "experts" else "eager"
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "experts_implementation": implementation,
    }
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if case.family == "llama"
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    )
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0))
        if case.checkpointing:
            model.enable_input_require_grads()
    return model.train()


def left_alone(model: nn.Module, path: str, module: nn.Module, multiple: int = 16) -> bool:
    """Written a second time: what torchao's filter function answers for."""
    linears = [p for p, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" not in p]
    adapter = "lora_" in path
    odd = isinstance(module, nn.Linear) and any(size % multiple for size in module.weight.shape)
    return adapter or odd or path in (linears[0], linears[-1]) or (".gate" in f"{path}." and path.endswith(".gate"))


def alone(case: Case) -> dict[str, Any]:
    """torchao's conversion, in one process."""
    model = model_of(case)
    found = {"none": _nothing, "mxfp8": _convert_to_blocks}.get(case.recipe, _convert)(model, case)
    one = reference.Reference(model, replace(case, world=case.data, shards=0), training.optimizer_of)
    for step in range(case.steps):
        with nullcontext() if step not in case.in_bf16 else _unconverted(model):
            one.step(batches_of(case, step))
    return {"losses": one.losses, "norms": one.norms, "weights": dict(one.masters), "chosen": found}


@contextmanager
def _unconverted(model: nn.Module) -> Iterator[None]:
    """Inside, torchao's layers multiply as torch's."""
    layers: list[Any] = [m for m in model.modules() if type(m).__name__ == "Float8Linear"]
    for layer in layers:
        layer.forward = functools.partial(nn.Linear.forward, layer)
    yield
    for layer in layers:
        del layer.forward


def _nothing(model: nn.Module, case: Case) -> list[str]:
    return []


def _convert(model: nn.Module, case: Case) -> list[str]:
    from torchao.float8 import convert_to_float8_training

    config = recipe_of(case.recipe)
    found = [p for p, m in model.named_modules() if isinstance(m, nn.Linear) and not left_alone(model, p, m)]
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, p: p in found)
    if case.family == "experts" and case.recipe != "rowwise_with_gw_hp":
        forward = adapted_by_hand if case.lora else by_hand
        for path, module in model.named_modules():
            if path.endswith(".experts"):
                module.forward = functools.partial(forward, module, product_of(recipe_of("rowwise")))
    return found + _convert_transposed(model, config)


def _convert_to_blocks(model: nn.Module, case: Case) -> list[str]:
    """torchao's MXFP8 layers, whose rows are filled up with zeros."""
    from torchao.prototype.moe_training import mxfp8_linear as mx

    found = [p for p, m in model.named_modules() if isinstance(m, nn.Linear) and not left_alone(model, p, m, 32)]
    for path in found:
        layer = model.get_submodule(path)

        def forward(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            rows = torch.cat([x.flatten(0, -2), x.new_zeros(-x[..., 0].numel() % 32, x.shape[-1])])
            preference, scale = mx.KernelPreference.EMULATED, mx.ScaleCalculationMode.RCEIL
            out = mx._to_mxfp8_then_scaled_mm(rows, layer.weight, preference, scale)
            out = out[: x[..., 0].numel()].view(*x.shape[:-1], -1)
            return out if layer.bias is None else out + layer.bias

        layer.forward = forward  # type: ignore[method-assign, assignment]
    return found


def recipe_of(recipe: str) -> Any:
    """torchao's, emulated and with scales that are powers of two."""
    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, round_scales_to_power_of_2=True)


def product_of(config: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """torchao's function for a linear layer, of rows (M, K) and a weight (N, K)."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    settings = Float8Linear(16, 16, bias=False, config=config).linear_mm_config
    return lambda x, weight: matmul_with_hp_or_float8_args.apply(x, weight.t(), settings, config)


def by_hand(
    experts: Any, product: Callable[..., torch.Tensor], hidden: torch.Tensor, index: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """What the stock forward of gated experts computes, one expert after the other."""
    pairs = [torch.where(index == expert) for expert in range(experts.num_experts)]
    # `hidden` is used once, by expert: its gradient in bf16 is a sum in that order.
    rows = hidden[torch.cat([token for token, _ in pairs])].split([len(token) for token, _ in pairs])
    made = hidden.new_zeros(*index.shape, hidden.shape[-1])
    for expert, (token, choice) in enumerate(pairs):
        if len(token):
            gate, up = product(rows[expert], experts.gate_up_proj[expert]).chunk(2, dim=-1)
            out = product(experts.act_fn(gate) * up, experts.down_proj[expert])
            made = made.index_put((token, choice), out)
    return (made * share.unsqueeze(-1)).sum(1).to(hidden.dtype)


def adapted_by_hand(wrapper: Any, product: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """The same with PEFT's adapters on the stacks, `wrapper` the outermost: their products are in full precision."""
    factors, experts = {}, wrapper
    while hasattr(experts, "base_layer"):
        left, right, scaling = experts.get_delta_factors("default")
        factors[experts.parameter_name] = (left * scaling, right)
        experts = experts.base_layer
    held = {name: list(getattr(experts, name)) for name in factors}
    known = {id(matrix): (name, n) for name, parts in held.items() for n, matrix in enumerate(parts)}

    def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        name, n = known[id(weight)]
        left, right = factors[name]
        return product(x, weight) + (x @ right[n].t()) @ left[n].t()

    stand_in = nn.Module()
    stand_in.__dict__.update(held, num_experts=experts.num_experts, act_fn=experts.act_fn)
    return by_hand(stand_in, both, *given)


def _convert_transposed(model: nn.Module, config: Any) -> list[str]:
    """GPT-2's layers, as torchao's function computes them."""
    found = [(path, m) for path, m in model.named_modules() if type(m).__name__ == "Conv1D"]
    product = product_of(config)
    for _, module in found[1:]:

        def forward(x: torch.Tensor, module: Any = module) -> torch.Tensor:
            return product(x, module.weight.t()) + module.bias

        module.forward = forward
    return [path for path, _ in found[1:]]


def batches_of(case: Case, step: int) -> list[list[reference.Batch]]:
    """`[data rank][microbatch]`."""
    return training.batches_of(replace(case, world=case.data), step)


def config_of(case: Case) -> dict[str, Any]:
    """The file of a case."""
    config = training.config_of(case)
    config["hf_dist"]["fp8"] = {"enabled": True, "recipe": case.recipe, "emulate": True}
    if case.tp > 1:
        config["tensor_parallel"] = {"autotp_size": case.tp}
    if case.pp > 1:
        config["pipeline"] = {"stages": case.pp}
    if case.cp > 1:
        config["sequence_parallel_size"] = case.cp
    if case.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": case.ep}
    if case.compiled:
        config["compile"] = {"enabled": True, "backend": "aot_eager"}
    return config


def on_rank(rank: int, world: int, case: Case) -> dict[str, Any]:
    """The engine."""
    import hf_dist
    from hf_dist.hf.state_dict import full_state_dict

    model = model_of(case)
    before = {n: (id(p), tuple(p.shape)) for n, p in model.named_parameters()}
    kinds = {n: id(m) for n, m in model.named_modules()}
    config = config_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = hf_dist.initialize(model, config=config, optimizer=training.optimizer_of(trained))
    assert case.tp * case.pp * case.ep > 1 or before == {
        n: (id(p), tuple(p.shape)) for n, p in model.named_parameters()
    }
    assert case.pp > 1 or kinds == {n: id(m) for n, m in model.named_modules()}
    losses, norms = [], []
    at = engine.mesh.data.rank
    for step in range(case.steps):
        mine = []
        if case.pp > 1:
            losses.append(float(engine.train_batch(iter(batches_of(case, step)[at]))))
            norms.append(float(engine.get_global_grad_norm()))
            continue
        for batch in batches_of(case, step)[at]:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            mine.append(float(loss.detach()))
        losses.append(sum(mine) / len(mine))
        norms.append(float(engine.get_global_grad_norm()))
    chosen = [n for n, m in engine.sharded.whole.named_modules() if type(m).__name__.startswith(("Float8", "MXFP8"))]
    return {"losses": losses, "norms": norms, "weights": full_state_dict(engine.sharded), "chosen": chosen, "data": at}
