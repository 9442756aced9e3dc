"""Compiled blocks compute what plain ones do, at stages 0, 2 and 3, and nothing is compiled again after the first step."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_dist
from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.errors import ConfigError
from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.recipes import make_model as small_model
from tests.hf.recipes import pad, plain_arguments, texts
from tests.parity.families import make_batches, make_model

BACKEND = "aot_eager"  # needs no C++ compiler; inductor differs in the code of the kernels only
# Stages 0 to 2 run the same forward and backward, only the last thing that happens to gradients differs.
CASES = [
    (3, "llama", True, True),
    *([(2, "bert", False, False), *((stage, "llama", False, False) for stage in (0, 3))] if FULL_GRID else []),
    *([(3, "llama", True, False), (3, "llama", False, True)] if FULL_GRID else []),
]


COMPILING = 2 if FULL_GRID else 1
"""Ranks that compile. The others call the same blocks as they are: what a unit gathers and reduces is outside of its graph."""


def made(family: str, lora: bool, checkpointing: bool) -> Any:
    """By default smaller: two blocks of a llama, each of them is compiled, and adapters at one of their layers."""
    if FULL_GRID or family != "llama":
        return make_model(family, lora=lora, checkpointing=checkpointing)
    model: Any = make_model(family, checkpointing=checkpointing)
    model.model.layers = model.model.layers[:2]
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.0))
        if checkpointing:
            model.enable_input_require_grads()
    return model.train()


def losses(rank: int, case: tuple[int, str, bool, bool], compiled: bool) -> tuple[list[float], list[int]]:
    """Of five steps, the last with other lengths, and the graphs that were made up to each."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    torch.compiler.set_stance("default" if rank < COMPILING else "force_eager")
    counters.clear()
    stage, family, lora, checkpointing = case
    model = made(family, lora, checkpointing)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage},
        "compile": {"enabled": compiled, "backend": BACKEND},
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer)
    values, graphs = [], []
    for step, joined in enumerate(make_batches(family, 6)):
        rows = {k: v[rank * 6 : (rank + 1) * 6, : 10 if step < 4 else 4 + step].contiguous() for k, v in joined.items()}
        values.append(float(engine.train_batch(iter([rows]))))
        graphs.append(counters["stats"]["unique_graphs"])
    if compiled:
        with hf_dist.gathered(model):
            other: Any = copy.deepcopy(model)
        blocks = [m for m in other.modules() if "forward" in vars(m)]
        assert all(m.forward.__self__ is m for m in blocks if hasattr(m.forward, "__self__"))
        for p in other.parameters():
            p.data.zero_()
        for each in (other, engine) if FULL_GRID else ():  # which compiles them once more
            each.eval()
        with torch.set_grad_enabled(not FULL_GRID):
            assert not torch.equal(other(**rows).logits, engine(**rows).logits), "a copy has weights of its own"
    return values, graphs


def run(rank: int, world: int) -> list[Any]:
    """All cases, plain and compiled."""
    return [[losses(rank, case, compiled) for compiled in (False, True)] for case in CASES]


@functools.cache
def results() -> list[Any]:
    """By rank; one spawn."""
    return run_ranks(run, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"z{c[0]}-{c[1]}{'-lora' * c[2]}{'-checkpointing' * c[3]}")
def test_compiled_blocks_give_the_same_losses_and_are_compiled_once(case: Any) -> None:
    for rank, found in enumerate(results()):
        (plain, none), (compiled, graphs) = found[CASES.index(case)]
        assert compiled == pytest.approx(plain, rel=1e-5)
        assert none[-1] == 0
        if rank >= COMPILING:
            continue
        assert graphs[0] >= 1
        assert graphs[0] == graphs[3], "steps of one shape after the first"
        assert graphs[5] <= graphs[3] + 2, "another length compiles once more, for all lengths"


def test_a_compiled_pipeline_is_refused_by_name() -> None:
    config = {"pipeline": {"stages": 2}, "compile": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError, match=r"compile\.enabled.*pipeline\.stages"):
        hf_dist.initialize(torch.nn.Linear(2, 2), config=config)


def test_torch_compile_of_training_arguments_compiles_the_blocks(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    values = plain_arguments(tmp_path, 2, max_steps=1, dist_config={"zero_optimization": {"stage": 3}})
    arguments = DistTrainingArguments(**values, torch_compile=True, torch_compile_backend="eager")
    assert arguments.dist is not None
    assert arguments.dist.compile.enabled
    assert arguments.dist.compile.backend == "eager"
    trainer = DistTrainer(small_model(), arguments, train_dataset=texts(), data_collator=pad)
    trainer.train()
    assert counters["stats"]["unique_graphs"] >= 1
    with pytest.raises(ConfigError, match="torch_compile_mode"):
        DistTrainingArguments(**values, torch_compile_mode="max-autotune")
