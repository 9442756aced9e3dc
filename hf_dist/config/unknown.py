"""Judges a key that hf_dist does not know: what was probably meant, or that it belongs to another program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hf_dist.config.foreign_keys import FOREIGN, INSTEAD, OWNERS, SENTENCES
from hf_dist.config.rows import Status, truthy
from hf_dist.config.spelling import begun, closest, nearly_same_words, same_words
from hf_dist.config.support import SECTION_ALIASES, STRICT, SUPPORT

SECTIONS = frozenset(key.rsplit(".", cut)[0] for key in SUPPORT for cut in range(1, key.count(".") + 1))
"""Every path that holds other keys."""

_AMBIGUOUS = frozenset(
    {"enabled", "type", "params", "names", "classes", "strict", "device", "dtype", "momentum", "mpu", "stages"}
)
"""Names that have different meanings in every section and in other programs."""
_NEVER_ALONE = frozenset({"enabled", "params"})
"""Those of them that nobody writes outside a section on purpose."""
_LAX = frozenset(
    {
        *("", "activation_checkpointing", "flops_profiler", "aio", "checkpoint", "pipeline", "expert_parallel"),
        *("data_types", "elasticity", "optimizer", "scheduler"),
    }
)
"""Sections in which DeepSpeed reads only the keys that it knows."""
_PLAIN_ENOUGH = 8
"""A single word of at least this many letters counts as a misspelling of another section's key."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with an unknown key, as a clause, and the remedy, as a sentence."""

    expected: str
    fix: str
    target: str | None = None
    """Where the value was meant to be; None if that is uncertain or already taken."""


@cache
def known_keys(section: str) -> frozenset[str]:
    """The keys that may be directly in `section`; "" for the top level."""
    prefix = f"{section}." if section else ""
    below = (key[len(prefix) :].split(".")[0] for key in SUPPORT if key.startswith(prefix))
    aliases = (alias.rpartition(".") for alias in SECTION_ALIASES)
    return frozenset(
        [*(key for key in below if key.isidentifier()), *(name for home, _, name in aliases if home == section)]
    )


@dataclass(frozen=True)
class _Key:
    """An unknown key as found in a file."""

    name: str
    value: Any
    section: str
    root: Mapping[str, Any]
    """The whole file."""

    @property
    def here(self) -> str:
        """Where the key is, in words."""
        return f'in "{self.section}"' if self.section else "at the top level"

    def lost(self, fix: str, target: str | None = None, more: str = "") -> Verdict:
        """The verdict on an unknown name."""
        return Verdict(f"is not a key {self.here}{more}", fix, target)

    def meant(self, path: str, whole: bool = False) -> Verdict:
        """A question whether the key at `path` was meant. `whole`: the key belongs to another section."""
        name = path if whole or not self.section else path.rpartition(".")[2]
        if at(self.root, path) is not None:
            return self.lost(f'Did you mean "{name}"? It is there already: remove this one.')
        if path in SECTIONS and not isinstance(self.value, Mapping):
            return self.lost(f"Did you mean {written_out(path, self.value, self.section)}?")
        top = "the top-level key " if whole and self.section and "." not in name else ""
        return self.lost(f'Did you mean {top}"{name}"?', path)

    def moved(self, path: str) -> tuple[str, str | None]:
        """An instruction where to move the value, and the path if it is certain."""
        home, _, name = path.rpartition(".")
        if at(self.root, path) is not None:
            return f'Remove it: "{path}" is there already.', None
        if path in SECTIONS and not isinstance(self.value, Mapping):
            return f"Remove it and write {written_out(path, self.value, self.section)}.", None
        if home == self.section:
            return f'Rename it to "{name}".', path
        top = home.partition(".")[0]
        if top in ("optimizer", "scheduler") and at(self.root, f"{top}.type") is None:
            kind = "AdamW" if top == "optimizer" else "WarmupLR"
            inner = f'"type": "{kind}"' + (f', "params": {{"{name}": {json.dumps(self.value)}}}' if home != top else "")
            return f'Remove it and write "{top}": {{{inner}}}, or pass it to the script.', None
        if not home:
            return f'Move it to the top level, as "{name}".', path
        return f'Move it to "{path}".', path

    def one_of(self, homes: Iterable[str]) -> tuple[str, str | None]:
        """The same for a name of several sections; sections that the file contains are preferred."""
        homes = list(homes)
        there = [home for home in homes if at(self.root, home.rpartition(".")[0]) is not None] or homes
        free = [home for home in there if at(self.root, home) is None]
        if len(there) == 1 or not free:
            return self.moved(there[0])
        places = " or ".join(f'"{home}"' for home in free)
        return f"Move it to {places}.", free[0] if len(free) == 1 else None

    def under(self, name: str) -> str:
        """The path of `name` in the same section."""
        return f"{self.section}.{name}" if self.section else name


