"""From a path, dict or text to a checked `DistConfig`. One ConfigError reports everything that is wrong."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hf_dist.config.accelerate import LauncherSettings
from hf_dist.config.cross_field_checks import check_together, note_coercions
from hf_dist.config.findings import Findings
from hf_dist.config.keys import check_keys
from hf_dist.config.launched import take_launcher
from hf_dist.config.normalise import normalised
from hf_dist.config.params import checked_optimizer, checked_scheduler
from hf_dist.config.scan import first_character, scan_json
from hf_dist.config.schema import DistConfig, Provenance
from hf_dist.config.values import BadValue, is_auto
from hf_dist.errors import ConfigError, Problem

_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class ConfigDocument:
    """A config as written: plain data, its origin, the line of each key, and slips in the text."""

    data: dict[str, Any]
    origin: str = ""
    """Absolute path, "JSON text" or "base64 text"; empty for a dict."""
    lines: Mapping[str, int] | None = None
    problems: tuple[Problem, ...] = ()


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object], *, launcher: LauncherSettings | None = None
) -> DistConfig:
    """The checked config of a file, a dict, a JSON text or a base64 text; "auto" values stay until `resolve`.

    `launcher`: the settings of `accelerate launch`. They fill "auto" and missing keys, and must agree with the others.
    """
    config, problems = examine(source, launcher=launcher)
    if problems:
        raise ConfigError(problems)
    return config


def examine(
    source: str | os.PathLike[str] | Mapping[str, object], *, launcher: LauncherSettings | None = None
) -> tuple[DistConfig, list[Problem]]:
    """The config without its wrong values, and all problems. Raises ConfigError if the source is not a JSON object."""
    document = read_config(source)
    findings = Findings(document.origin, document.lines or {}, problems=list(document.problems))
    data = normalised(document.data, findings)
    filled = take_launcher(data, launcher, findings)
    check_keys(data, findings)
    sections = {
        "optimizer": checked_optimizer(data.get("optimizer"), findings),
        "scheduler": checked_scheduler(data.get("scheduler"), findings),
    }
    typed = _typed(DistConfig, data) | {key: value for key, value in sections.items() if value is not None}
    config = _built(typed, findings)
    sources = _sources(typed, "")
    sources |= {path: source for path, source in filled.items() if path in sources}
    note_coercions(typed, config, findings)
    config._provenance = Provenance(sources=sources)  # a rule may ask whether the file wrote a default value
    check_together(config, sources, findings)
    if config.hf_dist.strict:
        _refuse_notes(findings)
    spelled = {path: written for path, (written, _) in findings.written.items()}
    config._provenance = Provenance(document.origin, dict(findings.lines), tuple(findings.notes), sources, spelled)
    return config, findings.in_order()


def read_config(source: str | os.PathLike[str] | Mapping[str, object]) -> ConfigDocument:
    """The data of `source`, checked only to be one JSON object. A dict is copied, never changed."""
    if isinstance(source, Mapping):
        return ConfigDocument(_plain_copy(source, ""))
    if isinstance(source, os.PathLike):
        return _read_file(Path(source))
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(Problem("config", repr(source), "is not a path, a dict or a JSON text", "Pass one of these."))
    if first_character(source) in ("{", "["):
        return _read_text(source, "JSON text")
    try:
        exists = os.path.exists(source)
    except ValueError:
        exists = False
    if not exists:
        decoded = _decoded(source)
        if decoded is not None:
            return _read_text(decoded, "base64 text")
    return _read_file(Path(source))


def canonical(source: str | os.PathLike[str] | Mapping[str, object]) -> dict[str, Any]:
    """The data of `source` with one spelling per key and without null, for programs that write a changed copy of it.

    Raises `ConfigError` for keys that cannot be brought into that form.
    """
    document = read_config(source)
    findings = Findings(document.origin, document.lines or {}, problems=list(document.problems))
    data = normalised(document.data, findings)
    findings.raise_if_any()
    return data


def _read_file(path: Path) -> ConfigDocument:
    absolute = path.expanduser().absolute()
    if not absolute.exists():
        raise ConfigError(Problem("config", str(absolute), "does not exist", similar_files(absolute)))
    if absolute.is_dir():
        raise ConfigError(
            Problem("config", str(absolute), "is a directory, not a JSON file", similar_files(absolute / "x"))
        )
    try:
        text = absolute.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem("config", str(absolute), f"is not a UTF-8 text (byte {error.start})", "Save it as UTF-8.")
        raise ConfigError(problem) from None
    except OSError as error:
        raise ConfigError(Problem("config", str(absolute), f"cannot be read: {error.strerror}", "")) from None
    if absolute.suffix in _YAML and first_character(text) != "{":
        fix = f"Convert it: hf-dist config convert {path} --output {absolute.stem}.json, and name that file."
        raise ConfigError(Problem("config", str(absolute), "is a YAML file, not a JSON file", fix))
    return _read_text(text, str(absolute))


def similar_files(path: Path) -> str:
    """What the folder of a missing file holds instead, as a sentence: files with its suffix, such as .json."""
    path = path.expanduser().absolute()
    folder = path.parent
    suffixes = _YAML if path.suffix in _YAML else (".py",) if path.suffix == ".py" else (".json",)
    if not folder.is_dir():
        return f"There is no directory {folder}."
    nearby = sorted(entry.name for entry in folder.iterdir() if entry.suffix in suffixes and entry.is_file())
    similar = difflib.get_close_matches(path.name, nearby, n=3)
    if similar:
        return f"Did you mean {' or '.join(similar)}?"
    kind = suffixes[0]
    return f"The {kind} files in {folder} are {', '.join(nearby[:5])}." if nearby else f"{folder} holds no {kind} file."


def check_script(script: str) -> None:
    """Raise `ConfigError` if there is no such file (or folder, which Python runs, too), with similar names."""
    path = Path(script)
    if not path.exists():
        similar = similar_files(path if path.suffix == ".py" else path.with_name(f"{path.name}.py"))
        raise ConfigError(Problem("script", str(path.absolute()), "does not exist", similar))


def _read_text(text: str, origin: str) -> ConfigDocument:
    scanned = scan_json(text, origin)
    if isinstance(scanned.value, dict):
        return ConfigDocument(scanned.value, origin, scanned.lines, scanned.problems)
    problems = list(scanned.problems)
    if scanned.value is not None or not problems:
        problems.append(Problem("", "", "is not a JSON object", "The file must be one {...}.", f"{origin}:1"))
    raise ConfigError(problems)


def _decoded(text: str) -> str | None:
    """The JSON object in a url-safe base64 text; None for anything else."""
    try:
        decoded = base64.b64decode(text.strip(), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        return None
    return decoded if first_character(decoded) == "{" else None


def _plain_copy(node: object, path: str) -> Any:
    """Nested mappings and sequences as fresh dicts and lists."""
    if isinstance(node, Mapping):
        for key in node:
            if not isinstance(key, str):
                raise ConfigError(Problem(path or "config", repr(key), "is not a string, as keys must be", ""))
        return {key: _plain_copy(value, f"{path}.{key}" if path else key) for key, value in node.items()}
    return [_plain_copy(item, path) for item in node] if isinstance(node, (list, tuple)) else node


def _typed(model: type[BaseModel], data: Mapping[str, object]) -> dict[str, Any]:
    """The part of `data` that has fields; `check_keys` has checked the rest."""
    result: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if name not in data or name in ("optimizer", "scheduler"):
            continue
        value, kind = data[name], info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            section = _typed(kind, value) if isinstance(value, Mapping) else {}
            if section:
                result[name] = section
        else:
            result[name] = value
    return result


def _built(typed: dict[str, Any], findings: Findings) -> DistConfig:
    """The model. Invalid values are reported and dropped, so that the rest can still be checked together."""
    try:
        return DistConfig(**typed)
    except ValidationError as error:
        for item in error.errors():
            path = ".".join(str(part) for part in item["loc"])
            cause = item.get("ctx", {}).get("error")
            clause = cause.clause if isinstance(cause, BadValue) else str(item["msg"])
            findings.problem(path, clause, cause.fix if isinstance(cause, BadValue) else "", found=item["input"])
            node: Any = typed
            for part in item["loc"][:-1]:
                node = node[part]
            node.pop(item["loc"][-1], None)
    return DistConfig(**typed)


def _refuse_notes(findings: Findings) -> None:
    """Apply `hf_dist.strict`: keys without effect and values of another type become problems."""
    for note in findings.notes:
        if note.kind != "comment":
            said = "has no effect" if note.kind == "idle" else "is not of the type of the key"
            findings.problem(note.path, f"{said} ({note.reason})", "Correct or remove it, or hf_dist.strict.")


def _sources(node: Mapping[str, object], path: str) -> dict[str, str]:
    """Every leaf of the file: "file", or "auto" while it is not filled."""
    found: dict[str, str] = {}
    for key, value in node.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value:
            found.update(_sources(value, where))
        else:
            found[where] = "auto" if is_auto(value) else "file"
    return found
