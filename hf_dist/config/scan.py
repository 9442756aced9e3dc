"""A JSON reader that records the line of every key, and skips comments and trailing commas, as DeepSpeed does.

Repeated keys, missing commas, single quotes and Python's words are recorded and read as meant, so that the same run checks
the rest of the file. Anything else that is not JSON ends the scan with the line and column.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import Any

from hf_dist.errors import Problem

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_WORD = re.compile(r"[^\s,:\[\]{}\"]+")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERALS: dict[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Scanned:
    """The value of one JSON text, the line of each key by dotted path, and what was wrong with the text."""

    value: Any
    lines: Mapping[str, int]
    problems: tuple[Problem, ...]


def scan_json(text: str, origin: str) -> Scanned:
    """Read `text`; `origin` names it in problems (a path, or a word like "JSON text")."""
    scanner = _Scanner(text, origin)
    try:
        value = scanner.document()
    except _SyntaxProblem as stop:
        return Scanned(None, scanner.lines, (*scanner.slips, stop.problem))
    return Scanned(value, scanner.lines, tuple(scanner.slips))


def first_character(text: str) -> str:
    """The first character outside blanks and comments; empty if there is none. It tells a JSON text from a path or YAML."""
    return _Scanner(text, "")._peek()


class _SyntaxProblem(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Scanner:
    def __init__(self, text: str, origin: str) -> None:
        self.text = text
        self.origin = origin
        self.at = 0
        self.lines: dict[str, int] = {}
        self.slips: list[Problem] = []
        self._breaks = [match.start() for match in re.finditer("\n", text)]

    def document(self) -> object:
        """Read the single value of the text."""
        if not self._peek():
            self.at = 0
            raise self._stop(
                "is empty; expected a JSON object", 'Write one, such as {"zero_optimization": {"stage": 2}}.'
            )
        value = self._value("", 0)
        if self._peek():
            raise self._stop(f"has {self._word()} after the end of the JSON object", "Remove it, or check the braces.")
        return value

    def _value(self, path: str, depth: int) -> Any:
        char = self._peek()
        if depth > _MAX_DEPTH:
            raise self._stop(f"is nested more than {_MAX_DEPTH} levels deep", "")
        if char == "{":
            return self._object(path, depth)
        if char == "[":
            return self._array(path, depth)
        if char in ('"', "'"):
            return self._string("a value")
        return self._scalar()

    def _object(self, path: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self.at += 1
        while self._peek() != "}":
            if self._peek() not in ('"', "'"):
                raise self._stop(f"expected a key in double quotes, found {self._word()}", "")
            line = self._line()
            key = self._string("a key")
            where = f"{path}.{key}" if path else key
            if key in result:
                first = self.lines[where]
                expected = f"is given twice, on line {first} and on line {line}"
                self.slips.append(Problem(where, "", expected, "Keep one of the two.", self._file(line)))
            self.lines[where] = line
            if self._peek() != ":":
                raise self._stop(f'expected ":" after the key "{key}", found {self._word()}', "")
            self.at += 1
            result[key] = self._value(where, depth + 1)
            self._next("}")
        self.at += 1
        return result

    def _array(self, path: str, depth: int) -> list[Any]:
        result: list[Any] = []
        self.at += 1
        while self._peek() != "]":
            result.append(self._value(f"{path}.{len(result)}", depth + 1))
            self._next("]")
        self.at += 1
        return result

    def _next(self, close: str) -> None:
        """Skip the comma between two members; the closing bracket is left for the caller."""
        char = self._peek()
        if char == ",":
            self.at += 1
        elif char != close:
            missing = char == '"' or (close == "]" and bool(char) and char not in ":}")
            fix = "A comma is probably missing at the end of the line before." if missing else ""
            problem = self._stop(f'expected "," or "{close}", found {self._word()}', fix)
            if not missing:
                raise problem
            self.slips.append(problem.problem)

    def _string(self, what: str) -> str:
        if self.text[self.at] == "'":
            end = self.text.find("'", self.at + 1)
            problem = self._stop(
                f"expected {what} in double quotes, found {self._word()}", "JSON strings use double quotes."
            )
            if end < 0 or "\n" in self.text[self.at : end]:
                raise problem
            self.slips.append(problem.problem)
            value, self.at = self.text[self.at + 1 : end], end + 1
            return value
        try:
            value, self.at = scanstring(self.text, self.at + 1, True)
        except JSONDecodeError as error:
            raise self._stop(f"has a string that is not closed or not valid: {error.msg}", "") from None
        return str(value)

    def _scalar(self) -> object:
        match = _WORD.match(self.text, self.at)
        word = match.group() if match else ""
        word = _COMMENT.sub("", word)
        number = _NUMBER.fullmatch(word)
        if word in _LITERALS or number:
            self.at += len(word)
            if number is None:
                return _LITERALS[word]
            return float(word) if number.group(1) or number.group(2) else int(word)
        if word in _PYTHON_WORDS:
            meant = _PYTHON_WORDS[word]
            self.slips.append(self._stop(f"expected a value, found {self._word()}", f"Write {meant}.").problem)
            self.at += len(word)
            return _LITERALS[meant]
        fix = "Fill in the template first." if word.startswith("$") else ""
        raise self._stop(f"expected a value, found {self._word()}", fix)

    def _peek(self) -> str:
        """The next character outside blanks and comments; empty at the end."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r\n":
                self.at += 1
                continue
            comment = _COMMENT.match(self.text, self.at)
            if comment is None:
                return self.text[self.at]
            self.at = comment.end()
        return ""

    def _word(self) -> str:
        rest = self.text[self.at : self.at + 40].split("\n")[0].strip()
        return f"`{rest}`" if rest else "the end of the text"

    def _line(self) -> int:
        return bisect_right(self._breaks, self.at - 1) + 1

    def _file(self, line: int) -> str:
        return f"{self.origin}:{line}"

    def _stop(self, what: str, fix: str) -> _SyntaxProblem:
        start = self.text.rfind("\n", 0, self.at) + 1
        column = f"column {self.at - start + 1}: " if self.text.strip() else ""
        return _SyntaxProblem(Problem("", "", f"{column}{what}", fix, self._file(self._line())))
