"""What a rank does in the tests of the routers' auxiliary loss, and the same in one process."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.hf.on_ranks import record_of
from tests.hf.recipes import Recipe, make_model

NAME = "load_balancing_loss_func"
COEFFICIENT = 1.0
ROWS = 24
NOT_TINY = {
    *("DbrxForCausalLM", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),  # stock code does not run
    *("Ernie4_5_VLMoeForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
    *("Glm5NextForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
}
"""Families of which no tiny model is built here; their function is the usual one."""
Batch = dict[str, torch.Tensor]


# ---- families


def families(among: Collection[str] | None = None) -> list[str]:
    """Causal and vision-language models of the installed transformers whose module has HF's usual load-balancing loss.

    `among`: look at these alone; else the modules of all models are loaded, which takes seconds.
    """
    import transformers as tf
    from transformers.models.auto import modeling_auto as auto

    own = {"DogeForCausalLM"}  # of product keys: another form
    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names = {
        n for mapping in mappings for value in mapping.values() for n in ([value] if isinstance(value, str) else value)
    }
    names = names - own if among is None else names.intersection(among) - own
    found = [name for name in sorted(names) if hasattr(tf, name)]
    return [name for name in found if hasattr(sys.modules[getattr(tf, name).__module__], NAME)]


def build(family: str) -> nn.Module:
    """A tiny model of the family in float32 whose outputs have an auxiliary loss. Raises where none of the variants runs."""
    import transformers as tf

    from tests.sweep.tiny import builders

    problem: Exception | None = None
    for builder in builders(getattr(tf, family)):
        try:
            model = builder()
            text: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
            text.output_router_logits = True
            with torch.no_grad():
                if model(**some_rows(4), output_router_logits=True).aux_loss is None:
                    raise ValueError("no auxiliary loss")
            return model
        except Exception as error:
            problem = error
    raise RuntimeError(f"{family}: {problem}")


def some_rows(count: int = ROWS, length: int = 8) -> Batch:
    """Ragged rows, padded on the right."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 60, (count, length), generator=g)
    mask = (torch.arange(length)[None] < torch.randint(3, length + 1, (count, 1), generator=g)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def part(batch: Batch, index: int, count: int) -> Batch:
    """One of `count` equal parts of the rows."""
    size = len(batch["input_ids"]) // count
    return {key: value[index * size :][:size] for key, value in batch.items()}


def auxiliary(model: Any, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The auxiliary loss alone and its gradients."""
    model.zero_grad()
    loss = model(**batch, output_router_logits=True).aux_loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def auxiliary_on_ranks(rank: int, world: int, chosen: list[str]) -> list[Any]:
    """Of every family (value, worst relative difference of the gradient), or what went wrong."""
    from hf_dist.dist import collectives
    from hf_dist.dist.mesh import build_mesh
    from hf_dist.parallel.experts.router_loss import router_loss_for

    mesh = build_mesh(device="cpu")
    results: list[Any] = []
    for family in chosen:
        try:
            model = build(family)
        except RuntimeError as error:
            results.append(str(error))
            continue
        joined, wanted = auxiliary(model, some_rows())
        assert router_loss_for(model, mesh, 1, "global") is not None
        own, grads = auxiliary(model, part(some_rows(), rank, world))
        value = torch.tensor([own])
        collectives.all_reduce(mesh.dp, value).wait()
        difference = total = 0.0
        for name, reference in wanted.items():
            grad = grads.get(name, torch.zeros_like(reference)).reshape(-1).clone()
            collectives.all_reduce(mesh.dp, grad).wait()
            difference += float((grad - reference.reshape(-1)).double().square().sum())
            total += float(reference.double().square().sum())
        results.append((float(value), joined, (difference / total) ** 0.5))
    return results


# ---- loops


def windows(steps: int, accumulation: int) -> list[list[Batch]]:
    """Joined microbatches of every step, with labels."""
    g = torch.Generator().manual_seed(9)
    found = []
    for _ in range(steps):
        window = []
        for _ in range(accumulation):
            ids = torch.randint(3, 60, (8, 6), generator=g)
            window.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
        found.append(window)
    return found


def engine_loop(rank: int, world: int, accumulation: int, stage: int, pp: int, scope: str) -> dict[str, Any]:
    """Three steps with the engine's own calls; losses over all ranks, norms, weights."""
    import hf_dist
    from hf_dist.hf.state_dict import full_state_dict

    model = make_model("moe_router_loss")
    dp = world // pp
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8 // dp,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": pp},
        "hf_dist": {"router_loss": scope},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3)
    example = windows(1, 1)[0][0]
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device="cpu", example_batch=example)
    losses, norms = [], []
    for window in windows(3, accumulation):
        mine = [part(batch, engine.mesh.dp.rank, dp) for batch in window]
        losses.append(float(engine.train_batch(iter(mine))))
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "weights": full_state_dict(engine.sharded)}


