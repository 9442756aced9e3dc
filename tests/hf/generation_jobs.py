"""Generation and evaluation on ranks: prompts, lengths and shares of the set differ from rank to rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch.utils.data import IterableDataset

from tests.hf.lifecycle import pairs
from tests.hf.recipes import VOCAB, classes, make_model, pad, plain_arguments, texts

Record = dict[str, Any]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
}
SIZES = (7, 13)
"""Rows of sets that are no multiple of any batch."""


# ---- generate


def prompts(rank: int) -> dict[str, torch.Tensor]:
    """Two rows on rank 0, three on rank 1, of other lengths."""
    g = torch.Generator().manual_seed(10 + rank)
    ids = torch.randint(3, VOCAB, (2 + rank, 4 + 3 * rank), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(model: Any, rank: int, how: str) -> list[list[int]]:
    """Rank 0 stops long before rank 1."""
    torch.manual_seed(3 + rank)
    tokens: list[list[int]] = model.generate(**prompts(rank), **HOW[how], max_new_tokens=3 + 9 * rank).tolist()
    return tokens


@functools.cache
def alone(family: str, rank: int, how: str) -> list[list[int]]:
    """The same in one process."""
    return generate(generating(family), rank, how)


def generating(family: str) -> Any:
    """In evaluation, with a cache."""
    model: Any = make_model(family).eval()
    model.generation_config.pad_token_id = 0
    return model


def on_ranks(folder: Path, family: str, stage: int, loop: str) -> Record:
    """Tokens by way of generating, and how many gathers a call took: with room for the weights, without, and in `gathered`.

    `loop`: who shards the model, an accelerator or `initialize`."""
    import hf_dist
    from hf_dist.dist import comm_counter
    from hf_dist.hf import generation

    config = {"zero_optimization": {"stage": stage}}
    model = generating(family)
    if loop == "accelerator":
        accelerator = hf_dist.DistAccelerator(dist_config=config)
        model = accelerator.prepare(model)
        engine = accelerator.engine
    else:
        engine = hf_dist.initialize(model, config={**config, "train_micro_batch_size_per_gpu": 1})
    rank = engine.mesh.world.rank
    record: Record = {"groups": len(engine.sharded.groups)}
    free = generation.free_nbytes
    for room in ("room", "none"):
        generation.free_nbytes = free if room == "room" else lambda device: 0  # type: ignore[assignment]
        try:
            for how in HOW:
                with comm_counter.record() as log:
                    record[room, how] = generate(model, rank, how)
                record[room, how, "gathers"] = log.count("all_gather")
        finally:
            generation.free_nbytes = free  # type: ignore[assignment]
    with hf_dist.gathered(model):  # other numbers of calls on each rank
        for _ in range(1 + 2 * rank):
            record["block"] = generate(model, rank, "greedy")
    record["at rest"] = sum(g.full.is_allocated for g in engine.sharded.groups)
    return record


# ---- evaluation


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        """In order."""
        return iter(self.rows)


class Counting:
    """`compute_metrics` over batches (`batch_eval_metrics`), or of all at once: how many rows, and which."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        """The sum weighs each row with its place."""
        labels = np.asarray(prediction.label_ids)
        logits = np.asarray(prediction.predictions, dtype=np.float64)
        rows = labels.reshape(len(labels), -1)
        filled = np.where(rows < 0, 0, rows).sum(-1)
        own = np.abs(logits).reshape(len(logits), -1).max(-1)
        self.seen += [float(a) + float(b) for a, b in zip(filled, own, strict=True)]
        if not compute_result:
            return {}
        seen, self.seen = self.seen, []
        return {"rows": len(seen), "order": sum(i * x for i, x in enumerate(seen, 1))}


class Gathering:
    """Over any Trainer: a step whose loss is followed by gathers of rows, a number per rank, and a vector of one entry."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """As TRL's trainers fill their metrics."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        if not model.training:
            accelerator: Any = self.accelerator  # type: ignore[attr-defined]
            assert len(accelerator.gather(outputs.logits.amax(-1))) >= accelerator.num_processes
            assert len(accelerator.gather(loss.detach()[None])) == accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def evaluated(folder: Path, kind: str, stage: int | None, size: int, **changes: Any) -> dict[str, float]:
    """Loss and metrics of a set; `kind`: tokens, classes, gathering, stream. `stage` None: the stock Trainer."""
    if stage is None:
        cls, args_cls, given = tf.Trainer, tf.TrainingArguments, {}
    else:
        from hf_dist import DistTrainer, DistTrainingArguments

        cls, args_cls = DistTrainer, DistTrainingArguments
        given = {"dist_config": {"zero_optimization": {"stage": stage}}}
    args = args_cls(**plain_arguments(folder, 2, **given, **changes))
    # accelerate puts the batches of all ranks together when it reads a stream: they must be equally long.
    labelled = kind in ("classes", "gathering")
    rows: Any = classes(size) if labelled else texts(size, ragged=kind != "stream")
    data = Stream(rows) if kind == "stream" else rows
    model = make_model("bert" if labelled else "llama")
    if kind == "gathering":
        cls = type("Gathering" + cls.__name__, (Gathering, cls), {})
    trainer = cls(model, args, eval_dataset=data, data_collator=pad, compute_metrics=Counting())
    metrics = trainer.evaluate()
    return {key: metrics[key] for key in ("eval_loss", "eval_rows", "eval_order")}


def seq2seq(folder: Path, stage: int | None, size: int, beams: int) -> Record:
    """Generated tokens of a set, and the loss of its evaluation."""
    changes = dict(predict_with_generate=True, generation_max_length=9, generation_num_beams=beams)
    if stage is None:
        cls, args_cls = tf.Seq2SeqTrainer, tf.Seq2SeqTrainingArguments
    else:
        from hf_dist.hf.seq2seq import DistSeq2SeqTrainer, DistSeq2SeqTrainingArguments

        cls, args_cls = DistSeq2SeqTrainer, DistSeq2SeqTrainingArguments
        changes["dist_config"] = {"zero_optimization": {"stage": stage}}  # type: ignore[assignment]
    args = args_cls(**plain_arguments(folder, 2, **changes))
    model = make_model("t5")
    trainer = cls(model, args, eval_dataset=pairs(size), data_collator=pad, compute_metrics=Counting())
    metrics = trainer.evaluate()
    out = trainer.predict(pairs(size))
    tokens = [[t for t in row if t not in (0, -100)] for row in out.predictions.tolist()]
    return {
        "loss": metrics["eval_loss"],
        "rows": metrics["eval_rows"],
        "tokens": tokens,
        "labels": out.label_ids.shape[0],
    }


def loss_of_rows(size: int) -> float:
    """The loss of `pairs(size)` in batches of two, each row counted once.

    HF's Seq2SeqTrainer with `predict_with_generate` counts a short last batch like a full one, in one process, too.
    """
    model, rows, total = make_model("t5").eval(), pairs(size), 0.0
    with torch.no_grad():
        for start in range(0, size, 2):
            batch = rows[start : start + 2]
            total += float(model(**pad(batch)).loss) * len(batch)
    return total / size
