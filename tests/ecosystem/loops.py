"""Loops without a Trainer, as scripts for accelerate are written: with plain DDP (`stage` None), or sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.hf.recipes import make_model, pad, texts

Record = dict[str, Any]


OF_THE_TRAINER: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "bf16": {"enabled": "auto"},
}
"""What most files hold that are written for a Trainer; a loop of one's own reads its numbers from the script."""


LAYOUTS: dict[int, dict[str, Any]] = {
    4: {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
    5: {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}},
    6: {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}},
}
"""What numbers above those of the stages stand for."""


def config_of(stage: int) -> dict[str, Any]:
    """The JSON of a stage, or of a layout."""
    return LAYOUTS.get(stage, {"zero_optimization": {"stage": stage}})


def accelerator_of(stage: int | None, **arguments: Any) -> Any:
    """accelerate's, or ours: nothing else of a script changes."""
    if stage is None:
        from accelerate import Accelerator

        return Accelerator(cpu=True, **arguments)
    from hf_dist import DistAccelerator

    return DistAccelerator(dist_config={**config_of(stage), **OF_THE_TRAINER}, **arguments)


def loop(folder: Path, stage: int | None, adapters: bool, checkpointing: bool) -> Record:
    """A loop of accelerate's documentation: two epochs with accumulation, clipping, a schedule; evaluation."""
    accelerator = accelerator_of(stage, gradient_accumulation_steps=2)
    model = _model(adapters, checkpointing)
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and "norm" not in n]
    others = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=5e-3, eps=1e-3)
    scheduler = tf.get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=12)
    data: Any = texts(26, ragged=False)  # the last window has one microbatch
    held_out: Any = texts(7, seed=9)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, collate_fn=pad)
    evaluation = torch.utils.data.DataLoader(held_out, batch_size=2, collate_fn=pad)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    record: Record = {"losses": [], "norms": [], "rates": []}
    tf.set_seed(11)
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    record["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                    record["rates"].append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
    record["evaluated"], record["rows"] = _evaluated(accelerator, model, evaluation)
    record["saved"] = _saved(accelerator, model, folder)
    return record


def loop_by_hand(folder: Path, stage: int | None, adapters: bool, checkpointing: bool) -> Record:
    """Everything one after the other: objects prepared one by one, windows counted by hand, `no_sync`, plain backward."""
    accelerator = accelerator_of(stage)
    model = accelerator.prepare(_model(adapters, checkpointing))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, eps=1e-3)
    optimizer = accelerator.prepare(optimizer)
    data: Any = texts(24, ragged=False)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2, collate_fn=pad))
    record: Record = {"losses": [], "norms": []}
    model.train()
    for index, batch in enumerate(loader):
        loss = model(**batch).loss
        if index % 3 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(loss / 3)
        elif index % 3 == 1:
            accelerator.backward(loss / 3)  # scripts that know no `no_sync`
        else:
            (loss / 3).backward()
            record["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            model.zero_grad()
        record["losses"].append(float(accelerator.gather(loss.detach()).mean()))
    record["saved"] = _saved(accelerator, model, folder)
    accelerator.free_memory()
    return record


def two_models(folder: Path, stage: int | None, adapters: bool, checkpointing: bool) -> Record:
    """Two models that are trained in turn, each with its own optimizer, as for a GAN; and a frozen teacher."""
    accelerator = accelerator_of(stage)
    first, second, teacher = (_model(adapters, checkpointing) for _ in range(3))
    with torch.no_grad():
        for model, factor in ((first, 0.7), (second, 1.5)):
            for p in model.parameters():
                p.mul_(factor)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 5e-3, eps=1e-3) for m in (first, second)
    ]
    first, one, second, two = accelerator.prepare(first, optimizers[0], second, optimizers[1])
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True).eval()
    record: Record = {"losses": [], "norms": [], "sums": []}
    for step in range(4):
        rows: Any = texts(4, ragged=False, seed=step)
        batch = pad(rows[accelerator.process_index :: 2])
        with torch.no_grad():
            target = teacher(input_ids=batch["input_ids"]).logits.softmax(-1)
        for model, optimizer in ((first, one), (second, two)):
            logits = model(input_ids=batch["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
            accelerator.backward(loss)
            record["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            record["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
            record["sums"].append(float(accelerator.reduce(loss.detach(), "sum", scale=0.5)))  # of XLA alone
    return record


def _model(adapters: bool, checkpointing: bool) -> Any:
    model = make_model("lora" if adapters else "llama")
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def _evaluated(accelerator: Any, model: Any, loader: Any) -> tuple[float, list[int]]:
    """Mean loss of the batches, and the first token of every row: each row once, in order."""
    model.eval()
    losses, first = [], []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
        first += accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
    return float(torch.cat(losses).mean()), first


def _saved(accelerator: Any, model: Any, folder: Path) -> list[float]:
    """Norms of the tensors in the folder that a script writes at its end, the way HF's own scripts do."""
    from safetensors.torch import load_file

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.wait_for_everyone()
    (path,) = folder.glob("*.safetensors")
    return [float(value.norm()) for _, value in sorted(load_file(path).items())]


# ---- what is refused, and what the JSON decides


def clipped_by_json(folder: Path, norm: float) -> list[float]:
    """Weights after a step of SGD that is clipped by the JSON alone, and by the script alone."""
    from hf_dist import DistAccelerator

    result = []
    for config in ({"gradient_clipping": norm}, {"gradient_clipping": "auto"}):
        accelerator = DistAccelerator(dist_config={"zero_optimization": {"stage": 2}, **config})
        model = make_model("llama")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        rows: Any = texts(4, ragged=False)
        accelerator.backward(model(**pad(rows)).loss)
        if config["gradient_clipping"] == "auto":
            accelerator.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        result.append(float(sum(w.double().norm() for w in accelerator.get_state_dict(model).values())))
        accelerator.free_memory()
    return result


def errors(folder: Path) -> dict[str, str]:
    """Messages of scripts that ask for two things at once, or for nothing."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    from hf_dist import DistAccelerator

    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    accelerator = DistAccelerator(dist_config=config)
    asked: dict[str, Callable[[], Any]] = {
        "accumulation": lambda: DistAccelerator(dist_config=config, gradient_accumulation_steps=4),
        "engine": lambda: DistAccelerator(
            dist_config=config, fsdp_plugin=object.__new__(FullyShardedDataParallelPlugin)
        ),
        "config": lambda: DistAccelerator(),
        "batch": lambda: DistAccelerator(dist_config={"train_micro_batch_size_per_gpu": 4}).prepare(
            make_model("llama"), torch.utils.data.DataLoader(list(range(8)), batch_size=2)
        ),
        "clipping": lambda: accelerator.clip_grad_norm_([], 1.0),
        "uneven": lambda: accelerator.join_uneven_inputs([]),
    }
    return {name: _message(act) for name, act in asked.items()}


def _message(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


LOOPS: dict[str, Callable[..., Record]] = {"raw": loop, "by_hand": loop_by_hand, "two_models": two_models}
