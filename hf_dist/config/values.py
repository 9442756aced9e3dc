"""Values as people write them in JSON: coercion to a field's type, or a clause that says what is wrong."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, TypeVar

from hf_dist.config import accepts
from hf_dist.config.accepts import Accepts, JsonSchema, either
from hf_dist.config.spelling import did_you_mean

Auto = Literal["auto"]
"""The string that leaves a value to TrainingArguments or the model."""
AUTO: Auto = "auto"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]B)")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)", re.IGNORECASE)

Coerce = Accepts
"""A coercion to a field's type, with the JSON Schema of what it takes."""
_T = TypeVar("_T")

_AUTO: JsonSchema = accepts.names("auto")


class BadValue(ValueError):
    """A value that cannot be coerced. `clause` follows the value in the message; `fix` is a sentence."""

    def __init__(self, clause: str, fix: str = "") -> None:
        super().__init__(clause)
        self.clause = clause
        self.fix = fix


def settled(value: _T | Auto) -> _T:
    """`value`, known to be resolved: no field of a resolved config is "auto"."""
    assert not is_auto(value), "read before resolve()"
    return value  # type: ignore[return-value]


def is_auto(value: object) -> bool:
    """Whether the user wrote "auto", in any letter case."""
    return isinstance(value, str) and value.strip().lower() == AUTO


def is_off(value: object) -> bool:
    """Whether a degree is not set: "auto" or "none"."""
    return isinstance(value, str) and value.strip().lower() in (AUTO, "none")


def shown(value: object) -> str:
    """`value` as a JSON file spells it, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def or_auto(coerce: Coerce) -> Coerce:
    """The same coercion, but it also accepts "auto"."""
    words = f'{coerce.words} or "auto"'
    return Accepts(lambda value: AUTO if is_auto(value) else coerce(value), either(coerce.schema, _AUTO), words)


def whole(minimum: int = 0, *, floor: bool = False) -> Coerce:
    """Whole number from 8, 8.0, "8" or "5e8"; with `floor` a fraction such as 15099494.4 is rounded down."""

    words = f"a whole number of at least {minimum}"

    @accepts.taking(accepts.number(minimum) if floor else accepts.whole_number(minimum), words)
    def coerce(value: object) -> int:
        number = _number(value, f"is not {words}")
        if (number != int(number) and not floor) or number < minimum:
            raise BadValue(f"is not {words}")
        return int(value) if isinstance(value, int) else math.floor(number)

    return coerce


def real(minimum: float = 0.0, *, below: float = math.inf, most: float = math.inf) -> Coerce:
    """Number from 0.1 or "1e-4", at least `minimum`, under `below` and at most `most`."""
    bound = "" if below == math.inf else f" and below {below:g}"
    bound += "" if most == math.inf else f" and at most {most:g}"
    words = f"a number of at least {minimum:g}{bound}"

    @accepts.taking(accepts.number(minimum, below=below, most=most), words)
    def coerce(value: object) -> float:
        number = _number(value, f"is not {words}")
        if not minimum <= number < below or number > most:
            raise BadValue(f"is not {words}")
        return number

    return coerce


@accepts.taking(accepts.number(), "a number of at least 0")
def period(value: object) -> float:
    """Number of steps between two events; infinity means never."""
    return math.inf if value == math.inf else real()(value)


def reals(minimum: float = 0.0) -> Coerce:
    """Number, or a list of numbers (one per parameter group)."""
    one = real(minimum)

    @accepts.taking(either(one.schema, accepts.array(one.schema)), f"{one.words}, or a list of such")
    def coerce(value: object) -> object:
        return [one(item) for item in value] if isinstance(value, (list, tuple)) else one(value)

    return coerce


def wholes(minimum: int = 0) -> Coerce:
    """List of whole numbers; not empty if they have a minimum."""
    one = whole(minimum)

    @accepts.taking(accepts.array(one.schema, filled=minimum > 0), "a list of whole numbers")
    def coerce(value: object) -> list[int]:
        if not isinstance(value, (list, tuple)) or (minimum and not value):
            raise BadValue("is not a list of whole numbers")
        return [one(item) for item in value]

    return coerce


def as_tuple(coerce: Coerce) -> Coerce:
    """The same list as a tuple."""
    return Accepts(lambda value: tuple(coerce(value)), coerce.schema, coerce.words)


def pair(coerce_one: Coerce) -> Coerce:
    """List of exactly two values, as a list."""

    @accepts.taking(accepts.array(coerce_one.schema, 2), "a list of two numbers")
    def coerce(value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise BadValue("is not a list of two numbers")
        return [coerce_one(item) for item in value]

    return coerce


@accepts.taking(
    either(
        {"type": "boolean"},
        {"enum": [0, 1]},
        {"type": "string", "pattern": accepts.any_case("true", "false", "0", "1")},
    ),
    "true or false",
)
def flag(value: object) -> bool:
    """True or false from true, "true", 1, "1" and their opposites."""
    known = {"true": True, "1": True, "false": False, "0": False}
    text = str(value).strip().lower()
    if isinstance(value, (bool, int, str)) and text in known:
        return known[text]
    if is_auto(value):
        raise nobody_fills()
    raise BadValue("is not true or false")


@accepts.taking({**accepts.whole_number(64), "multipleOf": 64}, "a multiple of 64, at least 64")
def block(value: object) -> int:
    """Number of elements that share a scale."""
    number = whole()(value)
    if number < 64 or number % 64:
        raise BadValue("is not a multiple of 64, at least 64")
    return number


def choice(*names: str) -> Coerce:
    """One of `names`, in any letter case."""

    @accepts.taking(accepts.names(*names), f"one of {', '.join(names)}")
    def coerce(value: object) -> str:
        for name in names:
            if isinstance(value, str) and value.strip().lower() == name.lower():
                return name
        raise not_among(value, names, names)

    return coerce


def needed(coerce: Coerce) -> Coerce:
    """The same coercion for a key that other keys depend on, so its remedy is never to remove it."""

    @accepts.taking(coerce.schema, coerce.words)
    def of_needed(value: object) -> object:
        try:
            return coerce(value)
        except BadValue as bad:
            raise BadValue(bad.clause, bad.fix or "Write one.") from None

    return of_needed


@accepts.taking({"enum": [0, 1, 2, 3, "0", "1", "2", "3"]}, "one of 0, 1, 2, 3")
def stage(value: Any) -> int:
    """A ZeRO stage from 3, 3.0 or "3"."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
    return int(choice("0", "1", "2", "3")(str(int(value)) if plain else value))


