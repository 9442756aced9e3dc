"""Microbatches for a check: rows of a file, or made up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ConfigError, Problem
from hf_dist.tools.check.made_up import IGNORED, Batch, labels_are_ids, made_up

__all__ = ["IGNORED", "Batch", "joined", "microbatches"]


def microbatches(
    model: nn.Module,
    *,
    rows: int,
    count: int,
    seq: int,
    path: Path | None = None,
    tokenizer: str = "",
    ragged: bool = False,
) -> list[Batch]:
    """`count` batches of `rows` rows of `seq` tokens.

    `path`: read the rows from this file; the tokenizer of the folder or ID `tokenizer` encodes rows that are text. With
    `ragged`, each batch of such rows is only as long as its longest row, as the standard collators make it.
    """
    if path is None:
        generator = torch.Generator().manual_seed(0)
        return [made_up(model, rows, seq, generator, number * rows) for number in range(count)]
    takes_ids = labels_are_ids(model)
    endless = itertools.cycle(_rows_of_file(path, tokenizer))
    return [_collate(list(itertools.islice(endless, rows)), seq, takes_ids, ragged) for _ in range(count)]


def joined(batches: Sequence[Mapping[str, torch.Tensor]]) -> Batch | None:
    """The rows of all in one batch, padded on the right to the longest; None if they cannot be. Labels are padded with -100."""
    if len({frozenset(batch) for batch in batches}) != 1:
        return None
    found: Batch = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        if len({x.dim() for x in parts}) != 1 or parts[0].dim() == 0:
            return None
        if parts[0].dim() == 2 and len({x.shape[1] for x in parts}) > 1:
            longest = max(x.shape[1] for x in parts)
            fill = IGNORED if name == "labels" else 0
            parts = [torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=fill) for x in parts]
        if any(a.shape[1:] != b.shape[1:] for a, b in itertools.pairwise(parts)):
            return None
        found[name] = torch.cat(parts)
    return found


def _rows_of_file(path: Path, tokenizer: str) -> list[dict[str, Any]]:
    """JSON lines with `input_ids` (and other inputs of the model) or `text`; any other file: one text per line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = (
            [json.loads(line) for line in lines] if path.suffix in (".jsonl", ".json") else [{"text": t} for t in lines]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem("--data", str(path), f"cannot be read: {error}", "Pass JSON lines, or a text.")
        ) from None
    if not rows:
        raise ConfigError(Problem("--data", str(path), "has no rows", "Pass a file with one row per line."))
    if "text" not in rows[0]:
        return rows
    from transformers import AutoTokenizer

    read: Any = AutoTokenizer.from_pretrained(tokenizer)
    kept = [{k: v for k, v in row.items() if k in ("label", "labels")} for row in rows]
    return [{**read(row["text"]), **rest} for row, rest in zip(rows, kept, strict=True)]


def _collate(rows: list[dict[str, Any]], seq: int, takes_ids: bool, ragged: bool) -> Batch:
    """Rows cut or padded to `seq` (`ragged`: to the longest row, if that is shorter).

    `takes_ids`: a row without labels has its tokens.
    """
    if ragged:
        seq = min(seq, max((len(v) for row in rows for v in row.values() if _is_flat(v)), default=seq))
    batch: dict[str, list[object]] = {}
    for row in rows:
        row = {"labels" if key == "label" else key: value for key, value in row.items()}
        ids = row.get("input_ids")
        if ids is not None:
            row.setdefault("attention_mask", [1] * len(ids))
            if takes_ids:
                row.setdefault("labels", ids)
        for key, value in row.items():
            padding = [IGNORED if key == "labels" else 0] * seq
            batch.setdefault(key, []).append((value + padding)[:seq] if _is_flat(value) else value)
    return {key: torch.tensor(values) for key, values in batch.items()}


def _is_flat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)