def one_process(accumulation: int, parts: int = 1) -> dict[str, Any]:
    """The same with plain torch; `parts`: the joined batch is cut into so many, and the mean of their losses taken."""
    model = make_model("moe_router_loss").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3)
    losses, norms = [], []
    for window in windows(3, accumulation):
        total = 0.0
        for batch in window:
            for index in range(parts):
                loss = model(**part(batch, index, parts)).loss / (accumulation * parts)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}


# ---- Trainer and TRL


class MeanOfMicrobatches:
    """The auxiliary loss is a mean over the microbatches of a window, which HF's Trainer adds up."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """HF's, without what is too much."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        if model.training and kwargs.get("num_items_in_batch") is not None:
            steps = self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
            loss = loss - COEFFICIENT * outputs.aux_loss * (1 - 1 / steps)
        return (loss, outputs) if return_outputs else loss


def trainer_job(folder: Path, stage: int, pp: int = 1, **changes: Any) -> dict[str, Any]:
    """The Trainer with a mixture whose routers have a loss; evaluated at the end."""
    from hf_dist import DistTrainer, DistTrainingArguments

    config = {"zero_optimization": {"stage": stage}, **({"pipeline": {"stages": pp}} if pp > 1 else {})}
    micro = changes.pop("micro", 2)
    trainer = Recipe("moe_router_loss").build(
        DistTrainer, DistTrainingArguments, folder, micro, dist_config=config, **changes
    )
    return trained(trainer)


def trained(trainer: Any) -> dict[str, Any]:
    """What is compared."""
    trainer.train()
    return {**record_of(trainer), "evaluated": trainer.evaluate()["eval_loss"]}


def trl_job(folder: Path, kind: str, stage: int | None, micro: int) -> dict[str, Any]:
    """TRL's SFT or DPO with its default for mixtures: the auxiliary loss is on. `stage` None: stock, in one process."""
    from tests.ecosystem.runs import arguments, over
    from tests.ecosystem.tiny import completions, preferences, tokenizer

    changes: dict[str, Any] = dict(max_length=16, per_device_train_batch_size=micro, router_aux_loss_coef=COEFFICIENT)
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        cls, args_class, rows = SFTTrainer, SFTConfig, completions(24)
    else:
        from trl import DPOConfig, DPOTrainer

        cls, args_class, rows = DPOTrainer, DPOConfig, preferences(24)
    args = arguments(folder, stage, False, args_class, **changes)
    model = make_model("moe_router_loss")
    more = {} if kind == "sft" else {"ref_model": make_model("moe_router_loss")}
    trainer = over(stage, cls)(model, args=args, train_dataset=rows, processing_class=tokenizer(), **more)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [e["loss"] for e in logs],
        "norms": [float(e["grad_norm"]) for e in logs],
        "aux": [e["aux_loss"] for e in logs],
    }


def stock_trainer(folder: Path, world: int, **changes: Any) -> dict[str, Any]:
    """The stock Trainer in one process on the batches of `world` ranks."""
    return trained(Recipe("moe_router_loss", override=MeanOfMicrobatches).in_one_process(folder, world, **changes))
