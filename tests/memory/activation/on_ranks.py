"""What a rank does in the tests of this folder: some steps of an engine, with and without a section of the config."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.attempts import attempts
from tests.covering import FULL_GRID
from tests.memory.activation.families import VOCAB, make_batch, make_model

STEPS, ROWS = 3 if FULL_GRID else 2, 4
DROPOUT = {"attention_dropout": 0.2}


def make(kind: str) -> Any:
    """Five blocks with dropout, whole, or with LoRA, or with the first three and the embedding frozen."""
    if kind == "gpt2":
        return make_model("gpt2", n_layer=5, use_cache=False, resid_pdrop=0.2, attn_pdrop=0.2)
    model = make_model("llama", num_hidden_layers=5, use_cache=False, tie_word_embeddings=kind == "tied", **DROPOUT)
    if kind == "frozen":
        model.model.embed_tokens.requires_grad_(False)
        for layer in model.model.layers[:3]:
            layer.requires_grad_(False)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        chosen = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
        model = get_peft_model(model, chosen)
    return model


def steps(rank: int, world: int, kind: str, stage: int, section: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and weights after some steps of two microbatches with the same random numbers."""
    import hf_dist

    model = make(kind)
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}, **section}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device="cpu")
    torch.manual_seed(100 + rank)
    losses, norms, enabled = [], [], []
    for step in range(STEPS):
        for micro in range(2):
            loss = engine(**make_batch(ROWS, seed=8 * step + 2 * rank + micro)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            enabled.append(engine.tiled_loss is not None and engine.tiled_loss.tiles)
        norms.append(engine.get_global_grad_norm())
    with hf_dist.gathered(model):
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "tiled": all(enabled)}


def run_cases(
    rank: int, world: int, cases: list[tuple[str, int, dict[str, Any]]], tile_bytes: int | None = None
) -> list[Any]:
    """Every case; a traceback where one raised."""
    from hf_dist.memory.loss import chunks, tiles

    if tile_bytes is not None:
        tiles.TILE_BYTES = tile_bytes
    chunks.CHUNK_BYTES["cpu"] = 4 * VOCAB * 7
    return attempts(rank, world, (functools.partial(steps, rank, world, *case) for case in cases))


def run_trainer_jobs(rank: int, world: int, jobs: list[tuple[str, dict[str, Any]]], folder: str) -> list[Any]:
    """Jobs of the HF tests with tiles so small that a tiny vocabulary fills several."""
    from hf_dist.memory.loss import tiles
    from tests.hf.on_ranks import run_jobs

    tiles.TILE_BYTES = 1 << 12
    return run_jobs(rank, world, jobs, folder)


def train_and_evaluate(folder: Any, recipe: str, stage: int, **changes: Any) -> dict[str, Any]:
    """A training with an evaluation at its end, and whether tiles stayed in use."""
    from tests.hf.on_ranks import dist_trainer, record_of

    trainer = dist_trainer(recipe, stage, folder, **changes)
    trainer.train()
    switch = trainer.accelerator.engine.tiled_loss
    loss = trainer.evaluate()["eval_loss"]
    return {**record_of(trainer), "eval_loss": loss, "tiled": switch is not None and switch.tiles}