@accepts.taking(either(accepts.whole_number(1), _AUTO), "a whole number of at least 1")
def stages(value: object) -> int:
    """A number of pipeline stages; "auto" is 1."""
    return 1 if is_auto(value) else int(whole(1)(value))


@accepts.taking(either(accepts.whole_number(), accepts.names("auto", "none")), "a whole number of at least 0")
def degree(value: object) -> int:
    """A number of ranks that share something; 0, "auto" and "none" are 1."""
    return 1 if is_off(value) else max(1, int(whole()(value)))


@accepts.taking(either(accepts.names("none", "cpu", "nvme"), {"enum": [False]}), "one of none, cpu, nvme")
def device(value: object) -> str:
    """ "none", "cpu" or "nvme"; false is "none"."""
    return "none" if value is False else str(choice("none", "cpu", "nvme")(value))


@accepts.taking(
    either(
        accepts.names("cost", "uniform", "parameters", "best"),
        {"type": "string", "pattern": "^type:."},
        accepts.array(accepts.whole_number(1)),
    ),
    'one of cost, uniform, parameters, "type:REGEX", or a list with the blocks of each part',
)
def partition(value: object) -> str | tuple[int, ...]:
    """How layers are divided over stages; DeepSpeed's "best" means "cost"."""
    if isinstance(value, (list, tuple)):
        return tuple(whole(1)(item) for item in value)
    if isinstance(value, str) and value.startswith("type:") and len(value) > len("type:"):
        try:
            re.compile(value.removeprefix("type:"))
        except re.error as error:
            raise BadValue(f"is not a regular expression: {error}") from None
        return value
    name = choice("cost", "best", "uniform", "parameters", "type:REGEX")(value)
    if name == "type:REGEX":
        raise BadValue("is the name of the method, not a pattern", 'Write for example "type:DecoderLayer".')
    return "cost" if name == "best" else str(name)


@accepts.taking(
    either(accepts.names("auto", "ulysses", "gather", "ring"), accepts.array(accepts.whole_number(1), 2)),
    "one of auto, ulysses, gather, ring, or a list of two numbers",
)
def sequence_exchange(value: object) -> str | tuple[int, int]:
    """How attention reads the other parts of a sequence: a name, or [Ulysses ranks, ring ranks]."""
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            raise BadValue("is not two numbers", "Write [4, 2] for 4 Ulysses ranks in each of 2 places of a ring.")
        ulysses, ring = (whole(1)(item) for item in value)
        return ulysses, ring
    return str(choice("auto", "ulysses", "gather", "ring")(value))


