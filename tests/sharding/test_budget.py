"""Residency by budget: the same numbers to the last bit, fewer gathers by the formula, and never more memory than was given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.sharding.placement import Stay
from tests.covering import FULL_GRID, cells
from tests.harness import run_ranks
from tests.sharding import models
from tests.sharding.test_accounting import Net

WORLD = 2
ALL = "1TB"
"""Room for everything."""
WINDOW = 3 if FULL_GRID else 2
ACCUMULATIONS = (1, WINDOW)
ZERO = {"stage": 3, "stage3_prefetch_bucket_size": 0}
"""Without prefetch: it has all units of a model this small gathered at once, so that keeping them would cost nothing."""
VOCAB, WIDTH, TOKENS, ROWS = 512, 64, 32, 2


def llama(layers: int = 6, lora: bool = False, tied: bool = False, dropout: float = 0.0) -> Any:
    """A small model whose blocks are alike; with `lora` a frozen base and adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=dropout, use_cache=False, tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))
    return model


def config_of(budget: str | int | None, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """ZeRO stage 3 with a memory budget."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": ZERO,
        "hf_dist": {} if budget is None else {"memory_budget": budget},
        **more,
    }


def tokens(seed: int) -> torch.Tensor:
    """One microbatch."""
    return torch.randint(VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


def here(engine: Any) -> list[int]:
    """Units whose full weights are allocated."""
    return [u.index for u in engine.sharded.units if any(g.full.is_allocated and g.layout.numel for g in u.groups)]


def weights_of(engine: Any) -> list[torch.Tensor]:
    """This rank's part of everything, copied."""
    return [g.source.clone() for g in engine.sharded.groups]


# ------------------------------------------------------------------- the same numbers


def dropping(**more: Any) -> Any:
    """Blocks that draw random numbers."""
    return llama(3 if FULL_GRID else 2, dropout=0.1, **more)


def language_model(engine: Any, rank: int, microbatch: int) -> torch.Tensor:
    """The loss of HF's model."""
    ids = tokens(7 * microbatch + rank)
    loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
    return loss


def toy(engine: Any, rank: int, microbatch: int) -> torch.Tensor:
    """The loss of a toy model."""
    x, y = models.batch(7 * microbatch + rank)
    return nn.functional.mse_loss(engine(x), y)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], dict[str, Any]]] = {
    "llama": (dropping, language_model, {}),
    "llama-bf16": (dropping, language_model, {"bf16": {"enabled": True}}),
    "llama-tied": (lambda: dropping(tied=True), language_model, {}),
    "llama-checkpointed": (dropping, language_model, {"activation_checkpointing": {"every_n_layers": 1}}),
    "llama-every-second": (dropping, language_model, {"activation_checkpointing": {"every_n_layers": 2}}),
    "llama-lora": (lambda: dropping(lora=True), language_model, {}),
    "frozen-parts": (models.FrozenBaseNet, toy, {}),
    "frozen-checkpointed": (models.FrozenOutsideReentrant, toy, {}),
    "one-block-often": (models.TwiceNet, toy, {}),
    "unused-unit": (models.UnusedNet, toy, {}),
    "offloaded": (
        dropping,
        language_model,
        {"zero_optimization": {**ZERO, **{f"offload_{k}": {"device": "cpu"} for k in ("param", "optimizer")}}},
    ),
}


def run(name: str, budget: str | None, accumulation: int, rank: int) -> dict[str, Any]:
    """Two steps, an evaluation between microbatches of the second; what must not depend on the budget."""
    import hf_dist

    make, loss_of, more = MODELS[name]
    model = make()
    engine = hf_dist.initialize(model, config=config_of(budget, accumulation, **more), device="cpu")
    torch.manual_seed(rank)  # dropout
    losses, norms, after_eval, after_step = [], [], [], []
    for microbatch in range(2 * accumulation):
        if microbatch == 2 * accumulation - 1:
            engine.eval()
            with torch.no_grad():
                losses.append(loss_of(engine, rank, 99).item())
            after_eval = here(engine)
            engine.train()
        loss = loss_of(engine, rank, microbatch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.is_gradient_accumulation_boundary() or accumulation == 1:
            norms.append(engine.get_global_grad_norm())
        if (microbatch + 1) % accumulation == 0:
            after_step.append(here(engine))
    return {
        "numbers": (losses, norms),
        "weights": weights_of(engine),
        "left": (after_eval, after_step),
        "stays": [u.stay.name for u in engine.sharded.units],
    }


CASES = [(cell["model"], cell["count"]) for cell in cells({"model": tuple(MODELS), "count": ACCUMULATIONS}, 1)]
"""Every model once; whether units stay over a window or until backward is no matter of the model."""
if (
    not FULL_GRID
):  # of HF's own model, what is not in the small ones: dropout, bf16, checkpointed blocks, weights on the host
    CASES = [("llama-bf16", WINDOW), ("llama-checkpointed", 1), ("offloaded", 1)]
    CASES += [("frozen-checkpointed", WINDOW), ("one-block-often", 1), ("unused-unit", WINDOW)]


def run_models(rank: int, world: int) -> list[list[dict[str, Any]]]:
    """Every case without and with a budget."""
    budgets = (None, ALL)
    return [[run(name, budget, count, rank) for budget in budgets] for name, count in CASES]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name}-acc{count}" for name, count in CASES])
