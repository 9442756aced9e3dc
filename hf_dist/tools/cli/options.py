"""Options of a command with many options: the fields of one dataclass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Annotated, get_type_hints

__all__ = ["signature_of"]


def signature_of(
    asked: type, options: Mapping[str, object], kinds: Mapping[str, object] | None = None
) -> inspect.Signature:
    """The fields of a dataclass as parameters that typer reads, each with its `typer.Option` from `options`.

    `kinds`: other types for some fields, as typer should read them; None if they are not given.
    """
    hints, kinds = get_type_hints(asked), kinds or {}
    parameters = []
    for field in dataclasses.fields(asked):
        default: object = field.default if field.default is not dataclasses.MISSING else inspect.Parameter.empty
        if field.name in kinds:
            default = None
        annotation: object = Annotated[kinds.get(field.name, hints[field.name]), options[field.name]]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=annotation))
    return inspect.Signature(parameters)
