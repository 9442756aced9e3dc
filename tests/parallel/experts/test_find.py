"""The structural rule finds the experts that transformers itself can spread; what cannot be spread is refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_dist.config import axes_of, load_config
from hf_dist.dist.axes import Axes
from hf_dist.errors import ConfigError, ModelError
from hf_dist.parallel.experts.spread import check_experts, find_experts
from tests.covering import FULL_GRID
from tests.parity.families import make_model
from tests.sweep.tiny import VARIANTS, tiny_fields, varied

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


FEW = {
    *(
        "DeepseekV3ForCausalLM",
        "Gemma4ForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeForCausalLM",
        "HunYuanMoEV1ForCausalLM",
    ),
    *(
        "Cohere2MoeForCausalLM",
        "DeepseekV4ForCausalLM",
        "KimiLinearForCausalLM",
        "OlmoeForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ),
    *("JambaForCausalLM", "Lfm2MoeForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM"),
    *("InklingForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration"),
    *("AriaForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
}
"""Experts beside shared ones, in some of the layers, in models of several kinds of layers; the modules of all load slowly."""


def classes(mapping: Any) -> list[str]:
    """Classes whose configuration names a plan for experts; a few of them, all with the full grid."""
    values = {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}
    some = sorted(values if FULL_GRID else values & FEW)
    return [name for name in some if hasattr(tf, name) and _has_plan(getattr(tf, name))]


def _has_plan(cls: Any) -> bool:
    configs = [cls.config_class, *getattr(cls.config_class, "sub_configs", {}).values()]
    return any("ep_dispatch_experts" in (getattr(c, "base_model_ep_plan", None) or {}).values() for c in configs)


def on_meta(name: str) -> Any:
    """A tiny model without memory; None where no variant of the fields builds."""
    cls = getattr(tf, name)
    for variant in VARIANTS:
        try:
            with torch.device("meta"):
                return cls(cls.config_class(**varied(tiny_fields(cls.config_class()), variant)))
        except Exception:
            continue
    return None


@pytest.mark.parametrize("kind", ["causal", "vision"])
def test_the_rule_finds_what_transformers_can_spread(kind: str) -> None:
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == "causal" else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    wrong, compared = {}, 0
    for name in classes(mapping):
        model = on_meta(name)
        if model is None:
            continue
        found = {_NUMBER.sub("*", path) for path in find_experts(model)}
        there = {_NUMBER.sub("*", path) for path, _ in model.named_modules()}  # a tiny Gemma4 has no experts
        plan = {path for path, what in (model.ep_plan or {}).items() if what == "ep_dispatch_experts"} & there
        compared += 1
        if found != plan:
            wrong[name] = (sorted(found), sorted(plan))
    assert wrong == {}
    least = {"causal": 31, "vision": 4} if FULL_GRID else {"causal": 15, "vision": 5}
    assert compared >= least[kind]


def mesh_of(ranks: int) -> Any:
    """As far as it is asked."""
    return SimpleNamespace(axes=Axes({"dp_shard": ranks, "ep": ranks}))


@pytest.mark.parametrize(("tp", "here", "ep"), [(1, 8, 8), (2, 8, 4), (4, 8, 2), (8, 8, 1), (2, None, 16), (3, 8, 2)])
def test_auto_keeps_the_ranks_of_an_expert_line_on_a_machine(tp: int, here: int | None, ep: int) -> None:
    spread = {"expert_parallel": {"enabled": True, "autoep_size": "auto"}, "tensor_parallel": {"autotp_size": tp}}
    axes = axes_of(
        load_config({"train_micro_batch_size_per_gpu": 1, **spread}),
        32 * (3 if tp == 3 else 1),
        here=here,
        experts=[128],
    )
    assert axes.size("ep") == ep
    if here is not None and here % tp == 0:
        assert {rank // here for rank in axes.line("ep", 0)} == {0}


def test_ranks_that_do_not_divide_the_experts_are_refused_with_divisors() -> None:
    with pytest.raises(ConfigError) as caught:
        check_experts(make_model("qwen3_moe"), mesh_of(3))
    text = str(caught.value)
    assert "expert_parallel.autoep_size" in text
    assert "does not divide the 8 experts of model.layers.0.mlp.experts (Qwen3MoeExperts)" in text
    assert "Use one of 1, 2, 4, 8." in text


@pytest.mark.parametrize(
    ("family", "says"),
    [("llama", "it has none"), ("switch", "SwitchTransformersExperts")],
)
def test_a_model_without_stacked_experts_is_refused_by_name(family: str, says: str) -> None:
    if family == "llama":
        model = make_model("llama")
    else:
        config = tf.SwitchTransformersConfig(
            d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, vocab_size=50, num_experts=4
        )
        model = tf.SwitchTransformersForConditionalGeneration(config)
    with pytest.raises(ModelError, match=says):
        check_experts(model, mesh_of(2))


def test_quantised_experts_are_refused_by_name() -> None:
    model = make_model("qwen3_moe")
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    says = r"the experts of model\.layers\.0\.mlp\.experts are quantised \(Qwen3MoeExperts\).*load the model in bf16"
    with pytest.raises(ModelError, match=says):
        check_experts(model, mesh_of(2))
