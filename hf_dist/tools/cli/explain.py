"""`hf-dist config explain`: what a file sets and what follows from it, or what a key means. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dist.config import DistConfig, axes_of, differences, read_config, shown
from hf_dist.config.auto import source_of_auto
from hf_dist.config.json_schema import accepted_at, children
from hf_dist.config.meaning import meaning, sentences
from hf_dist.config.rows import Status
from hf_dist.config.schema import fields, section_of
from hf_dist.config.spelling import did_you_mean
from hf_dist.config.support import SECTION_ALIASES, SUPPORT
from hf_dist.config.unknown import SECTIONS, at
from hf_dist.config.values import is_auto
from hf_dist.errors import ConfigError, Problem
from hf_dist.tools.cli.compared import AsJson, Model, WorldSize, as_json_text, compared
from hf_dist.tools.cli.terminal import wrapped

__all__ = ["explain"]

_FILES = (".json", ".yaml", ".yml")
_SET, _FOLLOWS, _REST = "The file sets:", "What follows from it:", "Defaults:"

Words = Annotated[
    list[str],
    typer.Argument(
        help="A JSON file, keys or sections, or a file and then keys. After `--`: the arguments of your script.",
        show_default=False,
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="Also list the keys that have their defaults.")]


@dataclass(frozen=True)
class Row:
    """One key of a file."""

    key: str
    value: Any
    source: str
    """`line 8`, `default`, or where the value comes from."""
    meaning: str


def explain(
    words: Words,
    everything: Everything = False,
    world_size: WorldSize = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Say what a file sets, what follows from it and what differs from DeepSpeed; or what a key means, without a file.

    hf-dist config explain zero3.json

    hf-dist config explain zero3.json zero_optimization --world-size 8 -- --per_device_train_batch_size 4

    hf-dist config explain overlap_comm
    """
    file, keys, script = _told_apart(words)
    keys = [path for key in keys for path in _paths(key)]
    if file is None:
        print(as_json_text([_facts(key) for key in keys]) if as_json else "\n\n".join(map(_described, keys)))
        return
    config = compared(file, script, world_size, model)
    rows = [row for row in _rows(config, read_config(file).data) if not keys or _is_in(row.key, keys)]
    if as_json:
        print(as_json_text(_with_differences(config, rows)))
        return
    layout = [] if world_size is None else [f"{world_size} processes: {_layout(config, world_size)}"]
    for line in _told(file, config, rows, keys, layout, whole=everything or bool(keys)):
        print(line)


def _told_apart(words: list[str]) -> tuple[Path | None, list[str], list[str] | None]:
    """The file, the keys and the arguments of a script, which are all the words from the first option or `.py` file on."""
    begins = next((i for i, word in enumerate(words) if word.startswith("--") or word.endswith(".py")), len(words))
    own, script = words[:begins], words[begins:]
    files = [word for word in own if Path(word).suffix in _FILES or "/" in word or Path(word).is_file()]
    if len(files) > 1:
        fix = "Pass one file; `hf-dist config check` takes each in turn."
        raise ConfigError(Problem("explain", files[1], "is a second file", fix))
    return Path(files[0]) if files else None, [word for word in own if word not in files], script or None


def _paths(word: str) -> list[str]:
    """The keys or sections that `word` names: a JSON path, or the end of some paths. What another spelling means follows it."""
    known = {*SUPPORT, *SECTIONS, *SECTION_ALIASES, *sentences()} - {""}
    known |= {path for section in ("optimizer.params", "scheduler.params") for _, path in children(section)}
    named = word in known or f"{word}.*" in known
    found = [word] if named else sorted(path for path in known if path.endswith(f".{word}"))
    if found:
        meant = (SUPPORT[path].target for path in found if path in SUPPORT and SUPPORT[path].status is Status.MAPPED)
        return list(dict.fromkeys([*found, *meant]))
    names = {name for path in known for name in (path, path.rpartition(".")[2])}
    fix = did_you_mean(word, names, "`hf-dist config explain FILE --all` lists every key.")
    raise ConfigError(Problem(word, "", "is no key of a config", fix))


