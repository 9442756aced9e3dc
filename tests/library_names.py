"""Names of transformers, accelerate, trl and peft that the package reads and no release promises, and since when they exist.

    python -m tests.library_names                 # which of them the installed versions have
    python -m tests.library_names --write         # look into the wheels of the index, replace LIBRARY_NAMES.md

The names are found in the package's source: what it imports from these libraries, and every private attribute that neither it
nor torch nor Python defines. `test_library_names.py` fails if the page lacks one, has one too many, or if an installed version
has lost one. A release that moves something shows in one run of the first command in its environment.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "LIBRARY_NAMES.md"
OLDEST = {"transformers": "5.3.0", "accelerate": "1.1.0", "peft": "0.17.0", "trl": "0.29.0"}
"""Libraries, and the oldest version that is looked into."""
OF_TORCH = {"_execution_engine", "_parse_to", "_prefix", "_scale", "_schema"}
"""Private names of torch's, torchao's, or of our own, that are words in these libraries as well."""


class Name(NamedTuple):
    """A name that is read."""

    package: str
    name: str
    """`module.name` of an import, `._name` of an attribute."""

    @property
    def module(self) -> str:
        """Of an import; "" for an attribute."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """Without the module."""
        return self.name.rpartition(".")[2]


def read_names() -> dict[Name, list[str]]:
    """Name -> files that read it, below `hf_dist/`."""
    found: dict[Name, set[str]] = defaultdict(set)
    private: dict[str, set[str]] = defaultdict(set)
    own: set[str] = set()
    for file in sorted((ROOT / "hf_dist").rglob("*.py")):
        where = str(file.relative_to(ROOT / "hf_dist"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            own |= set(_defined(node))
            for name in _private(node):
                private[name].add(where)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OLDEST:
                for alias in node.names:
                    found[Name(node.module.split(".")[0], f"{node.module}.{alias.name}")].add(where)
    for name, files in private.items():
        library = next((library for library in OLDEST if name in _words(library)), None)
        if library is not None and not _elsewhere(name) and (name not in own or name in _of_stock_classes()):
            found[Name(library, f".{name}")] |= files
    return {name: sorted(files) for name, files in sorted(found.items())}


def _defined(node: ast.AST) -> Iterator[str]:
    """Names that the package gives to something of its own."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif (
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
    ):
        yield node.attr


def _private(node: ast.AST) -> Iterator[str]:
    """Private attributes that are read, written or overridden."""
    found = ""
    if isinstance(node, ast.Attribute):
        found = node.attr
    elif isinstance(node, ast.FunctionDef):
        found = node.name
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
        found = next((a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)), "")
    if found.startswith("_") and not found.startswith("__"):
        yield found


@functools.cache
def _words(library: str) -> frozenset[str]:
    """Private words in the installed library's source, without its models."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return frozenset()
    files = {str(f): f.read_text(encoding="utf-8", errors="ignore") for f in Path(spec.origin).parent.rglob("*.py")}
    return frozenset().union(*(re.findall(r"\b_\w+", text) for path, text in files.items() if _counts(path)))


def _counts(path: str) -> bool:
    return "/models/" not in path or "transformers" not in path or path.endswith("/models/auto/__init__.py")


@functools.cache
def _of_stock_classes() -> frozenset[str]:
    """Private names of the classes that the package derives from: a name of ours there would be theirs."""
    import accelerate
    import transformers

    found: set[str] = set()
    for kind in (transformers.Seq2SeqTrainer, accelerate.Accelerator, transformers.TrainingArguments):
        for each in kind.__mro__:
            module = sys.modules.get(each.__module__)
            if module is not None and each.__module__.split(".")[0] in OLDEST and module.__file__:
                found |= {name for name in vars(each) if name.startswith("_")}
                found |= set(re.findall(r"\bself\.(_\w+) *=", Path(module.__file__).read_text(encoding="utf-8")))
    return frozenset(found)


@functools.cache
def _elsewhere(name: str) -> bool:
    """Whether torch or Python has it: then it is not theirs."""
    import torch
    from torch import nn

    places = (
        torch,
        torch.ops.aten,
        torch.Tensor,
        torch._C,
        nn.Module(),
        torch.distributed,
        torch.distributed.distributed_c10d,
        sys,
    )
    return name in OF_TORCH or any(hasattr(place, name) for place in places)


def is_there(name: Name) -> bool:
    """Whether the installed version has it."""
    if not name.module:
        return name.last in _words(name.package)
    try:
        return hasattr(importlib.import_module(name.module), name.last) or bool(importlib.util.find_spec(name.name))
    except ImportError:
        return False


def listed() -> dict[Name, tuple[str, str]]:
    """Name -> first and last version that has it, from the page."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] in OLDEST:
            found[Name(cells[0], cells[1])] = (cells[2], cells[3])
    return found


