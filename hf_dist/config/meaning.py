"""What each key means, in the words that stand under its field in the code."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import BaseModel

from hf_dist.config.rows import Status
from hf_dist.config.schema import DistConfig
from hf_dist.config.support import SUPPORT


@cache
def sentences() -> Mapping[str, str]:
    """JSON path -> the sentence under its field, without the path that it begins with."""
    return dict(_sentences(DistConfig, ""))


def meaning(path: str) -> str:
    """What the key does here: its sentence, or what the support table says; empty for a key that is not known."""
    row = SUPPORT.get(path)
    if path in sentences():
        return sentences()[path]
    if row is None:
        return ""
    if row.status is Status.MAPPED:
        return f"another spelling of {row.target}"
    if row.status is Status.NO_EFFECT:
        return f"no effect: {row.reason}"
    if row.status is Status.REFUSED:
        return f"{row.reason}. {row.fix}"
    return "an argument of the optimizer" if path.startswith("optimizer.") else "an argument of the schedule"


def _sentences(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            name = ast.unparse(field.target)
            words = str(text.value.value)
            if name in model.model_fields:
                yield f"{prefix}{name}", words.rpartition("`: ")[2] if words.startswith("`") else words
    for name, info in model.model_fields.items():
        for kind in (info.annotation, *typing.get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sentences(kind, f"{prefix}{name}.")
