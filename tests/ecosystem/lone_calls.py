"""What scripts do on the main rank alone: under stages that let them, and where all ranks are needed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

from hf_dist import DistTrainingArguments
from hf_dist.errors import OneRankError
from tests.ecosystem import runs
from tests.ecosystem.savers import read
from tests.hf.layout_jobs import matrices
from tests.hf.recipes import make_model, pad, texts

IDS = torch.arange(3, 11).reshape(1, 8)


def trained(folder: Path, stage: int, layout: dict[str, Any] | None = None) -> Any:
    """One step of a small model; a rank that waits for 12 seconds is reported, one that is alone after 2."""
    config = {**runs.config_of(stage), **(layout or {}), "hf_dist": {"stall_report_seconds": 12}}
    changes = dict(max_steps=1, ddp_timeout=60 if layout is None else 30)  # which is what one waits that is left alone
    args = runs.arguments(folder, None, False, DistTrainingArguments, **changes, dist_config=config)
    trainer = runs.over(stage, Trainer)(make_model("llama"), args, train_dataset=texts(8), data_collator=pad)
    trainer.train()
    return trainer


CALLS = {
    "save_model": lambda trainer, folder: trainer.save_model(str(folder / "trainer")),
    "save_pretrained": lambda trainer, folder: trainer.model.save_pretrained(str(folder / "model")),
    "generate": lambda trainer, folder: trainer.model.eval().generate(IDS, max_new_tokens=4, do_sample=False),
    "get_state_dict": lambda trainer, folder: trainer.accelerator.get_state_dict(trainer.model),
    "evaluate": lambda trainer, folder: trainer.evaluate(texts(4)),
    "predict": lambda trainer, folder: trainer.predict(texts(4)),
    "save_checkpoint": lambda trainer, folder: trainer.dist_engine.save_checkpoint(folder / "engine"),
    "save_state": lambda trainer, folder: trainer.accelerator.save_state(str(folder / "state")),
    "logits": lambda trainer, folder: trainer.model.eval()(IDS).logits.detach(),
}


def works(rank: int, world: int, root: str, stages: list[int]) -> list[dict[str, Any]]:
    """Rank 0 alone makes four calls, then training goes on and all ranks save: what it has got, by stage."""
    found = []
    for stage in stages:
        folder = Path(root) / str(stage)
        trainer = trained(folder, stage)
        got: dict[str, Any] = {}
        if rank == 0:
            with torch.no_grad():
                got = {
                    name: CALLS[name](trainer, folder)
                    for name in ("save_model", "save_pretrained", "generate", "logits")
                }
            got["folders"] = [read(folder / "trainer"), read(folder / "model")]
        trainer.args.max_steps = 2
        trainer.train()
        trainer.save_model(str(folder / "again"))
        got["again"] = read(folder / "again")  # on every rank, as soon as it is back
        found.append(got)
    return found


class SavesAdapters(TrainerCallback):
    """As users of PEFT and LLaMA-Factory write it: the main rank alone."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            kwargs["model"].save_pretrained(f"{args.output_dir}/adapters-{state.global_step}")


def adapters(rank: int, world: int, root: str, stages: list[int]) -> list[list[dict[str, Any]]]:
    """By stage: what the callback has saved after each of two steps, and what all ranks save together after the last."""
    found = []
    for stage in stages:
        folder = Path(root) / str(stage)
        config = runs.config_of(stage)
        changes: dict[str, Any] = dict(max_steps=2, save_strategy="steps", save_steps=1, ddp_timeout=60)
        args = runs.arguments(folder, None, False, DistTrainingArguments, **changes, dist_config=config)
        model = get_peft_model(make_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        given = dict(train_dataset=texts(8), data_collator=pad, callbacks=[SavesAdapters()])
        trainer = runs.over(stage, Trainer)(model, args, **given)
        trainer.train()
        trainer.save_model(folder / "saved")
        if rank == 0:  # as LLaMA-Factory's reward stage
            trainer.model.save_pretrained(folder / "alone")
        trainer.accelerator.wait_for_everyone()
        trainer.model.save_pretrained(folder / "final")
        trainer.accelerator.wait_for_everyone()
        found.append([read(folder / name) for name in ("adapters-1", "adapters-2", "alone", "final")])
    return found


def refused(rank: int, world: int, root: str, call: str, meanwhile: str) -> dict[str, Any]:
    """At stage 3 rank 0 makes `call` alone, while the other waits, makes another call, trains with it, or ends."""
    trainer = trained(Path(root), 3, matrices(2) if meanwhile == "train" else None)
    os.environ["TORCHELASTIC_ERROR_FILE"] = (
        f"{root}/error.json"  # where a launcher looks for what a rank says at its end
    )
    started = time.monotonic()
    try:
        if rank == 0:
            CALLS[call](trainer, Path(root))
        elif meanwhile == "barrier":
            trainer.accelerator.wait_for_everyone()
        elif meanwhile == "train":
            trainer.args.max_steps = 2
            trainer.train()
        elif meanwhile != "end":
            CALLS[meanwhile](trainer, Path(root))
    except OneRankError as error:
        said = {"error": str(error), "seconds": time.monotonic() - started}
        Path(root, f"said_{rank}.json").write_text(json.dumps(said))
        if meanwhile == "barrier":
            trainer.accelerator.wait_for_everyone()
        return said
    return {}
