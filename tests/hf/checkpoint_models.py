"""Checkpoints of models of many kinds: what a rank does, and how a plain process loads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist import DistTrainer, DistTrainingArguments
from tests.hf.on_ranks import weights_of
from tests.hf.recipes import classes, make_model, pad, plain_arguments, texts

KINDS = ("tied", "untied", "lora", "lora_modules", "dora", "moe", "bert")
ADAPTERS = ("lora", "lora_modules", "dora")


def untied() -> Any:
    """A llama whose head has its own weights."""
    import transformers as tf

    config = make_model().config
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(config)


def model_of(kind: str) -> Any:
    """The model that is trained."""
    if kind not in ADAPTERS:
        return untied() if kind == "untied" else make_model({"tied": "llama"}.get(kind, kind))
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"lora_modules": {"modules_to_save": ["lm_head"]}, "dora": {"use_dora": True}}.get(
        kind, {}
    )
    torch.manual_seed(0)
    return get_peft_model(untied(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options))


def tokenizer() -> Any:
    """One that can be saved."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def trainer_for(folder: Path, kind: str, stage: int, config: Any, cls: type = DistTrainer, **changes: Any) -> Any:
    """Two steps, a checkpoint after each."""
    config = {"zero_optimization": {"stage": stage}, **(config or {})}
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "gradient_accumulation_steps": 1, **changes}
    arguments = DistTrainingArguments(**plain_arguments(folder, 2, **saving), dist_config=config)
    rows = classes(16) if kind == "bert" else texts(16)
    return cls(
        model_of(kind),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=pad,
        processing_class=tokenizer(),
    )


def example() -> torch.Tensor:
    """A batch to compare logits on; every rank runs it."""
    return torch.arange(3, 19).reshape(2, 8)


def trained(folder: Path, kind: str, stage: int, config: Any = None, **changes: Any) -> dict[str, Any]:
    """Train; `save_model()` into another folder; the live model's weights and logits."""
    trainer = trainer_for(folder, kind, stage, config, **changes)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=example()).logits
    return {
        "folder": str(folder), "weights": weights_of(trainer), "logits": logits,
        "checkpoints": sorted(p.name for p in folder.iterdir()), "best": trainer.state.best_model_checkpoint,
    }  # fmt: skip


def load(kind: str, folder: str, dtype: Any = None) -> nn.Module:
    """As a user would, with nothing of ours."""
    import transformers as tf

    if kind in ADAPTERS:
        from peft import PeftModel

        return PeftModel.from_pretrained(untied(), folder).eval()
    auto = tf.AutoModelForSequenceClassification if kind == "bert" else tf.AutoModelForCausalLM
    model: nn.Module = auto.from_pretrained(folder, **({"dtype": dtype} if dtype else {})).eval()
    return model


def best_kept(folder: Path, stage: int, async_save: bool, only_model: bool, limit: int | None) -> dict[str, Any]:
    """The loss falls and the highest counts, so the first of three checkpoints is the best."""
    changes = dict(
        max_steps=3, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=True, save_total_limit=limit, save_only_model=only_model,
    )  # fmt: skip
    return trained(folder, "tied", stage, {"checkpoint": {"async_save": async_save}}, **changes)


def cleaned(folder: Path, limit: int | None) -> dict[str, Any]:
    """As `best_kept`, and another program removes the best checkpoint during the last step."""
    trainer = trainer_for(
        folder, "tied", 2, {}, max_steps=3, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, save_total_limit=limit,
    )  # fmt: skip
    step = trainer.training_step

    def cleans(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2 and trainer.args.process_index == 0:
            shutil.rmtree(folder / "checkpoint-1", ignore_errors=True)
        return step(*args, **kwargs)

    trainer.training_step = cleans
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return {"steps": trainer.state.global_step, "saved": weights_of(trainer), "folder": str(folder)}


def limited(folder: Path, async_save: bool, limit: int) -> list[str]:
    """What is left of three checkpoints."""
    trainer = trainer_for(
        folder, "tied", 3, {"checkpoint": {"async_save": async_save}}, max_steps=3, save_total_limit=limit
    )
    trainer.train()
    trainer.accelerator.wait_for_everyone()  # the first rank's claim of the folder is gone
    return sorted(path.name for path in folder.iterdir())


def background_failure(folder: Path) -> dict[str, Any]:
    """The second checkpoint cannot be finished; when does training hear of it?"""
    trainer = trainer_for(folder, "tied", 2, {"checkpoint": {"async_save": True}}, max_steps=6, save_steps=2)
    save = trainer._save_checkpoint

    def spoil(*args: Any) -> None:
        save(*args)
        trainer.checkpoint_writer.join()  # so that the next step can know
        if trainer.state.global_step == 2:
            write = trainer.checkpoint_writer._write

            def spoiled(working: Path, *rest: Any) -> None:
                (working / "hf_dist_weights.json").unlink(missing_ok=True)
                (working / "model.safetensors").mkdir(exist_ok=True)
                write(working, *rest)

            trainer.checkpoint_writer._write = spoiled

    trainer._save_checkpoint = spoil
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "step": trainer.state.global_step}
    return {"error": None}


class Overrides(DistTrainer):
    """A user's own, as TRL and others write them: each calls its base and adds a file."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        from safetensors.torch import save_file

        save_file({"x": torch.ones(2)}, Path(str(output_dir)) / "projector.safetensors")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """HF's, and a note beside the configuration."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            assert (folder / "config.json").is_file()
            (folder / "note.txt").write_text(str(self.state.global_step))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.create_model_card(model_name="tiny")
        super()._save_checkpoint(model, trial)
        self.saved = [*getattr(self, "saved", []), self.state.global_step]


def overridden(folder: Path, stage: int, async_save: bool) -> dict[str, Any]:
    """Files of a checkpoint and of `save_model()`."""
    trainer = trainer_for(folder, "tied", stage, {"checkpoint": {"async_save": async_save}}, Overrides)
    pushed: list[Any] = []
    trainer.push_to_hub = lambda *args, **kwargs: pushed.append("push")
    trainer._push_from_checkpoint = pushed.append
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # the note is rank 0's
    return {
        "checkpoint": sorted(p.name for p in (folder / "checkpoint-2").iterdir()),
        "note": (folder / "checkpoint-2" / "note.txt").read_text(),
        "top": sorted(p.name for p in folder.iterdir()), "saved": trainer.saved, "pushed": pushed,
    }  # fmt: skip


def no_room(folder: Path, stage: int) -> str:
    """The error of a disk that is too small, and how often it is said before the first step."""
    import shutil
    from unittest import mock

    small = mock.Mock(free=100_000)
    trainer = trainer_for(folder, "tied", stage, None, save_total_limit=2)
    with mock.patch.object(shutil, "disk_usage", return_value=small):
        try:
            trainer.train()
        except Exception as error:
            return f"{trainer.state.global_step} {type(error).__name__}: {error}"
    return "trained"
