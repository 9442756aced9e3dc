"""What each key and each section means, from the sentence under its field in the code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hf_dist.config.argument_words import OPTIMIZER_WORDS, SCHEDULER_WORDS
from hf_dist.config.rows import Status
from hf_dist.config.schema import fields
from hf_dist.config.support import SECTION_ALIASES, SUPPORT

_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "optimizer.params": OPTIMIZER_WORDS,
    "scheduler.params": SCHEDULER_WORDS,
}
_SECTIONS: Mapping[str, str] = {
    "": "one JSON file with DeepSpeed's key names, read by hf_dist.",
    "amp": "apex's mixed precision, which is not supported.",
    "autotuning": "what `hf-dist tune` reads; training takes the other values of the file.",
    "checkpoint.parallel_write": "a detail of how DeepSpeed writes files.",
    "checkpoint.writer": "a detail of how DeepSpeed writes files.",
    "comet": 'the training log in Comet; use report_to="comet_ml" of TrainingArguments.',
    "data_efficiency": "DeepSpeed's sampling of the data; its length of sequences is read as `curriculum_learning`.",
    "hybrid_engine": "generation in DeepSpeed; model.generate() works on a sharded model by itself.",
    "tensor_parallel.tensor_parallel": "the number of ranks that share each layer, in DeepSpeed's older spelling.",
    "timers": "DeepSpeed's timers; the log always has the throughput.",
    "timers.throughput": "DeepSpeed's timers; the log always has the throughput.",
    "zero_optimization.zenflow": "updates of a part of the weights, which is not supported.",
}
"""Sections of DeepSpeed that have no field."""


@cache
def sentences() -> Mapping[str, str]:
    """JSON path -> the sentence under its field, without the path at its start."""
    return {path: _words(info.description or "") for path, info in fields().items()}


def meaning(path: str) -> str:
    """What the key or section does: its sentence, or the entry of the support table; empty for an unknown one."""
    row = SUPPORT.get(path)
    home, _, name = path.rpartition(".")
    if path in sentences():
        return sentences()[path]
    if path in _SECTIONS:
        return _SECTIONS[path]
    if path in SECTION_ALIASES:
        return f"another spelling of {SECTION_ALIASES[path]}."
    if row is not None and row.status is Status.MAPPED:
        return f"another spelling of {row.target}."
    if row is not None and row.status is Status.NO_EFFECT:
        return f"no effect: {row.reason}"
    if row is not None and row.status is Status.REFUSED:
        return f"{row.reason}. {row.fix}"
    return _ARGUMENTS.get(home, {}).get(name, "")


def _words(sentence: str) -> str:
    return sentence.rpartition("`: ")[2] if sentence.startswith("`") else sentence
