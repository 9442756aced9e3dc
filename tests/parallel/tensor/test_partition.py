"""Plans that a user writes as DeepSpeed's regular expressions: equal to the model's own, by segments, refused by path."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hf_dist.errors import ConfigError, ModelError
from hf_dist.parallel.tensor.choose import choose_plan
from hf_dist.parallel.tensor.partition import plan_of_config
from hf_dist.parallel.tensor.plan import Cut, SplitPlan, plan_of_model
from hf_dist.sharding.units import find_unit_modules
from tests.parallel.tensor.layouts import LLAMA_BY_NAME
from tests.parallel.tensor.test_plans import model

PHI_MLP = [
    {"patterns": [r"\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
    {"patterns": [r"\.mlp\.down_proj\.weight$"], "partition_type": "row"},
]


def chosen(kind: str, given: dict[str, Any], **fields: Any) -> SplitPlan:
    """The plan that a job would use, verified."""
    return choose_plan(model(kind, num_key_value_heads=2, **fields), 2, find_unit_modules, given, sequence=False)


def test_the_expressions_of_a_llama_cut_what_its_own_plan_cuts_in_the_blocks() -> None:
    plan = chosen("Llama", LLAMA_BY_NAME)
    own = plan_of_model(model("Llama", num_key_value_heads=2))
    assert plan.params == {name: cut for name, cut in own.params.items() if ".layers." in name}
    assert plan.source == "tensor_parallel.partition_config"


def test_default_specs_are_the_models_own_plan_with_what_is_given_in_its_place() -> None:
    """Phi-3's plan gathers the products of gate and up; by halves they stay cut."""
    plan = chosen("Phi3", {"use_default_specs": True, "layer_specs": PHI_MLP}, pad_token_id=0)
    own = plan_of_model(model("Phi3", num_key_value_heads=2, pad_token_id=0))
    mlp = "model.layers.*.mlp"
    changed = {name for name in own.params if plan.params.get(name) != own.params[name]}
    assert changed == {f"{mlp}.gate_up_proj.weight"}
    assert plan.params[f"{mlp}.gate_up_proj.weight"] == Cut(-2, (1, 1))
    assert own.modules[f"{mlp}.gate_up_proj"] == "colwise_gather_output"
    assert plan.modules[f"{mlp}.gate_up_proj"] == "colwise"


def test_sizes_of_segments_may_be_given() -> None:
    spec = {"patterns": ["qkv_proj"], "partition_type": "column", "shape": [[32, 16, 16], -1]}
    plan = plan_of_config(model("Phi3", num_key_value_heads=2, pad_token_id=0), {"layer_specs": [spec]})
    assert plan.params["model.layers.*.self_attn.qkv_proj.weight"].segments == (32, 16, 16)


def test_the_first_expression_that_fits_counts_and_skip_leaves_whole() -> None:
    skip = {"patterns": [r"\.self_attn\."], "partition_type": "skip"}
    plan = chosen("Llama", {"layer_specs": [skip, *LLAMA_BY_NAME["layer_specs"]]})
    assert {name.split(".")[-3] for name in plan.params} == {"mlp"}


def test_expressions_for_other_models_are_passed_over() -> None:
    other = {"patterns": ["o_proj"], "partition_type": "skip", "model_types": ["falcon"]}
    plan = chosen("Llama", {"layer_specs": [other, *LLAMA_BY_NAME["layer_specs"]]})
    assert plan.params == chosen("Llama", LLAMA_BY_NAME).params


def test_expressions_that_compute_something_else_are_refused() -> None:
    in_one_piece = [{**PHI_MLP[0], "shape": [1, -1]}, PHI_MLP[1]]
    with pytest.raises(
        ModelError, match=r"tensor_parallel\.partition_config on 2 ranks does not compute .* the loss is off"
    ):
        chosen("Phi3", {"use_default_specs": True, "layer_specs": in_one_piece}, pad_token_id=0)


def test_an_expression_that_fits_nothing_is_named() -> None:
    given = {"layer_specs": [*LLAMA_BY_NAME["layer_specs"], {"patterns": ["c_attn"], "partition_type": "column"}]}
    with pytest.raises(
        ModelError, match=r"partition_config\.layer_specs\.2: no matrix of LlamaForCausalLM fits \['c_attn'\]"
    ):
        plan_of_config(model("Llama"), given)


FITS = {"patterns": ["q_proj"], "partition_type": "column"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layer_spec": []}, r"partition_config\.layer_spec"),
        ({"layer_specs": {}}, r"partition_config\.layer_specs.* is not a list of objects"),
        ({"layer_specs": [{**FITS, "kind": 1}]}, r"layer_specs\.0\.kind.* is not a key here"),
        ({"layer_specs": [{**FITS, "partition_type": "both"}]}, r"partition_type: 'both' is not \"column\""),
        ({"layer_specs": [{**FITS, "patterns": "q_proj"}]}, r"patterns.* is not a list of regular expressions"),
        ({"layer_specs": [{**FITS, "patterns": ["(q"]}]}, r"patterns: '\(q' is not a regular expression"),
        ({"layer_specs": [{**FITS, "partition_dim": 1}]}, r"partition_dim: 1 is not the dimension of a column \(0\)"),
        ({"layer_specs": [{**FITS, "a": 1}, {**FITS, "b": 1}]}, r"(?s)layer_specs\.0\.a.*layer_specs\.1\.b"),
    ],
)
def test_keys_and_values_that_mean_nothing_are_named_by_path(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of_config(model("Llama"), given)
    assert re.search(words, str(error.value)), error.value
