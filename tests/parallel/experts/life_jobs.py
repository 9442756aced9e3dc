"""What a rank does in the tests of an expert-parallel model in the Trainer, on disk and in generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_dist.parallel.experts.load_file import read_load
from tests.hf.on_ranks import dist_trainer, record_of
from tests.hf.recipes import VOCAB, make_model, texts

SPREAD: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": "auto"}}
SPLIT: dict[str, Any] = {**SPREAD, "tensor_parallel": {"autotp_size": 2}}
SIZES = (7, 13)


def trained(folder: Path, stage: int, spread: bool = True, **changes: Any) -> dict[str, Any]:
    """Logs and weights, the loss of sets of odd sizes, and what the log says of the experts."""
    config = {**(SPREAD if spread else {}), **changes.pop("sections", {})}
    trainer = dist_trainer("moe", stage, folder, config, **changes)
    routed = count_choices(trainer.model)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        **record_of(trainer),
        "evaluated": evaluated(trainer),
        "loads": [(entry.get("expert_load"), entry.get("expert_rank_load")) for entry in logs],
        "ep": trainer.dist_engine.mesh.axes.size("ep"),
        "routed": {path: counts.clone() for path, counts in routed.items()},
        "load_file": read_load(folder) if spread and trainer.is_world_process_zero() else None,
    }


def count_choices(model: Any) -> dict[str, torch.Tensor]:
    """Filled in training: path of a layer's experts -> how often this rank's router chose each."""
    counts: dict[str, torch.Tensor] = {}

    def count(path: str, router: Any, indices: torch.Tensor) -> None:
        if router.training:
            counts[path] = counts.get(path, 0) + torch.bincount(indices.flatten(), minlength=4)

    for path, module in model.named_modules():
        if path.endswith(".gate"):
            where = path.removesuffix("gate") + "experts"
            module.register_forward_hook(lambda router, args, output, where=where: count(where, router, output[2]))
    return counts


def evaluated(trainer: Any) -> list[float]:
    """Loss of sets that are no multiple of any batch."""
    return [trainer.evaluate(texts(size))["eval_loss"] for size in SIZES]


def saved(folder: Path, stage: int, config: dict[str, Any]) -> dict[str, str]:
    """The folder of `save_model`, and the one that stock code writes of the same weights."""
    trainer = dist_trainer("moe", stage, folder, config, max_steps=2)
    trainer.train()
    trainer.save_model(str(folder / "ours"))
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        stock = make_model("moe")
        stock.load_state_dict(state)
        stock.save_pretrained(folder / "stock")
    return {"ours": str(folder / "ours"), "stock": str(folder / "stock")}


def streamed(folder: Path, source: str) -> dict[str, Any]:
    """Bytes of the experts' files that this rank reads, and whether the weights are those of the folder."""
    import transformers as tf

    import hf_dist
    from hf_dist.checkpoint.safetensors_source import bytes_read
    from hf_dist.hf.state_dict import full_state_dict

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "hf_dist": {"check_load": False}}
    stock = tf.AutoModelForCausalLM.from_pretrained(source)
    experts = sum(p.numel() for name, p in stock.named_parameters() if ".experts." in name)
    rest = sum(p.numel() for name, p in stock.named_parameters() if ".experts." not in name)
    model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, source)
    before = bytes_read()
    engine = hf_dist.initialize(model, config={**config, **SPREAD}, device="cpu")
    read = bytes_read() - before
    state = full_state_dict(engine.sharded)
    wrong = [name for name, value in stock.state_dict().items() if not torch.equal(state[name], value)]
    return {"read": read, "experts": 4 * experts, "rest": 4 * rest, "wrong": wrong}


def generated(folder: Path, stage: int, config: dict[str, Any]) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Prompts and tokens; each rank has other prompts and stops at another length."""
    from hf_dist import DistAccelerator

    accelerator = DistAccelerator(dist_config={"zero_optimization": {"stage": stage}, **config})
    model = accelerator.prepare(make_model("moe"))
    model.eval()
    rank = accelerator.process_index
    g = torch.Generator().manual_seed(10 + rank)
    prompt = torch.randint(3, VOCAB, (1 + rank, 3 + 2 * rank), generator=g)
    tokens = generate(model, prompt, 3 + 6 * rank)
    found: list[tuple[list[list[int]], list[list[int]]]] = [(prompt.tolist(), tokens)]
    everyone: list[Any] = accelerator.gather_for_metrics([found[0]], use_gather_object=True)
    return everyone


def generate(model: Any, prompt: torch.Tensor, count: int) -> list[list[int]]:
    """Greedy, as many tokens as asked."""
    given = dict(attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count)
    tokens: list[list[int]] = model.generate(input_ids=prompt, pad_token_id=0, eos_token_id=None, **given).tolist()
    return tokens
