"""The only package that imports transformers and accelerate."""

from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.hf.args import DistArgsMixin, DistTrainingArguments
from hf_dist.hf.seq2seq import DistSeq2SeqTrainer, DistSeq2SeqTrainingArguments
from hf_dist.hf.trainer import DistTrainer, DistTrainerMixin

__all__ = [
    "DistAccelerator",
    "DistArgsMixin",
    "DistSeq2SeqTrainer",
    "DistSeq2SeqTrainingArguments",
    "DistTrainer",
    "DistTrainerMixin",
    "DistTrainingArguments",
]
