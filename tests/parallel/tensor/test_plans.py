"""Plans: what of a model is cut, and that none is used which computes something else. Each trap by its symptom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.tensor.choose import choose_plan
from hf_dist.parallel.tensor.plan import Cut, SplitPlan, plan_of_model
from hf_dist.parallel.tensor.slices import kept_slices
from hf_dist.parallel.tensor.verify import Difference, unsplit, verified
from hf_dist.sharding.units import find_unit_modules

SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56)


def model(kind: str, **fields: Any) -> nn.Module:
    import torch
    import transformers as tf

    config = getattr(tf, f"{kind}Config")(**{**SMALL, "vocab_size": 101, **fields})
    with torch.device("meta"):  # neither a plan nor its verification reads weights
        return getattr(tf, f"{kind}ForCausalLM")(config)  # type: ignore[no-any-return]


def check(plan: SplitPlan, model: nn.Module, size: int = 2) -> SplitPlan:
    return verified(plan, unsplit(model, size), size, find_unit_modules)


def test_the_slices_of_all_ranks_are_the_whole_of_every_parameter() -> None:
    llama = model("Llama", num_key_value_heads=2, attention_bias=True)
    plan = plan_of_model(llama)
    named = dict(llama.named_parameters())
    ranks = [kept_slices(llama, plan, 2, rank) for rank in range(2)]
    assert ranks[0].keys() == ranks[1].keys()
    for name in ranks[0]:
        assert sum(kept[name].held.numel for kept in ranks) == named[name].numel(), name
    assert {name for name in named if name not in ranks[0]} == {
        name for name in named if "norm" in name or name.endswith("o_proj.bias")
    }
    assert [kept["model.embed_tokens.weight"].held.shape for kept in ranks] == [(50, 32), (51, 32)]


def test_fewer_heads_of_keys_than_ranks_are_shared_by_neighbours() -> None:
    llama = model("Llama", num_key_value_heads=2)
    kept = [
        kept_slices(llama, plan_of_model(llama), 4, rank)["model.layers.0.self_attn.k_proj.weight"] for rank in range(4)
    ]
    assert [k.sharing for k in kept] == [2] * 4
    assert [k.held.ranges[0] for k in kept] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]


def test_heads_that_cannot_be_shared_are_refused_with_the_sizes_that_work() -> None:
    llama = model("Llama", num_attention_heads=6, hidden_size=48, num_key_value_heads=3)
    with pytest.raises(
        ModelError, match=r"4 ranks cannot share the 6 heads of model\.layers\.0\.self_attn\.q_proj.*1, 2, 3, 6"
    ):
        kept_slices(llama, plan_of_model(llama), 4, 0)


def test_widths_that_do_not_divide_are_refused_with_the_sizes_that_do() -> None:
    llama = model("Llama", intermediate_size=54)
    with pytest.raises(
        ModelError, match=r"4 does not divide the 54 .*mlp\.gate_proj\.weight\. Sizes that do: 1, 2, 3, 6"
    ):
        kept_slices(llama, plan_of_model(llama), 4, 0)


def test_a_tied_vocabulary_is_cut_once_for_both() -> None:
    llama = model("Llama", num_key_value_heads=2, tie_word_embeddings=True)
    plan = choose_plan(llama, 2, find_unit_modules, sequence=False)
    assert plan == plan_of_model(llama)
    assert plan.modules["lm_head"] == "colwise_gather_output"


def test_norms_between_columns_and_rows_that_the_plan_does_not_name_are_found_and_summed() -> None:
    """Apertus' xIELU has parameters between the two products; Qwen3's norms of queries and keys are named."""
    apertus = model("Apertus", num_key_value_heads=2)
    plan = plan_of_model(apertus)
    assert not any("act_fn" in name for name in plan.summed)
    found = check(plan, apertus).summed - plan.summed
    assert found == {"model.layers.*.mlp.act_fn.alpha_n", "model.layers.*.mlp.act_fn.alpha_p"}
    qwen = model("Qwen3", num_key_value_heads=2, head_dim=8)
    plan = plan_of_model(qwen)
    assert plan.summed == {"model.layers.*.self_attn.q_norm.weight", "model.layers.*.self_attn.k_norm.weight"}
    assert check(plan, qwen) == plan


def test_a_fused_weight_cut_in_one_piece_is_refused() -> None:
    """Finite, plausible, and another model: gate and up of different columns are multiplied."""
    phi = model("Phi3", num_key_value_heads=2, pad_token_id=0)
    plan = plan_of_model(phi)
    mlp = "model.layers.*.mlp"
    right = replace(
        plan,
        params={**plan.params, f"{mlp}.gate_up_proj.weight": Cut(-2, (1, 1)), f"{mlp}.down_proj.weight": Cut(-1)},
        modules={**plan.modules, f"{mlp}.gate_up_proj": "colwise", f"{mlp}.down_proj": "rowwise"},
    )
    assert check(right, phi) == right
    wrong = replace(right, params={**right.params, f"{mlp}.gate_up_proj.weight": Cut(-2)})
    with pytest.raises(Difference, match="the loss is off by"):
        check(wrong, phi)


def test_products_that_the_plan_gathers_are_cut_by_segments_where_that_verifies() -> None:
    phi = model("Phi3", num_key_value_heads=2, pad_token_id=0)
    plan = choose_plan(phi, 2, find_unit_modules)
    assert plan.params["model.layers.*.mlp.gate_up_proj.weight"] == Cut(-2, (1, 1))
    assert plan.modules["model.layers.*.mlp.gate_up_proj"] == "colwise"
    assert plan.source == "tp_plan of Phi3ForCausalLM, completed"


def test_a_model_without_a_plan_gets_one_from_the_order_of_its_products() -> None:
    import transformers as tf

    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=32))
    plan = choose_plan(gpt2, 2, find_unit_modules)
    block = "transformer.h.*"
    assert plan.source == "derived"
    assert plan.params[f"{block}.attn.c_attn.weight"] == Cut(-1, (1, 1, 1))
    assert plan.params[f"{block}.attn.c_attn.bias"] == Cut(-1, (1, 1, 1))
    assert plan.params[f"{block}.attn.c_proj.weight"] == Cut(-2)
    assert plan.params[f"{block}.mlp.c_fc.weight"] == Cut(-1)
    assert plan.params["transformer.wte.weight"] == Cut(-2, uneven=True)


def test_a_tied_head_of_which_the_plan_names_no_embedding_cuts_both() -> None:
    """The lookup would index past the slice."""
    lfm = model("Lfm2", num_key_value_heads=2, layer_types=["full_attention"] * 2)
    assert lfm.get_output_embeddings().weight is lfm.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    plan = plan_of_model(lfm)
    assert plan.modules["lm_head"] == "colwise_gather_output"
    assert plan.modules["model.embed_tokens"] == "embedding_rowwise"


def test_a_model_of_which_nothing_verifies_is_refused_by_name() -> None:
    import transformers as tf

    mamba = tf.MambaForCausalLM(tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=101, state_size=8))
    with pytest.raises(ModelError, match="MambaForCausalLM cannot be split"):
        choose_plan(mamba, 2, find_unit_modules)
