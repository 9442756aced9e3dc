"""What a function takes, as a JSON Schema beside its code: editors refuse the values that the function refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

JsonSchema = Mapping[str, Any]
"""A JSON Schema of one value, without null: null means the same as no key, and `or_null` adds it."""

NOTHING: JsonSchema = {"enum": []}
"""No value at all."""
_NUMERAL = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
_WHOLE_NUMERAL = r"[0-9]+(\.0*)?([eE]\+?[0-9]+)?|[0-9]*\.[0-9]+[eE]\+?[0-9]+"
_NOT_ZERO = "(?=[^eE]*[1-9])"


@dataclass(frozen=True, eq=False)
class Accepts:
    """A function of one JSON value: a coercion that raises for wrong values, or a test."""

    function: Callable[[Any], Any]
    schema: JsonSchema
    """The values that pass."""
    words: str = ""
    """The same as a noun, for messages: "a whole number of at least 1"."""

    def __call__(self, value: Any) -> Any:
        """The function's result."""
        return self.function(value)


def taking(schema: JsonSchema, words: str = "") -> Callable[[Callable[[Any], Any]], Accepts]:
    """A decorator: the function, with the schema of what it takes and the same in words."""
    return lambda function: Accepts(function, schema, words)


def any_case(*words: str, prefixes: Iterable[str] = ()) -> str:
    """A pattern for `words` in any letter case, with blanks around them. JSON Schema has no flags for patterns.

    `prefixes`: what may stand before a word, each once, in this order.
    """
    before = "".join(f"({_letters(prefix)})?" for prefix in prefixes)
    return rf"^\s*{before}({'|'.join(map(_letters, words))})\s*$"


def names(*words: str) -> JsonSchema:
    """One of `words`, which editors complete, in any letter case."""
    return either({"enum": list(words)}, {"type": "string", "pattern": any_case(*words)})


def number(minimum: float = 0.0, *, below: float = math.inf, most: float = math.inf) -> JsonSchema:
    """A number in this range, or one in quotes, whose range is not seen."""
    ends = {"minimum": minimum, "exclusiveMaximum": below, "maximum": most}
    bounds = {key: plain(end) for key, end in ends.items() if math.isfinite(end)}
    return {**_numeral("number", minimum, _NUMERAL), **bounds}


def whole_number(minimum: int = 0) -> JsonSchema:
    """A whole number of at least `minimum`, or one in quotes."""
    return {**_numeral("integer", minimum, _WHOLE_NUMERAL), "minimum": minimum}


def array(items: JsonSchema, size: int | None = None, *, filled: bool = False) -> JsonSchema:
    """A list, of exactly `size` items if that is given. `filled`: it has at least one."""
    sizes = {} if size is None else {"minItems": size, "maxItems": size}
    return {"type": "array", "items": items, **({"minItems": 1} if filled else sizes)}


def either(*schemas: JsonSchema) -> JsonSchema:
    """What one of `schemas` takes. Alternatives within alternatives become one list."""
    parts: list[JsonSchema] = []
    for schema in schemas:
        parts += schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    return {"anyOf": parts}


def or_null(schema: JsonSchema) -> JsonSchema:
    """The same, or null."""
    if not schema:
        return schema
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        return schema if "null" in kinds else {**schema, "type": [*kinds, "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return either(schema, {"type": "null"})


def plain(value: float) -> float:
    """`value` as an int where that is the same number: schemas say 0, not 0.0."""
    return int(value) if value == int(value) else value


def _numeral(kind: str, minimum: float, numeral: str) -> dict[str, Any]:
    sign, least = "[+-]?" if minimum < 0 else r"\+?", _NOT_ZERO if minimum >= 1 else ""
    return {"type": [kind, "string"], "pattern": rf"^\s*{sign}{least}({numeral})\s*$"}


def _letters(word: str) -> str:
    """A pattern for one word in any letter case."""
    escaped = (f"[{x.upper()}{x.lower()}]" if x.isalpha() else f"\\{x}" if x in ".+*?()[]{}|^$" else x for x in word)
    return "".join(escaped)