# ---- the wheels of the index


def versions_of(library: str) -> list[str]:
    """The first release of each minor version from `OLDEST` on, oldest first."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", library], check=True, capture_output=True, text=True
    ).stdout
    every = re.findall(r"\d+(?:\.\d+)+", said.partition("Available versions:")[2].partition("\n")[0])
    oldest = _parts(OLDEST[library])
    minors: dict[tuple[int, ...], str] = {}
    for version in sorted(every, key=_parts):
        if _parts(version) >= oldest:
            minors.setdefault(_parts(version)[:2], version)
    return list(minors.values())


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def in_wheel(library: str, version: str, folder: Path) -> dict[str, str]:
    """Path -> source of each file of a release, without transformers' models."""
    place = folder / f"{library}-{version}"
    if not place.exists():
        ask = [
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--ignore-requires-python",
            "--dest",
            str(place),
        ]
        subprocess.run([sys.executable, "-m", "pip", *ask, f"{library}=={version}"], check=True)
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".py")]
        return {name: wheel.read(name).decode(errors="ignore") if _counts(name) else "" for name in names}


def has(files: Mapping[str, str], name: Name) -> bool:
    """Whether a release has it, by its words."""
    word = re.compile(rf"\b{re.escape(name.last)}\b")
    if not name.module:
        return any(word.search(text) for text in files.values())
    path = name.module.replace(".", "/")
    if name.module == "transformers":  # its door opens everything by a table of other files
        return any(word.search(text) for text in files.values())
    own = files.get(f"{path}.py", files.get(f"{path}/__init__.py", ""))
    return bool(word.search(own)) or f"{path}/{name.last}.py" in files or f"{path}/{name.last}/__init__.py" in files


def page(folder: Path) -> str:
    """The whole page."""
    names = read_names()
    lines = [
        "# Names of libraries that no release promises",
        "",
        "`python -m tests.library_names --write`. Imports, and private attributes, of transformers, accelerate, peft and trl",
        "that the package reads. First and last: of the minor releases named below, by the words in their wheels.",
        "",
        "| library | name | first | last | read by |",
        "|---|---|---|---|---|",
    ]
    newest = {}
    for library in OLDEST:
        releases = {version: in_wheel(library, version, folder) for version in versions_of(library)}
        newest[library] = list(releases)[-1]
        for name, files in names.items():
            if name.package == library:
                having = [version for version, source in releases.items() if has(source, name)]
                first, last = (having[0], having[-1]) if having else ("none", "none")
                more = f" and {len(files) - 1} more" if len(files) > 1 else ""
                lines.append(f"| {library} | `{name.name}` | {first} | {last} | {files[0]}{more} |")
    looked = ", ".join(f"{library} {OLDEST[library]} to {version}" for library, version in newest.items())
    return "\n".join([*lines, "", f"Looked into: {looked}."]) + "\n"


def main(arguments: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.library_names", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"replace {PAGE.name}; downloads wheels")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hf_dist_wheels")
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(page(options.folder), encoding="utf-8")
    lost = [name for name in listed() if importlib.util.find_spec(name.package) and not is_there(name)]
    for name in lost:
        print(f"{name.package} {importlib.metadata.version(name.package)} lacks {name.name}")
    print(f"{len(listed()) - len(lost)} of {len(listed())} are there")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main(sys.argv[1:])
