"""Pages of the config keys, from the tables that check a config."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from document import Page, pages

from hf_dist.config.arguments import DEEPSPEED_SCHEDULES, OPTIMIZER_ARGUMENTS, TORCH_SCHEDULES
from hf_dist.config.json_schema import accepted_at, json_schema
from hf_dist.config.meaning import meaning
from hf_dist.config.rows import Status
from hf_dist.config.schema import fields
from hf_dist.config.support import SUPPORT

TOP = "top_level"
"""Name of the page of keys that are in no section."""


def key_pages() -> list[Page]:
    """A page for each section with a key that does something, one for the top level, one each for keys refused and idle."""
    sections: defaultdict[str, list[str]] = defaultdict(list)
    for path in SUPPORT:
        sections[path.split(".")[0] if "." in path else TOP].append(path)
    found = [
        page
        for name, keys in sorted(sections.items())
        if any(_does_something(key) for key in keys)
        for page in pages(f"keys/{name}.md", _section(name, keys))
    ]
    first = [*pages("keys/README.md", _index(sections)), *pages("keys/refused.md", _refused())]
    return [*first, *pages("keys/without_effect.md", _idle()), *found]


def _does_something(key: str) -> bool:
    return SUPPORT[key].status in (Status.USED, Status.MAPPED)


def _index(sections: Mapping[str, list[str]]) -> str:
    used = {name: sum(SUPPORT[key].status is Status.USED for key in keys) for name, keys in sections.items()}
    rows = [
        f"| {_linked(name, keys)} | {_about(name)} | {used[name]} | {len(keys)} |"
        for name, keys in sorted(sections.items(), key=lambda item: (item[0] != TOP, -used[item[0]], item[0]))
    ]
    head = (
        "# Config keys\n\nA key of the JSON file is honoured, [refused](refused.md), or accepted "
        "[without effect](without_effect.md). `hf-dist config check FILE` says which keys of a file are which.\n\n"
        "| section | what it is for | keys with an effect | keys known |\n|---|---|--:|--:|\n"
    )
    return head + "\n".join(rows)


def _linked(name: str, keys: list[str]) -> str:
    """A section's name, with its page if it has one."""
    return f"[`{name}`]({name}.md)" if any(_does_something(key) for key in keys) else f"`{name}`"


def _about(name: str) -> str:
    """What a section is for: the sentence under its field, or the fate of its keys."""
    if name == TOP:
        return "keys outside of every section"
    info = fields().get(name)
    if info is not None:
        return _cell(meaning(name))
    statuses = {row.status for path, row in SUPPORT.items() if path.startswith(f"{name}.")}
    return "refused" if Status.REFUSED in statuses else "no effect"


def _section(name: str, keys: list[str]) -> str:
    title = "Top level" if name == TOP else f"`{name}`"
    text = f"# {title}\n\nKeys of the JSON: {_about(name)}\n\n"
    by_status = {status: [key for key in keys if SUPPORT[key].status is status] for status in Status}
    if name in _NAMES:
        text += _NAMES[name]()
    text += "".join(_used(key, name) for key in by_status[Status.USED])
    if by_status[Status.MAPPED]:
        rows = ((f"`{key}`", f"`{SUPPORT[key].target}`") for key in by_status[Status.MAPPED])
        text += _table("Other spellings", ("key", "the same as"), rows)
    if by_status[Status.REFUSED]:
        text += f"[Refused](refused.md): {_codes(by_status[Status.REFUSED])}.\n\n"
    if by_status[Status.NO_EFFECT]:
        text += f"[Accepted without effect](without_effect.md): {_codes(by_status[Status.NO_EFFECT])}.\n\n"
    return text


def _refused() -> str:
    keys = [key for key, row in SUPPORT.items() if row.status is Status.REFUSED]
    head = (
        "# Keys of DeepSpeed that are not supported\n\nA file with one of these keys is refused before anything is loaded, "
        "with its line and what to do, except where its value asks for nothing (`false`, `0`).\n\n"
    )
    return head + _table("", ("key", "why", "do this"), _grouped(keys, lambda row: (_cell(row.reason), _cell(row.fix))))


def _idle() -> str:
    keys = [key for key, row in SUPPORT.items() if row.status is Status.NO_EFFECT]
    head = "# Keys of DeepSpeed without effect\n\nThey change nothing. The start-up report lists those that a file has.\n\n"
    return head + _table("", ("key", "why"), _grouped(keys, lambda row: (_cell(row.reason),)))


def _grouped(keys: Iterable[str], told: Callable[[Any], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """A row for the keys of one section of which the same is told."""
    found: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for key in keys:
        found[key.rpartition(".")[0], told(SUPPORT[key])].append(key)
    return ((_codes(names), *words) for (_, words), names in found.items())


def _used(key: str, section: str) -> str:
    """A heading for a key, so that the search leads to it; below it what the key does and takes."""
    leaf = _leaf(key)
    values, default = _values(key), leaf.get("default")
    facts = [f"`{key}`", values, "" if default is None else f"default `{json.dumps(default)}`"]
    return f"## {key.removeprefix(f'{section}.')}\n\n{meaning(key)}\n{', '.join(filter(None, facts))}.\n\n"


def _leaf(path: str) -> Mapping[str, Any]:
    node: Mapping[str, Any] = _SCHEMA
    for part in path.split("."):
        node = node.get("properties", {}).get(part, {})
    return node


_SCHEMA = json_schema()


def _values(key: str) -> str:
    """The values that a key takes, in a few words."""
    found = accepted_at(key)
    return "a name, see below" if key in ("optimizer.type", "scheduler.type") else found.words if found else ""


def _optimizers() -> str:
    rows = ((f"`{name}`", _codes(sorted(arguments))) for name, arguments in sorted(OPTIMIZER_ARGUMENTS.items()))
    return _table("Which optimizer names work", ("`optimizer.type`", "its `optimizer.params`"), rows)


def _schedules() -> str:
    rows = ((f"`{name}`", _codes(names)) for name, names in {**DEEPSPEED_SCHEDULES, **TORCH_SCHEDULES}.items())
    return _table("Which schedule names work", ("`scheduler.type`", "its `scheduler.params`"), rows)


_NAMES = {"optimizer": _optimizers, "scheduler": _schedules}
"""Section -> a table of the names that its type may have."""


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _cell(text: str) -> str:
    """Text inside of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", text).replace("\n", " ")


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(_lines(title, head, rows)) + "\n\n"


def _lines(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    if title:
        yield f"## {title}\n"
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |"
