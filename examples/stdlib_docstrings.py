"""A labelled text set that every machine already has: docstrings of the Python standard library.

The text is a docstring, the label is its package. Sources are parsed, never imported. Evaluation examples
come from other modules than training examples, so that memorising a file does not help.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
SKIPPED |= {"encodings", "pydoc_data"}  # tables, not text
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MIN_WORDS = 6
MIN_MODULES = 3
EVAL_SHARE = 0.25

Docstrings = dict[str, list[str]]
"""Module path -> its docstrings."""


def stdlib_folder() -> Path:
    """The folder that holds the sources of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_sources() -> list[Path]:
    """The standard library's sources without tests and tables, sorted: the same order in every process."""
    root = stdlib_folder()
    return sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))


def docstrings(source: str) -> list[str]:
    """The longer docstrings of a source text, each on one line."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    texts = (" ".join((ast.get_docstring(node) or "").split()) for node in nodes)
    return [text for text in texts if len(text.split()) >= MIN_WORDS]


def collect() -> dict[str, Docstrings]:
    """Top-level package -> module -> docstrings, without texts that occur in more than one package."""
    root = stdlib_folder()
    packages: dict[str, Docstrings] = defaultdict(dict)
    owners: dict[str, set[str]] = defaultdict(set)
    for path in stdlib_sources():
        parts = path.relative_to(root).parts
        if len(parts) < 2:
            continue
        try:
            found = docstrings(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates and deliberately broken files
        for text in found:
            owners[text].add(parts[0])
        packages[parts[0]]["/".join(parts)] = found
    for modules in packages.values():
        for name, texts in modules.items():
            modules[name] = [text for text in dict.fromkeys(texts) if len(owners[text]) == 1]
    return packages


def best_documented(packages: dict[str, Docstrings], num_labels: int) -> list[str]:
    """The packages with the most docstrings, among packages with enough modules for a held-out part."""

    def count(name: str) -> int:
        return sum(map(len, packages[name].values()))

    eligible = [name for name, modules in packages.items() if sum(map(bool, modules.values())) >= MIN_MODULES]
    return sorted(sorted(eligible, key=lambda name: (-count(name), name))[:num_labels])


def held_out_modules(modules: Docstrings, rng: random.Random) -> set[str]:
    """Whole modules for evaluation, together about a quarter of the package's docstrings; never all modules."""
    names = sorted(name for name, texts in modules.items() if texts)
    rng.shuffle(names)
    budget = EVAL_SHARE * sum(len(modules[name]) for name in names)
    chosen: set[str] = set()
    for name in names:
        if len(modules[name]) <= budget:
            chosen.add(name)
            budget -= len(modules[name])
    return chosen or {min(names, key=lambda name: (len(modules[name]), name))}


def examples(split: str, num_labels: int, max_per_label: int, seed: int, version: str) -> Iterator[dict[str, str]]:
    """Rows {text, package} of `split` ("train" or "eval"), the same in every process.

    `version` is only there for the dataset cache: another Python has another standard library.
    """
    rng = random.Random(seed)
    packages = collect()
    for package in best_documented(packages, num_labels):
        modules = packages[package]
        held_out = held_out_modules(modules, rng)
        texts = [text for name in sorted(modules) if (name in held_out) == (split == "eval") for text in modules[name]]
        rng.shuffle(texts)
        limit = max_per_label if split == "train" else max(1, int(max_per_label * EVAL_SHARE))
        for text in texts[:limit]:
            yield {"text": text, "package": package}
