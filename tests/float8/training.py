"""One process under torchao's own conversion, each rank's rows apart, and the same through the engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
    """A Llama whose slices have sizes that cuBLAS takes; other families as elsewhere."""
    if case.family not in ("llama", "qwen3_moe"):
        return training.model_of(case)
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": VOCAB}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
    sizes["tie_word_embeddings"] = case.tied
    experts = {"num_experts": 8, "moe_intermediate_size": 32, "experts_implementation": "eager"}
    model: Any = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
        if case.family == "qwen3_moe"
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0))
        if case.checkpointing:
            model.enable_input_require_grads()
    return model.train()


def left_alone(model: nn.Module, path: str, module: nn.Module) -> bool:
    """Written a second time: what torchao's filter function answers for."""
    linears = [p for p, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" not in p]
    adapter = "lora_" in path
    odd = isinstance(module, nn.Linear) and any(size % 16 for size in module.weight.shape)
    return adapter or odd or path in (linears[0], linears[-1]) or (".gate" in f"{path}." and path.endswith(".gate"))


def alone(case: Case) -> dict[str, Any]:
    """torchao's conversion, in one process."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = model_of(case)
    recipe = Float8LinearConfig.from_recipe_name("rowwise" if case.recipe == "none" else case.recipe)
    config = replace(recipe, emulate=True, round_scales_to_power_of_2=True)
    found = [p for p, m in model.named_modules() if isinstance(m, nn.Linear) and not left_alone(model, p, m)]
    if case.recipe == "none":
        found = []
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, p: p in found)
    found += _convert_transposed(model, config)
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


def _convert_transposed(model: nn.Module, config: Any) -> list[str]:
    """GPT-2's layers, as torchao's function computes them."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    found = [(path, m) for path, m in model.named_modules() if type(m).__name__ == "Conv1D"]
    mm_config = Float8Linear(16, 16, bias=False, config=config).linear_mm_config
    for _, module in found[1:]:

        def forward(x: torch.Tensor, module: Any = module) -> torch.Tensor:
            return matmul_with_hp_or_float8_args.apply(x, module.weight, mm_config, config) + module.bias

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
    chosen = [n for n, m in engine.sharded.whole.named_modules() if type(m).__name__.startswith("Float8")]
    return {"losses": losses, "norms": norms, "weights": full_state_dict(engine.sharded), "chosen": chosen, "data": at}
