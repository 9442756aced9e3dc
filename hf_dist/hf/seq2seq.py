"""`Seq2SeqTrainer` and its arguments, sharded."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_dist.hf.args import DistArgsMixin
from hf_dist.hf.trainer import DistTrainerMixin


@dataclass
class DistSeq2SeqTrainingArguments(DistArgsMixin, Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with `dist_config`."""


class DistSeq2SeqTrainer(DistTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, sharded as `dist_config` says."""