@accepts.taking(accepts.array(accepts.whole_number(1), 2), "a list of two numbers")
def steps(value: object) -> tuple[int, int]:
    """First and last step."""
    first, last = pair(whole(1))(value)
    if last < first:
        raise BadValue("ends before it begins", "Write [10, 12] for the steps 10, 11 and 12.")
    return first, last


@accepts.taking(
    either({"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*[KMGTkmgt][Bb]\s*$"}, accepts.whole_number(1)),
    'a size such as "5GB" (KB, MB, GB, TB) or a number of bytes',
)
def file_size(value: object) -> str | int:
    """A size in bytes from 5000000 or "5GB" (decimal units, as huggingface_hub reads them), in its usual spelling."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip().upper())):
        return f"{match[1]}{match[2]}"
    try:
        return whole(1)(value)
    except BadValue as bad:
        if bad.fix:
            raise
        raise BadValue('is not a size such as "5GB" (KB, MB, GB, TB) or a number of bytes') from None


def address(value: object) -> int | str:
    """A port such as 9400, or an address of this machine with a port such as "0.0.0.0:9400"."""
    host, _, port = value.strip().rpartition(":") if isinstance(value, str) else ("", "", value)
    try:
        number = whole(1)(port)
    except BadValue:
        number = 0
    if not 0 < number < 1 << 16:
        raise BadValue('is not a port from 1 to 65535, or an address with one such as "0.0.0.0:9400"')
    return f"{host}:{number}" if host else number


def memory_nbytes(text: str | int) -> int:
    """`80GB` in units of 1000, `80GiB` in units of 1024, `80B` in bytes; an int is bytes. Raises `BadValue`.

    A text without a unit is refused: who writes "80" means gigabytes.
    """
    if isinstance(text, int):
        return text
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        try:
            number = float(text)
        except ValueError:
            raise BadValue("is not a size", 'Write "80GB" or "80GiB".') from None
        meant = f'"{number:g}GB" or "{number:g}GiB"' if number < 1e5 else f'"{number:.0f}B"'
        raise BadValue("is a size without a unit", f'Write {meant}, or "B" after a number of bytes.')
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


@accepts.taking(
    either(
        _AUTO,
        {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*[KMGTkmgt]?[Ii]?[Bb]?\s*$"},
        {"type": "integer", "minimum": 1},
    ),
    'a size such as "80GB", "auto", or a number of bytes',
)
def memory_budget(value: object) -> str | int:
    """ "auto", or a memory size as written."""
    if is_auto(value):
        return AUTO
    if isinstance(value, str) and memory_nbytes(value):
        return value.strip()
    return int(whole(1)(value))


@accepts.taking({"type": "string", "pattern": r"\S", "not": {"pattern": accepts.any_case("auto")}}, "a text in quotes")
def text(value: object) -> str:
    """A string that is not empty."""
    if is_auto(value):
        raise nobody_fills()
    if not isinstance(value, str) or not value.strip():
        raise BadValue("is not a text in quotes")
    return value


@accepts.taking({"type": "string"}, "a text in quotes")
def label(value: object) -> str:
    """Any string, which may be empty."""
    if not isinstance(value, str):
        raise BadValue("is not a text in quotes")
    return value


@accepts.taking(either(accepts.array({"type": "string"}), {"type": "string"}), "a list of names")
def names(value: object) -> tuple[str, ...]:
    """List of strings, or one string, as a tuple."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise BadValue("is not a list of names")
    return tuple(items)


def _number(value: object, clause: str) -> float:
    """`value` as a finite float; bool is not a number here."""
    if is_auto(value):
        raise nobody_fills()
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadValue(clause)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadValue(clause) from None
    if not math.isfinite(number):
        raise BadValue(clause)
    return number


def nobody_fills() -> BadValue:
    """The error for "auto" on a key that nothing can fill."""
    return BadValue(
        "has no source to be filled from: neither TrainingArguments nor the model decides this key",
        "Write a value, or remove the key to get the default.",
    )


def not_among(value: object, expected: tuple[str, ...], spellings: tuple[str, ...]) -> BadValue:
    """The error for a value that is none of `expected`; `spellings`: what it may be a misspelling of."""
    if is_auto(value):
        return nobody_fills()
    fix = did_you_mean(value, spellings) if isinstance(value, str) else ""
    return BadValue(f"is not one of {', '.join(expected)}", fix)