def test_equal_to_the_last_bit(index: int) -> None:
    _, count = CASES[index]
    for of_rank in runs()["models"]:
        plain, kept = of_rank[index]
        assert set(plain["stays"]) == {"USE"}
        chosen = {"WINDOW"} if count > 1 else {"USE", "BACKWARD"}
        assert set(kept["stays"]) == chosen, kept["stays"]
        assert kept["numbers"] == plain["numbers"]
        assert all(torch.equal(a, b) for a, b in zip(kept["weights"], plain["weights"], strict=True))
        assert kept["left"] == ([], [[]] * 2)


def interrupted(budget: str | None, rank: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Windows that something ends early: an exception in forward or backward, a gradient that is not finite, zero_grad."""
    import hf_dist

    model = dropping()
    engine = hf_dist.initialize(model, config=config_of(budget, 2, bf16={"enabled": True}), device="cpu")
    torch.manual_seed(rank)
    losses = []

    def window(first: int, factor: float = 1.0, count: int = 2) -> None:
        for microbatch in range(first, first + count):
            loss = language_model(engine, rank, microbatch)
            losses.append(loss.item())
            engine.backward(loss * factor)
            engine.step()

    def fail(*args: Any) -> None:
        raise RuntimeError("on purpose")

    window(0)
    left, weights = [], []
    for kind in kinds:
        if kind == "skipped":
            window(2, float("inf"))
            assert engine.step_was_skipped
        elif kind == "abandoned":
            window(2, count=1)
            engine.zero_grad()
            engine.micro_steps = 0
        else:
            window(2, count=1)
            block = model.model.layers[1]
            forward = kind == "forward"
            hook = block.register_forward_hook(fail) if forward else block.mlp.register_full_backward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                engine.backward(language_model(engine, rank, 4))
            hook.remove()
            engine.zero_grad()
            engine.micro_steps = 0
        window(6)
        left.append(here(engine))
        weights += weights_of(engine)
    return {"losses": losses, "weights": weights, "left": left}


KINDS = ("skipped", "abandoned", "forward", "backward")
ENDS = [[kind] for kind in KINDS] if FULL_GRID else [KINDS]
"""Each in a run of its own; by default one after the other: what is stale after one is seen in all that follow."""


def run_interrupted(rank: int, world: int) -> list[list[dict[str, Any]]]:
    """By kinds: without and with a budget."""
    return [[interrupted(budget, rank, kinds) for budget in (None, ALL)] for kinds in ENDS]


def test_a_window_that_ends_early_leaves_nothing_stale() -> None:
    for of_rank in runs()["interrupted"]:
        for kinds, (plain, kept) in zip(ENDS, of_rank, strict=True):
            assert kept["losses"] == plain["losses"], kinds
            assert all(torch.equal(a, b) for a, b in zip(kept["weights"], plain["weights"], strict=True)), kinds
            assert kept["left"] == [[]] * len(kinds), kinds


BUDGETS = (None, ALL, 1) if FULL_GRID else (ALL, 1)
"""None at all, one for everything (which stages keep without one, too), one for nothing."""


def pipelined(rank: int, world: int) -> list[dict[str, Any]]:
    """Two pipeline stages of two data ranks, by budget."""
    import hf_dist
    from hf_dist.dist import comm_counter

    found = []
    for budget in BUDGETS:
        config = config_of(budget, 3, pipeline={"stages": 2})
        engine = hf_dist.initialize(llama(4 if FULL_GRID else 2), config=config, device="cpu")
        numbers = []
        with comm_counter.record() as log:
            for step in range(2):
                log.entries.clear()
                window = [tokens(100 * step + 10 * m + engine.mesh.dp.rank) for m in range(3)]
                loss = engine.train_batch(iter([{"input_ids": ids, "labels": ids} for ids in window]))
                numbers.append((loss.item(), engine.get_global_grad_norm()))
            sent = log.nbytes("all_gather")
        stays = {u.stay.name for u in engine.sharded.units}
        found.append(
            {"numbers": numbers, "weights": weights_of(engine), "sent": sent, "stays": stays, "left": here(engine)}
        )
    return found


def test_pipeline_stages_keep_over_the_window_or_not_at_all() -> None:
    for *kept, nothing in run_ranks(pipelined, 4):
        plain = kept[0]
        assert nothing["stays"] == {"USE"} and nothing["sent"] > 2 * plain["sent"]
        for other in kept:
            assert other["stays"] == {"WINDOW"} and other["sent"] == plain["sent"]
        for other in (*kept[1:], nothing):
            assert other["numbers"] == plain["numbers"] and other["left"] == []
            assert all(torch.equal(a, b) for a, b in zip(other["weights"], plain["weights"], strict=True))


# -------------------------------------------------------------------- fewer gathers


@contextmanager
def forced(stays: dict[int, Stay], engine: Any) -> Iterator[None]:
    """Units stay as the test says, whatever a plan would choose."""
    engine.memory_budget = None
    for unit in engine.sharded.units:
        unit.stay = stays.get(unit.index, Stay.USE)
    yield


MIXES: dict[str, dict[int, Stay]] = {
    "nothing": {},
    "two-to-backward": {3: Stay.BACKWARD, 4: Stay.BACKWARD},
    "two-over-the-window": {2: Stay.WINDOW, 3: Stay.WINDOW},
    "root-embedding-last-over-the-window": {0: Stay.WINDOW, 1: Stay.WINDOW, 5: Stay.WINDOW},
    "both": {1: Stay.WINDOW, 2: Stay.WINDOW, 4: Stay.BACKWARD},
    "everything": dict.fromkeys(range(6), Stay.WINDOW),
}
MIXED = cells({"mix": tuple(MIXES), "accumulation": ACCUMULATIONS}, 2)
if not FULL_GRID:  # of several microbatches, where to stay over a window is something else than until backward
    MIXED = [{"mix": mix, "accumulation": WINDOW} for mix in ("nothing", "root-embedding-last-over-the-window", "both")]
    MIXED += [{"mix": "two-to-backward", "accumulation": 1}]


def count_gathers(rank: int, world: int) -> list[dict[str, Any]]:
    """By mix and accumulation: all-gathers of the last step, and what is resident after each microbatch's forward and end."""
    import hf_dist
    from hf_dist.dist import comm_counter

    found = []
    for mix, accumulation in (cell.values() for cell in MIXED):
        torch.manual_seed(0)
        zero = {**ZERO, "leaf_module": {"names": ["embed"]}}
        engine = hf_dist.initialize(Net(), config=config_of(None, accumulation, zero_optimization=zero), device="cpu")
        ids = torch.arange(12).view(2, 6) + rank
        held = []
        with forced(MIXES[mix], engine), comm_counter.record() as log:
            for _ in range(3 if FULL_GRID else 2):
                log.entries.clear()
                held.clear()
                for _ in range(accumulation):
                    loss = nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten())
                    held.append((here(engine), resident(engine)))
                    engine.backward(loss)
                    held.append((here(engine), resident(engine)))
                    engine.step()
            gathers = [e.nbytes for e in log.entries if e.op == "all_gather"]
        units = engine.sharded.units
        found.append(
            {"units": [u.numel for u in units], "names": [u.name for u in units], "sent": gathers, "held": held}
        )
    return found


