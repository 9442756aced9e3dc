"""Adapters of PEFT in a loop of one's own: with accelerate in one process (`stage` None), or sharded on ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.covering import FULL_GRID
from tests.hf.recipes import CLASSES, SMALL, VOCAB

Record = dict[str, Any]
ROWS, LENGTH, STEPS = 4, 8, 4 if FULL_GRID else 2
LINEAR = ["q_proj", "v_proj", "down_proj"]


def base_model(classifier: bool = False, tied: bool = False) -> Any:
    """A small Llama, the same on every call and rank."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        **SMALL, vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, num_labels=CLASSES,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return tf.LlamaForSequenceClassification(config) if classifier else tf.LlamaForCausalLM(config)


def lora(**changes: Any) -> Any:
    """Adapters whose B is not zero, so that every gradient is something."""
    from peft import LoraConfig

    given = dict(r=4, lora_alpha=8, target_modules=LINEAR, init_lora_weights=False, task_type="CAUSAL_LM")
    return LoraConfig(**{**given, **changes})  # type: ignore[arg-type]


def adapted(config: Any, model: Any = None, **changes: Any) -> Any:
    """The base model with one adapter."""
    from peft import get_peft_model

    model = model or base_model()
    torch.manual_seed(4)
    return get_peft_model(model, config, **changes)


def with_prompt(config_class: str) -> Any:
    """Virtual tokens before the prompt."""
    import peft

    return adapted(getattr(peft, config_class)(task_type="CAUSAL_LM", num_virtual_tokens=3))


def several() -> Any:
    """Two adapters, the second of another rank."""
    model = adapted(lora())
    torch.manual_seed(5)
    model.add_adapter("second", lora(r=2))
    return model


def saving_modules() -> Any:
    """Embedding and head are trained beside the adapters, in two adapters."""
    model = adapted(lora(modules_to_save=["embed_tokens", "lm_head"]))
    torch.manual_seed(5)
    model.add_adapter("second", lora(modules_to_save=["lm_head"]))
    return model


def ia3() -> Any:
    """Vectors that scale activations."""
    from peft import IA3Config

    changes: Any = dict(target_modules=LINEAR, feedforward_modules=["down_proj"], init_ia3_weights=True)
    return adapted(IA3Config(task_type="CAUSAL_LM", **changes))


def loha() -> Any:
    """Hadamard products."""
    from peft import LoHaConfig

    return adapted(LoHaConfig(r=4, target_modules=LINEAR, task_type="CAUSAL_LM", init_weights=False))


def quantised(folder: Path) -> Any:
    """A base in packed 4-bit weights with scales that are quantised, too; the files are made by the main rank."""
    from peft import prepare_model_for_kbit_training

    four_bits = tf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    base_model().save_pretrained(folder / "plain")
    torch.distributed.barrier()
    model = tf.LlamaForCausalLM.from_pretrained(folder / "plain", quantization_config=four_bits, device_map={"": "cpu"})
    return adapted(lora(), prepare_model_for_kbit_training(model))


KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: adapted(lora(target_modules="all-linear")),
    "dora": lambda: adapted(lora(use_dora=True)),
    "embedding": lambda: adapted(lora(target_modules=[*LINEAR, "embed_tokens", "lm_head"])),
    "tied": lambda: adapted(lora(target_modules=[*LINEAR, "embed_tokens"]), base_model(tied=True)),
    "tied_views": lambda: adapted(
        lora(target_modules=["embed_tokens", "lm_head", "q_proj"], ensure_weight_tying=True), base_model(tied=True)
    ),
    "score": lambda: adapted(lora(task_type="SEQ_CLS"), base_model(classifier=True)),
    "modules_to_save": saving_modules,
    "several": several,
    "half_base": lambda: adapted(lora(), base_model().to(torch.bfloat16)),
    "ia3": ia3,
    "loha": loha,
}


def rows(rank: int, world: int, classifier: bool) -> dict[str, torch.Tensor]:
    """This rank's part of the batch; every row counts alike."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=g)
    labels = torch.randint(CLASSES, (ROWS,), generator=g) if classifier else ids
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return {"input_ids": ids[mine], "labels": labels[mine]}


def accelerator_of(stage: int | None, config: Any = None) -> Any:
    """accelerate's, or ours."""
    if stage is None:
        from accelerate import Accelerator

        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
        ):  # a DDP of one process parts views of one memory
            os.environ.pop(name, None)
        return Accelerator(cpu=True)
    from hf_dist import DistAccelerator

    return DistAccelerator(dist_config={"zero_optimization": {"stage": stage}, **(config or {})})


