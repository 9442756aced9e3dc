"""Hugging Face models used in other ways than `model(**batch)`: checkpointing of both kinds, inner models, `generate`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.attempts import attempts_by_name
from tests.covering import FULL_GRID, chosen
from tests.harness import run_ranks
from tests.parity.families import VOCAB, make_model
from tests.sharding.loop import Loop, Scenario, adamw, assert_equal, on_one_process, on_rank

WORLD = 2
FAMILIES = ("llama", "gpt2", "t5")
IDS = torch.randint(3, VOCAB, (12, 9), generator=torch.Generator().manual_seed(5))


def checkpointed(family: str, reentrant: bool, lora: bool) -> nn.Module:
    """With the model's own gradient checkpointing."""
    model: Any = make_model(family, lora=lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if lora:
        model.enable_input_require_grads()
    return model


def logits_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy, mean over the rows."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def language_model(loop: Loop) -> None:
    """Three steps with `labels`, which is what makes HF compute its own loss."""
    for _ in range(3):
        ids = loop.part(IDS)
        decoder = {"decoder_input_ids": ids} if loop.model.config.is_encoder_decoder else {}
        loop.backward(logits_loss(loop.model(input_ids=ids, **decoder).logits, ids))
        loop.step()


def inner_model(loop: Loop) -> None:
    """As TRL does: the decoder is called on its own, the head on its hidden states, sometimes with the weight alone."""
    for _ in range(3):
        ids = loop.part(IDS)
        hidden = loop.model.model(input_ids=ids).last_hidden_state
        loop.backward(logits_loss(loop.model.lm_head(hidden), ids))
        loop.step()


def encoder_alone(loop: Loop) -> None:
    """The encoder runs first, and the model gets its outputs, as in `generate`; then a loss on the encoder alone."""
    for _ in range(3):
        ids = loop.part(IDS)
        encoded = loop.model.encoder(input_ids=ids)
        logits = loop.model(encoder_outputs=encoded, decoder_input_ids=ids).logits
        loop.backward(logits_loss(logits, ids))
        loop.step()
        loop.backward(loop.model.encoder(input_ids=ids).last_hidden_state.square().mean())
        loop.step()


def preference(loop: Loop) -> None:
    """DPO with a LoRA model that is its own reference: adapters off without gradient, on twice, one backward."""
    for _ in range(3):
        ids = loop.part(IDS)
        with torch.no_grad(), loop.model.disable_adapter():
            reference = logits_loss(loop.model(input_ids=ids).logits, ids)
        chosen = logits_loss(loop.model(input_ids=ids).logits, ids)
        rejected = logits_loss(loop.model(input_ids=ids.flip(1)).logits, ids)
        loop.backward(chosen - 0.5 * rejected + 0.1 * (chosen - reference))
        loop.step()


def scenarios() -> dict[str, Scenario]:
    """Built on each rank, and in the test's process."""
    found = {
        f"{family}-{'reentrant' if reentrant else 'plain'}{'-lora' if lora else ''}": Scenario(
            functools.partial(checkpointed, family, reentrant, lora), language_model
        )
        for family in FAMILIES
        for reentrant in (True, False)
        for lora in (False, True)
    }
    found["inner-model"] = Scenario(functools.partial(make_model, "llama"), inner_model)
    found["inner-model-tied"] = Scenario(functools.partial(make_model, "llama", True), inner_model)
    found["encoder-alone"] = Scenario(functools.partial(make_model, "t5"), encoder_alone)
    found["preference-lora"] = Scenario(functools.partial(make_model, "llama", lora=True), preference)
    return found


def settings(case: tuple[str, int]) -> dict[str, Any]:
    """What tells the cases apart: every pair of it is in one of them."""
    name, stage = case
    family, *words = name.split("-")
    if family not in FAMILIES:
        return {"case": case}
    return {"family": family, "kind": words[0], "lora": "lora" in words, "stage": stage}


CASES = chosen([(name, stage) for name in scenarios() for stage in (0, 3)], settings)
if not FULL_GRID:  # passes of whole weights are in the grids of `parity`; a tied head and adapters are more than none
    CASES = [("gpt2-plain", 0), ("llama-reentrant", 3), ("llama-plain-lora", 3), ("t5-reentrant-lora", 3)]
    CASES += [(name, 3) for name in ("inner-model-tied", "encoder-alone", "preference-lora")]


# ---- generation


def prompts(rank: int) -> dict[str, torch.Tensor]:
    """Other rows and another length on each rank."""
    ids = IDS[4 * rank : 4 * rank + 2, : 4 + 3 * rank]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generating(family: str) -> Any:
    """Stops at a token that comes early on some rows."""
    model: Any = make_model(family).eval()
    model.config.use_cache = True
    model.generation_config.pad_token_id = 0
    return model


def generate(model: Any, rank: int, **options: Any) -> torch.Tensor:
    """Greedy, of a length of its own on each rank."""
    with torch.no_grad():
        return model.generate(**prompts(rank), do_sample=False, max_new_tokens=5 + 6 * rank, **options)


def generate_sharded(rank: int, family: str, stage: int, flag: bool) -> list[torch.Tensor]:
    """Before and after a training step."""
    import hf_dist
    from hf_dist.sharding.units import containers

    model = generating(family)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    engine = hf_dist.initialize(model, config=config, optimizer=adamw(model), device="cpu")
    for module in containers(engine.model, engine.sharded.units) if flag else ():
        module.__dict__["_is_fsdp_managed_module"] = True
    options = {} if flag else {"synced_gpus": True}
    outputs = [generate(model, rank, **options)]
    language_model_step(Loop(model, None, engine))
    return [*outputs, generate(model, rank, **options)]


@functools.cache
def generate_alone(rank: int, family: str) -> list[torch.Tensor]:
    """The same in one process."""
    model = generating(family)
    outputs = [generate(model, rank)]
    language_model_step(Loop(model, adamw(model)))
    return [*outputs, generate(model, rank)]


def language_model_step(loop: Loop) -> None:
    """One step between two generations."""
    ids = loop.part(IDS)
    decoder = {"decoder_input_ids": ids} if loop.model.config.is_encoder_decoder else {}
    loop.backward(logits_loss(loop.model(input_ids=ids, **decoder).logits, ids))
    loop.step()


GENERATIONS = [(f, stage, flag) for f in ("llama", "t5") for stage in (1, 3) for flag in (True, False)]
if not FULL_GRID:  # freed weights under either option
    GENERATIONS = [("llama", 3, True), ("t5", 1, True), ("t5", 3, False)]


def run(rank: int, world: int) -> dict[Any, Any]:
    """Everything on this rank."""
    known = scenarios()
    jobs: dict[Any, Any] = {case: functools.partial(on_rank, known[case[0]], case[1]) for case in CASES}
    jobs |= {case: functools.partial(generate_sharded, rank, *case) for case in GENERATIONS}
    return attempts_by_name(rank, world, jobs)


@functools.cache
def results() -> list[dict[Any, Any]] | str:
    """One spawn; its error if it failed as a whole."""
    try:
        return run_ranks(run, WORLD, timeout=300)
    except RuntimeError as error:
        return str(error)


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """In one process."""
    return on_one_process(scenarios()[name])


def of(case: Any) -> list[Any]:
    """Every rank's outcome."""
    ranks = results()
    assert not isinstance(ranks, str), ranks
    return [rank[case] for rank in ranks]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-z{c[1]}")
def test_equals_one_process(case: tuple[str, int]) -> None:
    for got in of(case):
        assert_equal(got, expected(case[0]))


@pytest.mark.parametrize("case", GENERATIONS, ids=lambda c: f"{c[0]}-z{c[1]}-{'flag' if c[2] else 'synced'}")
def test_generates_what_the_unsharded_model_generates(case: tuple[str, int, bool]) -> None:
    for rank, got in enumerate(of(case)):
        assert not isinstance(got, str), got
        for tokens, wanted in zip(got, generate_alone(rank, case[0]), strict=True):
            assert torch.equal(tokens, wanted)