def resident(engine: Any) -> int:
    """Bytes of full weights that are allocated."""
    return sum(g.full.values.untyped_storage().nbytes() for g in engine.sharded.groups)


def run_all(rank: int, world: int) -> dict[str, Any]:
    """What two ranks do."""
    jobs: dict[str, Any] = {"models": run_models, "interrupted": run_interrupted, "gathers": count_gathers}
    return {name: job(rank, world) for name, job in jobs.items()}


@functools.cache
def runs() -> dict[str, list[Any]]:
    """By job and rank; one spawn for all."""
    ranks = run_ranks(run_all, WORLD, timeout=600)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("index", range(len(MIXED)), ids=[f"{cell['accumulation']}-{cell['mix']}" for cell in MIXED])
def test_gathers_and_resident_bytes_equal_the_formula(index: int) -> None:
    mix, accumulation = MIXED[index].values()
    stays = MIXES[mix]
    for of_rank in runs()["gathers"]:
        got = of_rank[index]
        numel, last = got["units"], len(got["units"]) - 1
        assert got["names"][1] == "embed" and last == 5
        expected = []
        for unit in range(last + 1):
            twice = unit not in (
                0,
                1,
                last,
            )  # the root and the last stay for backward, which does not read an embedding
            stay = stays.get(unit, Stay.USE)
            times = {
                Stay.USE: accumulation * (1 + twice),
                Stay.BACKWARD: accumulation,
                Stay.WINDOW: 1,
            }[stay]
            expected += [4 * numel[unit] // WORLD * (WORLD - 1)] * times
        assert sorted(got["sent"]) == sorted(expected)
        for i, (units, nbytes) in enumerate(got["held"]):
            after_forward, is_last = i % 2 == 0, i == len(got["held"]) - 1
            window = {u for u, stay in stays.items() if stay is Stay.WINDOW}
            there = (set(stays) | {0, last}) if after_forward else (set() if is_last else window)
            assert set(units) == there
            assert nbytes == 4 * sum(numel[u] for u in there)
