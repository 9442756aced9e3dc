"""A stock script: sequence to sequence with Seq2SeqTrainer, generation in evaluation."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from tests.ecosystem.tiny import tokenizer


def main() -> None:
    """Train, evaluate and predict with generation."""
    (training_args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    words: PreTrainedTokenizerFast = tokenizer()
    g = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids[: 2 + i % 3]}
        for i in range(24)
        for ids in [torch.randint(3, 60, (5 + i % 4,), generator=g).tolist()]
    ]
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, dropout_rate=0.0,
                      pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=data,
        eval_dataset=data[:8],
        processing_class=words,
        data_collator=DataCollatorForSeq2Seq(words, model=model),
        compute_metrics=lambda p: {"tokens": float(np.where(p.predictions > 0, p.predictions, 0).sum())},
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate(max_length=10, num_beams=2))
    trainer.save_metrics("test", trainer.predict(data[:4], max_length=8, num_beams=1).metrics)


if __name__ == "__main__":
    main()
