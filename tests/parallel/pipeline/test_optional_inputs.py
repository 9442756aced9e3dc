"""Inputs that the plan of a pipeline has not seen: each gives the numbers of the plain model, or is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline import (
    make_plan,
    make_schedule,
    partition,
    plan_stages,
    probe,
    verify,
)
from hf_dist.parallel.pipeline.stage_plan import StagePlan
from tests.covering import FULL_GRID
from tests.parallel.pipeline.local import run_local, stage_models, summed_gradients
from tests.parallel.pipeline.test_parity import TOLERANCE, plain
from tests.parallel.pipeline.zoo import CONFIGS, make_microbatches, make_model
from tests.sweep.tiny import builders, tiny_batches

FAMILIES = [family for family in CONFIGS if family != "ViT"] if FULL_GRID else ["Bert", "T5", "Mixtral"]
MICROBATCHES = 2
Batch = dict[str, Any]
LOWEST = torch.finfo(torch.float32).min


def drawn(seed: int) -> torch.Generator:
    """The same for each batch."""
    return torch.Generator().manual_seed(seed)


def causal(rows: int, length: int) -> torch.Tensor:
    """A mask of four dimensions, in which later queries do not see the first key."""
    seen = torch.ones(length, length).tril().bool()
    seen[3:, 0] = False
    return torch.where(seen, 0.0, LOWEST).expand(rows, 1, length, length).contiguous()


def of_tokens(batch: Batch, width: int) -> dict[str, Batch]:
    """Variant -> what changes; None leaves an argument out."""
    rows, length = batch["input_ids"].shape
    places = torch.arange(length)[None]
    left = torch.ones(rows, length, dtype=torch.long)
    left[:, :2] = 0
    return {
        "embeddings": {"input_ids": None, "inputs_embeds": torch.randn(rows, length, width, generator=drawn(3))},
        "positions": {"position_ids": places.repeat(rows, 1).flip(1)},
        "positions of one row": {"position_ids": places.flip(1)},
        "packed rows": {"attention_mask": None, "position_ids": (places % (length // 2)).repeat(rows, 1)},
        "types": {"token_type_ids": torch.randint(0, 2, (rows, length), generator=drawn(3))},
        "no mask": {"attention_mask": None},
        "padded on the left": {"attention_mask": left},
        "whole mask": {"attention_mask": causal(rows, length)},
        "whole mask of booleans": {"attention_mask": causal(rows, length) == 0},
        "hidden states": {"output_hidden_states": True},
        "attentions": {"output_attentions": True},
        "cache": {"use_cache": True},
        "a tuple": {"return_dict": False},
        "logits to keep": {"logits_to_keep": length},
        "router logits": {"output_router_logits": True},
        "no router logits": {"output_router_logits": False},
        "items": {"num_items_in_batch": torch.tensor(7)},
    }


def of_decoder(batch: Batch, width: int) -> dict[str, Batch]:
    """Those of a model with an encoder."""
    labels = batch["labels"]
    mask = torch.ones_like(labels)
    mask[:, -1] = 0
    return {
        "decoder's mask": {"decoder_attention_mask": mask},
        "decoder's tokens": {"decoder_input_ids": labels.clamp(min=1).flip(1)},
        "decoder's embeddings": {"decoder_inputs_embeds": torch.randn(*labels.shape, width, generator=drawn(4))},
    }


def variants(model: Any, batch: Batch) -> dict[str, Batch]:
    """Variant -> the whole batch, of those whose arguments the forward's signature has."""
    width = model.get_input_embeddings().weight.shape[1]
    has = inspect.signature(model.forward).parameters
    open_ended = {"use_cache", "output_hidden_states", "output_attentions", "return_dict", "num_items_in_batch"}
    changes = of_tokens(batch, width) | (of_decoder(batch, width) if "decoder_input_ids" in has else {})
    return {
        name: {key: value for key, value in (batch | change).items() if value is not None}
        for name, change in changes.items()
        if all(key in has or key in open_ended for key in change)
    }


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Of a tuple, too."""
    output = model(**batch)
    return (output[0] if isinstance(output, tuple) else output.loss) / MICROBATCHES


def plan_of(model: Any, example: Batch) -> StagePlan:
    """Two stages."""
    found = probe(model, example)
    return verify(model, make_plan(found, partition(found.costs(), 2).bounds), example)


def staged_step(model: Any, plan: StagePlan, batches: list[Batch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of the stages of `plan`."""
    schedule = make_schedule("1f1b", 2, len(batches))
    staged = stage_models(model, plan, schedule)
    losses = run_local(staged, schedule, batches, loss_of)
    return [float(x) for x in losses], summed_gradients(staged)


def is_equal(found: tuple[list[float], dict[str, torch.Tensor]], expected: Any) -> bool:
    """Losses, and each gradient relative to its largest element."""
    if found[0] != pytest.approx(expected[0], rel=TOLERANCE):
        return False
    for name, gradient in expected[1].items():
        error = (found[1].get(name, torch.zeros_like(gradient)) - gradient).abs().max()
        if error > TOLERANCE * gradient.abs().max() + 1e-12:
            return False
    return True