def _is_in(path: str, keys: Iterable[str]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def _told(
    file: Path, config: DistConfig, rows: list[Row], keys: list[str], layout: list[str], *, whole: bool
) -> Iterator[str]:
    """The lines about a file."""
    yield f"Configuration from {file}"
    parts: dict[str, list[Row]] = {_SET: [], _FOLLOWS: [], _REST: []}
    for row in rows:
        part = _SET if row.source.startswith("line ") and not is_auto(row.value) else _FOLLOWS
        parts[_REST if row.source == "default" else part].append(row)
    for head, found in parts.items():
        told = [] if head == _REST and not whole else [row for row in found if row.meaning != "a comment"]
        extra = layout if head == _FOLLOWS else []
        yield from ["", head] if told or extra else []
        yield from (f"  {line}" for line in extra)
        yield from (line for row in told for line in _lines(row))
    differ = [each for each in differences(config) if not keys or _is_in(each.path, keys)]
    yield from ["", "Differs from DeepSpeed:"] if differ else []
    yield from (line for each in differ for line in wrapped(str(each), "  ", "      "))
    if not whole:
        yield ""
        count = len(parts[_REST])
        yield from wrapped(
            f"{count} other keys have their defaults: --all lists them. `hf-dist config explain KEY` explains one."
        )


def _lines(row: Row) -> Iterator[str]:
    yield from wrapped(f"{row.key}: {shown(row.value)}  ({row.source})", "  ", "      ")
    yield from wrapped(row.meaning, "      ")


def _layout(config: DistConfig, world_size: int) -> str:
    axes = axes_of(config, world_size)
    sizes = [f"{name} {size}" for name, size in axes.sizes.items() if size > 1] or ["no axis"]
    return f"{' x '.join(sizes)}; {axes.size('data')} data rank{'s' if axes.size('data') > 1 else ''}"


def _rows(config: DistConfig, data: Any) -> list[Row]:
    """Every key in the file, then every key with its default."""
    notes = {note.path: note for note in config.notes}
    rows = []
    for path in [*config.sources, *(note.path for note in config.notes if note.path not in config.sources)]:
        written = config.spelled(path)
        source = config.source_of(path)
        line = config.lines.get(written)
        source = f"line {line}" if line and source in ("file", "default") else source
        note, value = notes.get(written), config.value_at(path)
        text = f"no effect: {note.reason}" if note is not None and note.kind == "idle" else meaning(path)
        text += f" ({note.reason})" if note is not None and note.kind == "read" else ""
        text = note.reason if note is not None and note.kind in ("comment", "unknown", "override") else text
        alias = f" (written as {written})" if written != path else ""
        source = f"from {source_of_auto(path)}" if is_auto(value) and source == "auto" else source
        rows.append(Row(path, at(data, written) if value is None else value, source, text + alias))
    done = {row.key for row in rows}
    above = {path.rsplit(".", cut)[0] for path in done for cut in range(1, path.count(".") + 1)}
    rest = [path for path in sentences() if path not in done | above and section_of(fields()[path]) is None]
    return rows + [Row(path, config.value_at(path), "default", meaning(path)) for path in rest]


def _with_differences(config: DistConfig, rows: list[Row]) -> list[dict[str, Any]]:
    elsewhere = {each.path: f"{each.text}. As there: {each.restore}" for each in differences(config)}
    return [asdict(row) | ({"differs": elsewhere[row.key]} if row.key in elsewhere else {}) for row in rows]


def _facts(path: str) -> dict[str, Any]:
    """What is known of a key without a file: its meaning, the values that it takes, its default; a section's keys."""
    info, taken = fields().get(path), accepted_at(path) if path not in SECTIONS else None
    found: dict[str, Any] = {"key": path, "meaning": meaning(path)}
    if taken is not None and taken.words:
        found["takes"] = taken.words
    if info is not None and section_of(info) is None and not info.is_required():
        found["default"] = info.default
    if path in SECTIONS:
        inner = [key for _, key in children(path)]
        found["keys"] = {key: meaning(key) for key in inner if key not in SUPPORT or _is_used(key)}
        found["refused or without effect"] = [key for key in inner if key not in found["keys"]]
    return found


def _is_used(key: str) -> bool:
    return SUPPORT[key].status is Status.USED


def _described(path: str) -> str:
    """The same as lines."""
    facts = _facts(path)
    lines = [path, *wrapped(facts["meaning"], "  ")]
    if "takes" in facts:
        lines += wrapped(f"Takes {facts['takes']}.", "  ")
    if "default" in facts:
        lines += wrapped(f"Default: {shown(facts['default'])}.", "  ")
    for key, text in facts.get("keys", {}).items():
        lines += wrapped(f"{key.rpartition('.')[2]}: {text}", "  ", "      ")
    others = [key.rpartition(".")[2] for key in facts.get("refused or without effect", [])]
    if others:
        lines += wrapped(f"Refused, without effect, or other spellings: {', '.join(others)}", "  ", "      ")
    return "\n".join(lines)