def train(folder: Path, kind: str, stage: int | None, checkpointing: bool = False, config: Any = None) -> Record:
    """A few steps; the adapter is switched after half of them where there is another. Then adapters off, saved, and merged."""
    accelerator = accelerator_of(stage, config)
    model = quantised(folder) if kind == "quantised" else KINDS[kind]()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    # All of the model: what is frozen has no gradient, and is passed over until its adapter is switched on.
    decay = 0.0 if kind == "tied_views" else 0.1  # torch decays a view after the other has been stepped (tied_views.py)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3, weight_decay=decay)
    model, optimizer = accelerator.prepare(model, optimizer)
    model = accelerator.unwrap_model(model)
    batch = rows(accelerator.process_index, accelerator.num_processes, kind == "score")
    record: Record = {"losses": [], "norms": []}
    for step in range(STEPS):
        if step == STEPS // 2 and "second" in model.peft_config:
            model.set_adapter("second")
        loss = model(**batch).loss
        accelerator.backward(loss)
        record["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        record["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
    record["weights"] = {n: v.clone() for n, v in accelerator.get_state_dict(model).items()}
    model.train(kind == "quantised")  # in evaluation bitsandbytes packs for the CPU anew, which needs larger layers
    record |= {name: measured(accelerator, model, batch, name) for name in ("adapted", "disabled")}
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    accelerator.wait_for_everyone()
    if kind == "quantised":
        record["numel"] = held_numel(accelerator, stage)
    else:
        record["unmerged"] = merge_and_back(accelerator, model, batch)
        record |= merged(accelerator, model, batch, folder)
    record["folder"] = str(folder)
    return record


def converted(folder: Path, init: str, stage: int | None) -> Record:
    """An adapter whose initialisation changes the base, trained and saved as LoRA of the base as it was."""
    accelerator = accelerator_of(stage)
    model = adapted(lora(init_lora_weights=init))
    first = folder / f"first{accelerator.process_index}"
    model.save_pretrained(first)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3, eps=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = rows(accelerator.process_index, accelerator.num_processes, False)
    for _ in range(2):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    whole = accelerator.unwrap_model(model)
    whole.save_pretrained(folder / "lora", path_initial_model_for_weight_conversion=str(first))
    accelerator.wait_for_everyone()
    with torch.no_grad():
        record = {"loss": float(accelerator.reduce(model(**batch).loss, "mean")), "adapters": list(whole.peft_config)}
    if accelerator.is_main_process:
        from peft import PeftModel

        plain = PeftModel.from_pretrained(base_model(), folder / "lora")
        record["reloaded"] = float(plain(**rows(0, 1, False)).loss)
        record["rank"] = plain.peft_config["default"].r
    return record


@torch.no_grad()
def measured(accelerator: Any, model: Any, batch: Any, how: str) -> float:
    """The loss with and without adapters."""
    if how == "adapted":
        return float(accelerator.reduce(model(**batch).loss, "mean"))
    with model.disable_adapter():
        return float(accelerator.reduce(model(**batch).loss, "mean"))


def held_numel(accelerator: Any, stage: int | None) -> tuple[int, int]:
    """Packed bytes that this rank holds at rest, and those of the whole model."""
    if stage is None:
        return 0, 0
    groups = [g for g in accelerator.engine.sharded.groups if g.dtype == torch.uint8]
    held = sum(g.resident_nbytes()[tier] for g in groups for tier in g.resident_nbytes())
    return held, sum(slot.numel for g in groups for slot in g.layout.slots)


def merge_and_back(accelerator: Any, model: Any, batch: Any) -> float:
    """The loss after `merge_adapter` and `unmerge_adapter`."""
    model.merge_adapter()
    model.unmerge_adapter()
    return measured(accelerator, model, batch, "adapted")


def merged(accelerator: Any, model: Any, batch: Any, folder: Path) -> Record:
    """The model without adapters: its loss, and its folder."""
    whole = model.merge_and_unload()
    record = {"merged": measured(accelerator, whole, batch, "adapted")}
    whole.save_pretrained(folder / "merged")
    accelerator.wait_for_everyone()
    return record


# ---- what cannot be, and weights that arrive later


def outcome_of(function: Callable[[], Any]) -> str:
    """The error as a user sees it, or that there was none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(folder: Path) -> dict[str, str]:
    """What changes the set of adapters of a prepared model."""
    accelerator = accelerator_of(3)
    model = several()
    model.save_pretrained(folder / f"rank_{accelerator.process_index}")
    model = accelerator.prepare(model)
    saved = str(folder / f"rank_{accelerator.process_index}")
    prompt = with_prompt("PromptTuningConfig")
    found = {
        "add": outcome_of(lambda: model.add_adapter("third", lora())),
        "load": outcome_of(lambda: model.load_adapter(saved, "third")),
        "weigh": outcome_of(lambda: model.add_weighted_adapter(["default", "second"], [1.0, 1.0], "third", "cat")),
        "delete": outcome_of(lambda: model.delete_adapter("second")),
        "prompt": outcome_of(lambda: accelerator_of(3).prepare(prompt)),
    }
    with torch.no_grad():  # nothing was changed by what was refused
        found["loss"] = str(float(model(**rows(0, 1, False)).loss))
    return found


def loaded(folder: Path, stage: int) -> list[float]:
    """Losses before and after other weights were loaded into an adapter of the prepared model, and after a step."""
    accelerator = accelerator_of(stage)
    other = adapted(lora())
    for name, p in other.named_parameters():
        if "lora_" in name:
            p.data.mul_(2)
    other.save_pretrained(folder / f"rank_{accelerator.process_index}")
    model = adapted(lora())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model = accelerator.unwrap_model(model)
    batch = rows(0, 1, False)
    losses = [measured(accelerator, model, batch, "adapted")]
    model.load_adapter(str(folder / f"rank_{accelerator.process_index}"), "default", is_trainable=True)
    losses.append(measured(accelerator, model, batch, "adapted"))
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    return [*losses, measured(accelerator, model, batch, "adapted")]


def half_merged(folder: Path, kind: str) -> Record:
    """Adapters trained in bf16 with fp32 masters, saved, and merged."""
    return train(folder, kind, 3, config={"bf16": {"enabled": True}})