def outcome(step: Callable[[], Any], expected: Any) -> str:
    """One word."""
    try:
        return "equal" if is_equal(step(), expected) else "wrong"
    except ModelError:
        return "refused"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_input_that_comes_later_is_computed_or_refused(family: str) -> None:
    model = make_model(family)
    plain_batches = make_microbatches(family, MICROBATCHES)
    plan, found = plan_of(model, plain_batches[0]), {}
    for name in variants(model, plain_batches[0]):
        batches = [variants(model, batch)[name] for batch in plain_batches]
        try:
            expected = plain(model, batches, loss_of)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):  # what the model itself does not take
            model.zero_grad()
            continue
        found[name] = outcome(lambda b=batches: staged_step(model, plan, b), expected)
    # These change what a model collects between its blocks, which is part of the plan.
    known = {"hidden states", "no router logits", "router logits", "attentions"}
    assert {name for name, word in found.items() if word != "equal"} <= known, found
    assert "wrong" not in found.values(), found
    assert len(found) > 10, found


def of_all_states(model: Any, batch: Batch) -> torch.Tensor:
    """Of the states that ProphetNet collects by itself, beside those that transformers collects."""
    output = model(**batch)
    return output.loss + sum(x.square().mean() for x in output.get("hidden_states_ngram") or ())


@pytest.mark.parametrize("cls", [tf.XLNetLMHeadModel, tf.ProphetNetForCausalLM])
def test_what_later_stages_would_lack_is_refused(cls: Any) -> None:
    """A second stream through XLNet's blocks, and a list that is no "hidden_states": stages alone computed other numbers."""
    model = next(builders(cls))()
    batches = tiny_batches("causal", model)
    given = {"output_hidden_states": True} if cls is tf.ProphetNetForCausalLM else {}
    plan = plan_of(model, {**batches[0], **given})
    schedule = make_schedule("1f1b", 2, len(batches))
    for batch in batches:
        rows, length = batch["input_ids"].shape
        batch.update(given or {"target_mapping": torch.eye(length).repeat(rows, 1, 1)})
    with pytest.raises(
        ModelError, match=r"returns a tensor at \[1\]|output of ProphetNetForCausalLM was computed by an earlier"
    ):
        run_local(stage_models(model, plan, schedule), schedule, batches, of_all_states)


def test_an_output_that_is_a_view_of_earlier_values_is_refused() -> None:
    """FSMT turns its encoder's states round for its output: no tensor of the output is a stand-in itself."""
    model = next(builders(tf.FSMTForConditionalGeneration))()
    batches = tiny_batches("causal", model)
    plan = plan_stages(model, batches[0], 2, run=lambda m, b: m(**b).loss).plan  # a training step keeps the loss alone
    assert "encoder_last_hidden_state" in plan.absent and "logits" in (plan.outputs or ())
    schedule = make_schedule("1f1b", 2, len(batches))

    def by_name(model: Any, batch: Batch) -> torch.Tensor:
        output = model(**batch)
        return output.loss + output.encoder_last_hidden_state.square().mean()

    def by_place(model: Any, batch: Batch) -> torch.Tensor:
        loss, _, *others = model(**batch, return_dict=False)
        return loss + sum(x.square().mean() for x in others if isinstance(x, torch.Tensor))

    for reads in (by_name, by_place):
        with pytest.raises(ModelError, match="was computed by an earlier stage"):
            run_local(stage_models(model, plan, schedule), schedule, batches, reads)


def test_a_list_that_the_last_stage_computes_alone_is_read() -> None:
    """The first blocks of DeepSeek have no router."""
    config = tf.DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, first_k_dense_replace=1,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.DeepseekV3ForCausalLM(config)
    batches = [{**batch, "output_router_logits": True} for batch in tiny_batches("causal", model)]
    plan = plan_stages(model, batches[0], 2).plan

    def of_routers(model: Any, batch: Batch) -> torch.Tensor:
        output = model(**batch)
        return output.loss + sum(x.square().mean() for x in output.router_logits)

    schedule = make_schedule("1f1b", 2, len(batches))
    found = run_local(stage_models(model, plan, schedule), schedule, batches, of_routers)
    torch.testing.assert_close(torch.stack(found), torch.stack([of_routers(model, x).detach() for x in batches]))


@pytest.mark.parametrize("family", ["OPT", "Llama", "GPT2", "Mixtral"] if FULL_GRID else ["OPT"])
def test_a_second_call_of_the_model_is_refused(family: str) -> None:
    """A few tokens into a cache, then the others: OPT counts positions from a cache whose first blocks are another stage's."""
    model = make_model(family)
    model.config.use_cache = True
    batches = make_microbatches(family, MICROBATCHES)

    def twice(model: Any, batch: Batch) -> torch.Tensor:
        ids, mask = batch["input_ids"], torch.ones_like(batch["input_ids"])
        first = model(input_ids=ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
        second = model(input_ids=ids[:, 4:], attention_mask=mask, past_key_values=first.past_key_values)
        return second.logits.square().mean()

    with pytest.raises(ModelError, match="run the model once per microbatch"):
        schedule = make_schedule("1f1b", 2, len(batches))
        run_local(stage_models(model, plan_of(model, batches[0]), schedule), schedule, batches, twice)
