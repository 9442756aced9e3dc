"""What libraries and users write when they save: under plain DDP (`stage` None) or sharded, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.ecosystem.runs import arguments, over
from tests.ecosystem.tiny import words
from tests.hf.recipes import SMALL, VOCAB, make_model, pad, texts

OURS = ("hf_dist", "latest", "optimizer.pt", "scheduler.pt", "rng_state", "trainer_state.json", "training_args.bin")
"""Training state, of which each program has its own."""
FOLDERS = ("checkpoint-2", "saved", "final")
SAVING: dict[str, Any] = dict(
    max_steps=2, save_strategy="steps", save_steps=2, gradient_accumulation_steps=1, ddp_timeout=40
)
BEST: dict[str, Any] = dict(
    save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, greater_is_better=True
)
"""The first checkpoint is the best: its loss is the larger one."""


def read(folder: Path) -> dict[str, Any]:
    """Every file below `folder` but training state: weights as {name: tensor}, anything else by its bytes."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if name.startswith(OURS) or name == "README.md":  # a model card has times in it
            continue
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found[name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                found[f"{name}, header"] = _header(path)
        else:
            found[name] = path.read_bytes()
    return found


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def save_masked(root: Path) -> None:
    """`root/masked`: a BERT with its masked head, for a sparse encoder."""
    torch.manual_seed(4)
    off: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tf.BertForMaskedLM(tf.BertConfig(**SMALL, **off, vocab_size=VOCAB, max_position_embeddings=32)).save_pretrained(
        root / "masked"
    )
    tf.AutoTokenizer.from_pretrained(root / "encoder").save_pretrained(root / "masked")


def pairs(count: int = 16) -> Dataset:
    """Sentences of ragged lengths that belong together."""
    g = torch.Generator().manual_seed(6)
    return Dataset.from_list([{"anchor": words(3 + i % 5, g), "positive": words(4 + i % 3, g)} for i in range(count)])


def labelled(column: str, labels: list[Any], count: int = 16) -> Dataset:
    """Two sentences and a label."""
    rows = pairs(count).rename_columns({"anchor": "sentence1", "positive": "sentence2"})
    return rows.add_column(column, [labels[i % len(labels)] for i in range(count)])


# ---- sentence-transformers


def bi_encoder(root: Path, changes: str) -> Any:
    """A BERT with mean pooling, as `SentenceTransformer(folder)` makes it of a plain encoder; perhaps more modules."""
    from sentence_transformers import SentenceTransformer, models

    model = SentenceTransformer(str(root / "encoder"), device="cpu")
    if changes == "dense":
        torch.manual_seed(3)
        model = SentenceTransformer(modules=[model[0], model[1], models.Dense(32, 16)], device="cpu")
    if changes == "lora":
        from peft import LoraConfig

        torch.manual_seed(3)
        settings: dict[str, Any] = dict(r=4, target_modules=["query", "value"], init_lora_weights=False)
        model.add_adapter(LoraConfig(task_type="FEATURE_EXTRACTION", lora_dropout=0.0, **settings))
    return model


def sentence_trainer(folder: Path, stage: int | None, kind: str, root: Path) -> Any:
    """A SentenceTransformerTrainer of `kind`."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    changes = {**SAVING, **BEST} if kind == "best" else SAVING
    args = arguments(folder, stage, False, SentenceTransformerTrainingArguments, **changes)
    model, rows = bi_encoder(root, kind), pairs()
    loss: Any = losses.MultipleNegativesRankingLoss(model)
    torch.manual_seed(11)
    if kind == "cached":  # several forwards of pieces of a batch before one backward
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=1)
    if kind == "softmax":
        loss, rows = losses.SoftmaxLoss(model, 32, 3), labelled("label", [0, 1, 2])
        args.max_steps = 3  # the second changes the classifier at another rate, and the third shows it
    if kind == "gist":
        loss = losses.GISTEmbedLoss(model, SentenceTransformer(str(root / "encoder"), device="cpu"))
    data: dict[str, Any] = dict(train_dataset=rows, eval_dataset=rows if kind == "best" else None)
    return over(stage, SentenceTransformerTrainer)(model, args, **data, loss=loss)


def cross_trainer(folder: Path, stage: int | None, root: Path) -> Any:
    """A CrossEncoder with one number per pair."""
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        losses,
    )

    # DDP finds nothing unused, and stumbles over looking for it.
    changes = {**SAVING, "ddp_find_unused_parameters": False}
    args = arguments(folder, stage, False, CrossEncoderTrainingArguments, **changes)
    torch.manual_seed(5)  # of its head
    model = CrossEncoder(str(root / "encoder"), num_labels=1, device="cpu")
    loss = losses.BinaryCrossEntropyLoss(model)
    return over(stage, CrossEncoderTrainer)(model, args, train_dataset=labelled("label", [0.0, 1.0]), loss=loss)


def sparse_trainer(folder: Path, stage: int | None, root: Path) -> Any:
    """A SPLADE over a masked language model."""
    from sentence_transformers import (
        SparseEncoder,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )
    from sentence_transformers.sparse_encoder import losses

    args = arguments(folder, stage, False, SparseEncoderTrainingArguments, **SAVING)
    torch.manual_seed(5)
    model = SparseEncoder(str(root / "masked"), device="cpu")
    ranking = losses.SparseMultipleNegativesRankingLoss(model)
    loss = losses.SpladeLoss(model, loss=ranking, document_regularizer_weight=3e-3, query_regularizer_weight=5e-3)
    return over(stage, SparseEncoderTrainer)(model, args, train_dataset=pairs(), loss=loss)


TRAINERS: dict[str, Callable[..., Any]] = {"cross": cross_trainer, "sparse": sparse_trainer}


def evaluation(trainer: Any, stage: int | None) -> float:
    """The mean loss of the batches of 17 pairs; the last pair is dropped by their sampler.

    accelerate does not know that it is, and lets the stock Trainer count one row of the last batches.
    """
    step, seen = trainer.prediction_step, []

    def recording(*args: Any, **kwargs: Any) -> Any:
        seen.append(step(*args, **kwargs))
        return seen[-1]

    trainer.prediction_step = recording
    found = trainer.evaluate(pairs(17))["eval_loss"]
    batches = trainer.accelerator.gather(torch.stack([loss for loss, *_ in seen]))
    assert len(batches) == 8
    return float(batches.mean()) if stage is None else found


def sentences(folder: Path, kind: str, stage: int | None, root: str) -> dict[str, Any]:
    """Train, with a checkpoint; `save_model()`; `model.save_pretrained()`: what is in the three folders, read by rank 0."""
    if kind in TRAINERS:
        trainer = TRAINERS[kind](folder, stage, Path(root))
    else:
        trainer = sentence_trainer(folder, stage, kind, Path(root))
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    trainer.model.save_pretrained(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    encode = getattr(trainer.model, "encode", lambda *_, **__: None)
    embedding = encode(["w5 w9 w11"], convert_to_tensor=True)
    evaluated = evaluation(trainer, stage) if kind in ("plain", "dense", "lora", "gist") else 0.0
    if not trainer.is_world_process_zero():
        return {}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [*losses, evaluated],
        "folder": str(folder),
        "embedding": embedding,
        **{name: read(folder / name) for name in FOLDERS},
    }


def resumed(folder: Path, kind: str, first: int | None, then: list[int | None], root: str) -> list[dict[str, Any]]:
    """Train at stage `first`; then the last step again from the checkpoint before it, at each stage of `then`."""
    found = []
    for number, stage in enumerate([first, *then]):
        trainer = sentence_trainer(folder / str(number), stage, kind, Path(root))
        trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=str(folder / "0" / "checkpoint-2") if number else None)
        trainer.save_model(str(folder / "saved" / str(number)))
        trainer.accelerator.wait_for_everyone()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if trainer.is_world_process_zero():
            found.append({"losses": losses, "saved": read(folder / "saved" / str(number))})
    return found


# ---- users' own code


class Cloning(tf.Trainer):
    """As FlagEmbedding, LLaVA and many scripts write it."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.is_world_process_zero():
            return
        state = self.model.state_dict()
        cloned = type(state)({name: value.clone().cpu() for name, value in state.items()})
        self.model.save_pretrained(output_dir, state_dict=cloned)


class MainAlone(tf.Trainer):
    """Saves by itself, on one rank."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.is_world_process_zero():
            self.model.save_pretrained(output_dir or self.args.output_dir)


class Averaging(tf.Trainer):
    """Ends with the mean of the best checkpoint and the one that it reads itself."""

    def _load_best_model(self) -> None:
        super()._load_best_model()
        mean = load_file(Path(str(self.state.best_model_checkpoint)) / "model.safetensors")
        for name, tensor in load_file(Path(str(self.args.output_dir)) / "checkpoint-2" / "model.safetensors").items():
            mean[name] = (mean[name] + tensor) / 2
        self.model.load_state_dict(mean, strict=False)  # the tied head has no entry


class Part(tf.Trainer):
    """Saves a part of the model, as those do that train a projector."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.is_world_process_zero():
            return
        Path(str(output_dir)).mkdir(exist_ok=True)
        part = {n: p.detach().cpu().clone() for n, p in self.model.named_parameters() if "mlp" in n}
        save_file(part, Path(str(output_dir)) / "projector.safetensors")
        self.model.config.save_pretrained(output_dir)


class Llava(tf.Trainer):
    """As LLaVA and its many relatives: overrides that decide by an argument and call their base."""

    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        if getattr(self.args, "tune_mm_mlp_adapter", False):
            raise NotImplementedError
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not getattr(self.args, "tune_mm_mlp_adapter", False):
            super()._save(output_dir, state_dict)


def safe_save_model_for_hf_trainer(trainer: tf.Trainer, output_dir: str) -> None:
    """The end of LLaVA's script; alpaca's and FastChat's have the second half alone."""
    if trainer.deepspeed:
        trainer.save_model(output_dir)
        return
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        cpu_state_dict = {key: value.cpu() for key, value in state_dict.items()}
        del state_dict
        trainer._save(output_dir, state_dict=cpu_state_dict)


class Renaming(tf.LlamaForCausalLM):
    """A model whose files have names of its own."""

    def save_pretrained(self, folder: str, note: str = "none", **kwargs: Any) -> None:
        Path(folder).mkdir(exist_ok=True)
        state = {f"mine.{n}": t for n, t in (kwargs.get("state_dict") or self.state_dict()).items()}
        del state["mine.lm_head.weight"]  # tied
        save_file(state, Path(folder) / "own.safetensors")
        (Path(folder) / "note.txt").write_text(f"{note} {next(self.parameters()).dtype}")


class ValueHead(torch.nn.Module):
    """A wrapper whose `state_dict` drops the name of what it wraps, as TRL's and LLaMA-Factory's."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = make_model("llama")
        self.pretrained_model.lm_head.requires_grad_(False)
        torch.manual_seed(2)
        self.v_head = torch.nn.Linear(SMALL["hidden_size"], 1)

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        hidden = self.pretrained_model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        values = self.v_head(hidden).squeeze(-1)
        return {"loss": (values - input_ids / VOCAB).square().mean()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = self.pretrained_model.model.state_dict(*args, **kwargs)
        return {**state, **{f"v_head.{n}": v for n, v in self.v_head.state_dict(*args, **kwargs).items()}}


class Growing(torch.nn.Module):
    """Notes what it was trained with in a buffer that grows, and takes a longer one from a file, as a test of HF's does."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)
        self.register_buffer("seen", torch.empty(0, dtype=torch.long))

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        if self.training:
            self.seen = torch.cat([self.seen, input_ids[:, 1]])
        logits = self.head(self.embed(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, strict, assign)


def renaming() -> Any:
    model = make_model("llama")
    model.__class__ = Renaming
    return model


OWN: dict[str, tuple[Any, Callable[[], Any]]] = {
    "cloning": (Cloning, lambda: make_model("llama")),
    "main_alone": (MainAlone, lambda: make_model("llama")),
    "llava": (Llava, lambda: make_model("llama")),
    "averaging": (Averaging, lambda: make_model("llama")),
    "part": (Part, lambda: make_model("llama")),
    "renaming": (tf.Trainer, renaming),
    "value_head": (tf.Trainer, ValueHead),
}


def own_code(folder: Path, kind: str, stage: int | None, root: str) -> dict[str, Any]:
    """Train, with a checkpoint; `save_model()` where all ranks may call it; what is in the folders, read by rank 0."""
    base, model = OWN[kind]
    changes = {**SAVING, **BEST} if kind == "averaging" else SAVING
    args = arguments(folder, stage, False, tf.TrainingArguments, **changes)
    rows = texts(16)
    trainer = over(stage, base)(model(), args, train_dataset=rows, eval_dataset=rows, data_collator=pad)
    trainer.train()
    if kind != "main_alone":
        trainer.save_model(str(folder / "saved"))
    if kind == "llava":
        safe_save_model_for_hf_trainer(trainer, str(folder / "final"))
    if kind == "renaming":
        trainer.model.save_pretrained(str(folder / "final"), "by hand")
    trainer.accelerator.wait_for_everyone()
    return {name: read(folder / name) for name in FOLDERS} if trainer.is_world_process_zero() else {}


def grown(folder: Path, stage: int | None) -> dict[str, Any]:
    """In one process a `Growing` model of two steps, and one that resumes from it: what both have seen, the last weights."""
    found: dict[str, Any] = {}
    for steps, resumes in ((2, False), (4, True)):
        changes = {**SAVING, "max_steps": steps, "lr_scheduler_type": "constant"}
        args = arguments(folder, stage, False, tf.TrainingArguments, **changes)
        trainer = over(stage, tf.Trainer)(Growing(), args, train_dataset=texts(16), data_collator=pad)
        trainer.train(resume_from_checkpoint=resumes)
        found[f"seen in {steps}"] = trainer.model.seen.tolist()
    return {**found, "folder": read(folder / "checkpoint-4")}
