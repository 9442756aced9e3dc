"""Remedies as a user reads them, carried out: each sentence of a problem is one or more changes of the file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from hf_dist.errors import Problem

Change = Callable[[dict[str, Any]], None]
"""Edits a config in place."""
_MISSING = object()


def get(data: Any, path: str) -> Any:
    """The value at a JSON path; `_MISSING` where there is none."""
    for part in path.split("."):
        data = data.get(part, _MISSING) if isinstance(data, dict) else _MISSING
    return data


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Write a value at a JSON path, making the sections on the way."""
    *sections, key = path.split(".")
    for part in sections:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    old = data.get(key)
    data[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def drop(data: dict[str, Any], path: str) -> Any:
    """Take a key out; `_MISSING` where there is none."""
    *sections, key = path.split(".")
    home = get(data, ".".join(sections)) if sections else data
    return home.pop(key, _MISSING) if isinstance(home, dict) else _MISSING


def changes(problem: Problem) -> list[Change]:
    """Every way that the remedy names; an empty list for a sentence that says nothing that can be done."""
    path, fix = problem.path, problem.fix
    home, _, _ = path.rpartition(".")
    beside = lambda name: f"{home}.{name}" if home else name  # noqa: E731
    found: list[Change] = []

    def move(target: str) -> Change:
        def change(data: dict[str, Any]) -> None:
            value = drop(data, path)
            if value is not _MISSING:
                put(data, target, value)

        return change

    def write(target: str, text: str) -> Change:
        def change(data: dict[str, Any]) -> None:
            drop(data, path)
            put(data, target, json.loads(text))

        return change

    def set_to(target: str, text: str) -> Change:
        names = re.search(r" does not take (.*): remove them then", fix) if target == "optimizer.type" else None

        def change(data: dict[str, Any]) -> None:
            put(data, target, json.loads(text))
            for name in names[1].split(", ") if names else ():
                drop(data, f"optimizer.params.{name}")

        return change

    if re.search(r"Remove the section|remove the section", fix):
        section = home if path.rpartition(".")[2] in ("enabled", "type") or problem.expected == "is missing" else path
        found.append(lambda data: drop(data, section))
    elif re.search(r"\b[Rr]emove (it\b|the key|this one)", fix) or fix == "Keep one of the two.":
        found.append(lambda data: drop(data, path))
    for written in re.finditer(r'(?:[Ww]rite|Did you mean|or) "(\w+)": (\{.*?\}+)(?=[ .,?;])', fix):
        target = beside(written[1]) if path.rpartition(".")[2] == written[1] else written[1]
        found.append(write(beside(written[1]) if "Write " in fix else target, written[2]))
    if match := re.search(r'set "enabled" to false', fix):
        switch = path if path.endswith(".enabled") else f"{path}.enabled"
        found.append(lambda data: put(data, switch, False))
    if match := re.search(r'Did you mean (the top-level key )?"([^"]+)"\?(?! It is)(?! *\{)', fix):
        name = match[2]
        if problem.found:
            found.append(lambda data: put(data, path, name))
        else:
            found.append(move(name if match[1] or "." in name else beside(name)))
    for match in re.finditer(r'(?:Move it to|\bor) "([\w.]+)"', fix if fix.startswith("Move it to") else ""):
        found.append(move(match[1]))
    if match := re.search(r'Move it to the top level, as "(\w+)"|Rename it to "(\w+)"', fix):
        found.append(move(match[1] or beside(match[2])))
    if fix == "Move its keys to the top level.":
        found.append(lambda data: data.update(drop(data, path)))
    if match := re.match(r'Remove "([\w.]+)"\.', fix):
        old = match[1]
        found.append(lambda data: drop(data, old))
    if match := re.match(r'Use "(\w+)"', fix):
        nearest = match[1]
        found.append(lambda data: put(data, path, nearest))
    if match := re.search(r'Add "(\w+)": ("[^"]*")', fix):
        key, text = match[1], match[2]
        found.append(lambda data: put(data, beside(key), json.loads(text)))
    if match := re.match(r"Add it \(for example (\w+)\)", fix):
        example = match[1]
        found.append(lambda data: put(data, path, example))
    for match in re.finditer(r'[Ss]et "([\w.]+)" to ("\w+"|\d+|false)(?! to)', fix):
        if match[1] != "enabled":
            found.append(set_to(match[1] if "." in match[1] else beside(match[1]), match[2]))
    if match := re.search(r'[Ss]et it to ("\w+"|\d+|false)|Set one of them to (false)|the device to ("none")', fix):
        text = match[1] or match[2] or match[3]
        found.append(lambda data: put(data, path, json.loads(text)))
    if fix.startswith("Write one"):
        found += [lambda data, value=value: put(data, path, value) for value in _named(problem.expected)]  # type: ignore[misc]
    return found


def _named(expected: str) -> Iterator[Any]:
    """Values that a clause names: of a choice the last, of a number the least, either switch."""
    if match := re.search(r"is not one of (.*)", expected):
        first, *_, last = match[1].split(", ")
        yield first if first == "none" else int(last) if last.isdigit() else last
    if match := re.search(r"is not a (whole )?number of at least (-?\d+)", expected):
        yield int(match[2]) if match[1] else float(match[2])
    if expected == "is not true or false":
        yield False


def mended(data: dict[str, Any], problems: list[Problem], way: int) -> dict[str, Any]:
    """A copy of `data` after the remedies: of each problem the way of that number, or its last.

    What moves comes last, the innermost first: until then the paths of the others lead through it.
    """
    result = copy.deepcopy(data)
    for problem in sorted(problems, key=_order):
        ways = changes(problem)
        assert ways, f"nothing that can be done: {problem}"
        ways[min(way, len(ways) - 1)](result)
    return result


def _order(problem: Problem) -> tuple[bool, bool, int]:
    moves = re.search(r"Move it|Rename it|Did you mean|Remove it and write", problem.fix) and not problem.found
    return problem.fix.startswith("Move its keys"), bool(moves), -problem.path.count(".")


def num_ways(problems: list[Problem]) -> int:
    """How many ways the problem has that names most."""
    return max(len(changes(problem)) for problem in problems)