def judged(name: str, value: object, section: str, root: Mapping[str, object]) -> Verdict | None:
    """What an unknown key of `section` was meant to be; None for a key of another program. `root`: the whole file."""
    key = _Key(name, value, section, root)
    wrong_place = f"does not belong {key.here}" + (", where DeepSpeed ignores it" if section in _LAX else "")
    if name in INSTEAD and INSTEAD[name] != key.under(name):
        return key.lost(*key.moved(INSTEAD[name]))
    if name in SENTENCES and (name != "dtype" or not section):
        return key.lost(SENTENCES[name])
    if name in _PLACES:
        return Verdict(wrong_place, *key.moved(_PLACES[name]))
    near = closest(name, known_keys(section)) or begun(name, known_keys(section))
    if near is not None:
        path = key.under(near)
        return key.meant(SECTION_ALIASES.get(path, path))
    if name in _HOMES:
        return Verdict(wrong_place, *key.one_of(_HOMES[name]))
    resembling = _resembling(key) if "-" not in name else None
    if resembling is not None:
        return resembling
    if name in _NEVER_ALONE:
        return Verdict(wrong_place, "Move it into the section that it is meant for, or remove it.")
    if section in STRICT:
        known = ", ".join(sorted(known_keys(section)))
        return key.lost("Remove it." if len(known) > 200 else f"Remove it; the keys are {known}.")
    return None


def _resembling(key: _Key) -> Verdict | None:
    """Names of other tools, then names close to those of this section or another one."""
    name = key.name
    owner = None if name in FOREIGN else OWNERS.get(name)
    if owner is not None:
        return Verdict(f"is {owner}, not a key {key.here}", _pass(name, owner))
    if name in _JOINED:
        return key.meant(_JOINED[name], whole=True)
    for alike in (same_words, closest, nearly_same_words):
        near = alike(name, known_keys(key.section))
        if near is not None:
            return key.meant(key.under(near))
        near = alike(name, _EVERYWHERE) if len(name) > 5 else None
        if near is not None:
            return _as_name(key, near)
    return None


def _as_name(key: _Key, name: str) -> Verdict:
    """The verdict for a key close to `name`, which another section or tool has."""
    if name in INSTEAD:
        return key.lost(*key.moved(INSTEAD[name]))
    if name in SENTENCES:
        return key.lost(SENTENCES[name])
    if name in _PLACES:
        return key.meant(_PLACES[name], whole=True)
    if name in _HOMES:
        return key.lost(*key.one_of(_HOMES[name]))
    return key.lost(_pass(name, OWNERS[name]), more=f'; "{name}" is {OWNERS[name]}')


def _pass(name: str, owner: str) -> str:
    return f"Remove it and pass --{name}." if owner.endswith("script") else "Remove it."


def at(root: Mapping[str, object], path: str) -> Any:
    """The value at a JSON path of plain data; None if missing."""
    node: object = root
    for part in path.split(".") if path else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def written_out(path: str, value: object, section: str | None = None) -> str:
    """A section as an object instead of a plain value, with the same meaning: `"fp16": {"enabled": true}`.

    `section`: where it will be written. If that is not where it belongs, the result shows its place, too.
    """
    home, _, name = path.rpartition(".")
    parts, inner = [name], _object(path, value)
    if section is not None and section != home:
        parts = path.split(".")
    for part in reversed(parts[1:]):
        inner = {part: inner}
    return f'"{parts[0]}": {json.dumps(inner)}'


def _object(path: str, value: object) -> dict[str, Any]:
    word = str(value).strip().lower()
    on = truthy(value)
    if f"{path}.enabled" in SUPPORT:
        return {"enabled": "auto" if word == "auto" else on}
    if f"{path}.device" in SUPPORT:
        if word == "nvme":
            return {"device": "nvme", "nvme_path": "/local_nvme"}
        return {"device": "cpu" if on and word != "none" else "none"}
    if path in ("optimizer", "scheduler"):
        return {"type": value if isinstance(value, str) and value else {"optimizer": "AdamW"}.get(path, "WarmupLR")}
    number = int(word) if word.isdigit() else int(on)
    sizes = {"zero_optimization": "stage", "pipeline": "stages", "tensor_parallel": "autotp_size"}
    if path in sizes:
        return {sizes[path]: min(number, 3) if path == "zero_optimization" else max(1, number)}
    return {"every_n_layers": 1} if path == "activation_checkpointing" and on else {}


def _places() -> dict[str, str]:
    """Key name -> its only path, for names that mean the same everywhere."""
    found: dict[str, set[str]] = {}
    for path, row in SUPPORT.items():
        parts = path.split(".")
        if "zenflow" in parts[:-1]:
            continue
        if row.status is not Status.NO_EFFECT or parts[0] == "zero_optimization" or len(parts) == 1:
            found.setdefault(parts[-1], set()).add(path)
        found.setdefault(parts[0], set()).add(parts[0])
    return {key: paths.pop() for key, paths in found.items() if len(paths) == 1 and key not in _AMBIGUOUS}


def _homes() -> dict[str, tuple[str, ...]]:
    """Key name -> all its paths, for names of two words or more, which other programs rarely use."""
    found: dict[str, list[str]] = {}
    for path in SUPPORT:
        key = path.rpartition(".")[2]
        if "_" in key and key.isidentifier():
            found.setdefault(key, []).append(path)
    return {key: tuple(paths) for key, paths in found.items()}


_PLACES, _HOMES = _places(), _homes()
_JOINED = {
    "_".join(path.split(".")[-2:]): path
    for path, row in SUPPORT.items()
    if row.status is Status.USED and path.rpartition(".")[2] in _AMBIGUOUS and "." in path
}
"""Section and key joined into one word: `bf16_enabled`."""
_EVERYWHERE = tuple(
    name
    for name in sorted({*_PLACES, *_HOMES, *INSTEAD, *SENTENCES, *OWNERS} - FOREIGN - _AMBIGUOUS)
    if "_" in name or len(name) >= _PLAIN_ENOUGH
)
"""Names that any key may be a misspelling of."""
