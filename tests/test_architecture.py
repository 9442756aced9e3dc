"""Guards on the shape of the code: layers, communication, sizes, annotations, docstrings, files in the repository."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Container, Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "hf_dist"

SIBLINGS = {"sharding", "parallel/tensor", "parallel/pipeline"}
"""Each must be usable, testable and removable without the others."""
PLAIN = {
    "errors.py": ("errors",),
    "dist/axes.py": ("errors", "dist.axes"),
    "config/": ("errors", "version", "dist.axes", "config"),
}
"""Plain data -> the modules that it may import."""
HUGGING_FACE = {"transformers", "accelerate", "peft", "datasets", "evaluate", "trl"}
MAY_IMPORT_HUGGING_FACE = ("hf/", "tools/", "parallel/sequence/")
MAY_COMMUNICATE = {
    "hf_dist/dist/collectives.py", "hf_dist/dist/groups.py", "hf_dist/dist/mesh.py",
    "hf_dist/dist/rendezvous.py", "hf_dist/dist/wires.py",
    "hf_dist/parallel/pipeline/p2p.py", "hf_dist/tools/bench/wire.py",
}  # fmt: skip
PEERS = "hf_dist/tools/bench/engines/"
"""Other engines, which are what they are."""
DCP = "torch.distributed.checkpoint"
"""torch's distributed checkpoint: a storage format, which `hf_dist/checkpoint` may use."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 9
MAX_ARGUMENTS = 10
TOP_LEVEL = {
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml"),
    *("hf_dist", "tests", "examples", "configs"),
}
MACHINE_PATH = re.compile(r"(?<![\w.~/:}$-])/(?:work|root|workspace|home/\w+|Users/\w+)/")

Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---- reading the code


@functools.cache
def layers() -> list[set[str]]:
    """The areas of each line of the map in hf_dist/README.md, bottom first."""
    block = (PACKAGE / "README.md").read_text(encoding="utf-8").split("```")[1]
    found = [set(re.findall(r"(\w+)(?:/|\.py)(?=\s|$)", line)) for line in block.strip().splitlines()]
    return found[::-1]


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of one file."""
    return tuple(ast.walk(parse(path)))


def python_files(*folders: str) -> list[Path]:
    """Every Python file of these folders of the repository, sorted."""
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


def relative(path: Path) -> str:
    """The path as messages show it."""
    return path.relative_to(REPO).as_posix()


def at(path: Path, node: ast.AST) -> str:
    """`file:line` of a node, which terminals and editors open."""
    return f"{relative(path)}:{getattr(node, 'lineno', 1)}"


def area(path: Path) -> str:
    """The module or package directly under `hf_dist` that a file belongs to; `hf_dist` for the top `__init__`."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "hf_dist" if first == "__init__" else first


def inside(path: Path) -> str:
    """The path below `hf_dist`."""
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path) -> str:
    """The dotted name of the package a file's relative imports start from."""
    return ".".join(path.relative_to(REPO).parent.parts)


@functools.cache
def imports(path: Path) -> tuple[tuple[ast.AST, str], ...]:
    """Every imported dotted name with its node, wherever it stands (also in functions and under TYPE_CHECKING)."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(path).split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def package_imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """The areas of `hf_dist` that a file imports from."""
    for node, name in imports(path):
        parts = name.split(".")
        if parts[0] == "hf_dist":
            yield node, parts[1] if len(parts) > 1 else "hf_dist"


def functions(path: Path) -> Iterator[Function]:
    """Every def of a file, nested ones too."""
    return (node for node in nodes(path) if isinstance(node, Function))


def definitions(node: ast.AST, public: bool = True) -> Iterator[tuple[Function | ast.ClassDef, bool]]:
    """Classes, methods and functions with whether a user can reach them: no underscore, not inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            visible = public and not child.name.startswith("_")
            yield child, visible
            yield from definitions(child, visible and isinstance(child, ast.ClassDef))
        else:
            yield from definitions(child, public)


def check(problems: list[str], remedy: str) -> None:
    """Fail with all problems at once and what to do about them."""
    unique = list(dict.fromkeys(problems))
    assert not unique, "\n".join([f"{len(unique)} found. {remedy}", *unique])


# ---- layers


def layer_of(name: str) -> int | None:
    """The layer number of an area, None when it has not been given one."""
    return next((number for number, names in enumerate(layers()) if name in names), None)


def test_every_module_has_a_layer_and_every_layer_its_modules() -> None:
    areas = {area(path) for path in python_files("hf_dist")} - {"hf_dist"}
    named = [name for names in layers() for name in names]
    check(sorted(areas ^ set(named)), "The map in hf_dist/README.md names every module and package, and nothing else.")
    check([name for name in named if named.count(name) > 1], "Name it in one line of the map in hf_dist/README.md.")


def test_imports_point_down() -> None:
    problems = []
    for path in python_files("hf_dist"):
        here = layer_of(area(path))
        for node, name in package_imports(path):
            there = layer_of(name)
            if here is None or there is None or name == area(path):
                continue
            if there >= here:
                problems.append(f"{at(path, node)}: `{area(path)}` imports `{name}`, which is not below it")
            elif {name, area(path)} <= SIBLINGS:
                problems.append(f"{at(path, node)}: `{area(path)}` imports its sibling `{name}`")
    check(problems, "Move the shared part down, or pass the object in from above (hf_dist/engine/build.py assembles).")


def test_no_module_imports_itself_in_a_circle() -> None:
    """Wherever the import stands: one inside of a function or under TYPE_CHECKING is a circle, too."""
    modules = {".".join(path.relative_to(REPO).with_suffix("").parts): path for path in python_files("hf_dist")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    needs: dict[str, set[str]] = {}
    for module, path in modules.items():
        needs[module] = {found for _, name in imports(path) if (found := _module_of(name, modules))} - {module}
    order = TopologicalSorter(needs)
    try:
        order.prepare()
    except CycleError as error:
        check(
            [" -> ".join(error.args[1])], "Move the shared part below both, or describe what is needed by a Protocol."
        )


def _module_of(name: str, modules: Container[str]) -> str:
    """The module that an import loads: hf_dist.a.b of `from hf_dist.a import b` where there is one, else hf_dist.a."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def test_config_axes_and_errors_import_nothing_else_of_the_package() -> None:
    problems = [
        f"{at(path, node)}: imports `{name}`"
        for path in python_files("hf_dist")
        for plain, allowed in PLAIN.items()
        if inside(path).startswith(plain)
        for node, name in imports(path)
        if name.startswith("hf_dist.") and not f"{name}.".startswith(tuple(f"hf_dist.{module}." for module in allowed))
    ]
    check(problems, "A config is plain data; code that needs more belongs to who uses the config.")


def test_only_hf_and_tools_import_hugging_face() -> None:
    problems = [
        f"{at(path, node)}: imports {name}"
        for path in python_files("hf_dist")
        for node, name in imports(path)
        if name.split(".")[0] in HUGGING_FACE and not inside(path).startswith(MAY_IMPORT_HUGGING_FACE)
    ]
    check(problems, "Take what you need as an argument, or move the code to hf_dist/hf.")


# ---- axes


def test_only_the_axes_divide_the_world() -> None:
    """Who else did would not know of the next axis. (Files of other tools count the ranks of a machine, which is no
    axis, and leave one size to be found.)"""
    problems = [
        f"{at(path, node)}: {ast.unparse(node)}"
        for path in python_files("hf_dist")
        if relative(path)
        not in {"hf_dist/dist/axes.py", "hf_dist/config/convert.py", "hf_dist/config/distributed_config.py"}
        for node in nodes(path)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod)
        if re.search(r"world|processes", ast.unparse(node.left))
    ]
    check(problems, "Ask hf_dist.dist.axes.Axes (config.axes_of, mesh.axes) for a size or a coordinate.")


# ---- communication


def distributed_uses(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Imports from torch.distributed, and `torch.distributed...` written out."""
    for node, name in imports(path):
        if name == "torch.distributed" or name.startswith("torch.distributed."):
            yield node, name
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node, "torch.distributed"


def test_few_files_communicate() -> None:
    law = (PACKAGE / "README.md").read_text(encoding="utf-8").partition("\n4. ")[2].partition("\n5. ")[0]
    problems = [f"{name} is not named" for name in MAY_COMMUNICATE if f"`{name.removeprefix('hf_dist/')}`" not in law]
    check(problems, "Law 4 of hf_dist/README.md names who calls torch.distributed.")
    for path in python_files("hf_dist"):
        if relative(path) in MAY_COMMUNICATE or relative(path).startswith(PEERS):
            continue
        for node, name in distributed_uses(path):
            if not (area(path) == "checkpoint" and f"{name}.".startswith(f"{DCP}.")):
                problems.append(f"{at(path, node)}: uses {name}")
    check(
        problems,
        f"Call hf_dist.dist.collectives or hf_dist.dist.mesh; only {sorted(MAY_COMMUNICATE)} use torch.distributed.",
    )


# ---- sizes


def test_files_are_short() -> None:
    problems = [
        f"{relative(path)}:1: {lines} lines"
        for path in python_files("hf_dist", "tests", "examples")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    check(problems, f"No file over {MAX_FILE_LINES} lines: split it by noun.")


def test_functions_are_short() -> None:
    problems = [
        f"{at(path, node)}: {node.name} has {lines} lines"
        for path in python_files("hf_dist", "tests", "examples")
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    check(problems, f"No function over {MAX_FUNCTION_LINES} lines: name its parts.")


def of_training() -> list[Path]:
    """The files of the package without its tools."""
    return [path for path in python_files("hf_dist") if PACKAGE / "tools" not in path.parents]


@functools.cache
def called_kinds() -> frozenset[str]:
    """Names of types of what is called later: functions, and objects by a Protocol."""
    protocols = (
        kind.name
        for path in of_training()
        for kind in nodes(path)
        if isinstance(kind, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in kind.bases)
    )
    return frozenset({"Callable", *protocols})


def is_slot(node: ast.AnnAssign) -> bool:
    """Whether a class declares here, in itself or in a method, what is called later."""
    if not isinstance(node.target, ast.Attribute):
        return False
    return any(isinstance(part, ast.Name) and part.id in called_kinds() for part in ast.walk(node.annotation))


def test_parts_are_finished_when_they_are_made() -> None:
    files = of_training()
    slots = {n.target.attr: path for path in files for n in nodes(path) if isinstance(n, ast.AnnAssign) and is_slot(n)}  # type: ignore[union-attr]
    filled = {
        target.attr
        for path in files
        for node in nodes(path)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in {"self", "cls"}
        if slots.get(target.attr, path) != path
    }
    # Two objects that need each other; beside these, the engine, to which a model's `Listener` is connected.
    mutual = {"access", "reach", "continues"}
    check(sorted(filled ^ mutual), "Give a part in its constructor what it needs.")


def test_functions_take_few_parameters() -> None:
    problems = []
    for path in python_files("hf_dist", "examples"):
        for node in functions(path):
            names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
            count = len([name for name in names if name not in {"self", "cls"}])
            if count > MAX_PARAMETERS:
                problems.append(f"{at(path, node)}: {node.name} has {count} parameters")
    check(problems, f"No def with more than {MAX_PARAMETERS} parameters: some of them are one object.")


def test_calls_pass_few_arguments() -> None:
    problems = [
        f"{at(path, node)}: {ast.unparse(node.func)}(...) gets {count} arguments"
        for path in python_files("hf_dist", "examples")
        for node in nodes(path)
        if isinstance(node, ast.Call) and (count := len(node.args) + len(node.keywords)) > MAX_ARGUMENTS
    ]
    check(problems, f"No call with more than {MAX_ARGUMENTS} arguments: group what belongs together.")


# ---- docstrings and annotations


def test_everything_public_has_a_docstring() -> None:
    problems = []
    for path in python_files("hf_dist"):
        if ast.get_docstring(parse(path)) is None and path.read_text(encoding="utf-8").strip():
            problems.append(f"{relative(path)}:1: module")
        if any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(PACKAGE).parts):
            continue
        problems += [
            f"{at(path, node)}: {node.name}"
            for node, public in definitions(parse(path))
            if public and ast.get_docstring(node) is None and not is_overload(node)
        ]
    check(problems, "Say in one line what it is or returns, then the contract; or make it private.")


def is_overload(node: Function | ast.ClassDef) -> bool:
    """Overloads, property setters and overriding methods are documented where the name is first defined."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.split(".")[-1] in {"overload", "setter", "override"} for name in names)


def test_every_function_is_annotated() -> None:
    problems = []
    for path in python_files("hf_dist"):
        for node in functions(path):
            args = node.args
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]
            bare = [a.arg for a in every if a.annotation is None and a.arg not in {"self", "cls"}]
            bare += ["return"] if node.returns is None else []
            if bare:
                problems.append(f"{at(path, node)}: {node.name} lacks annotations for {', '.join(bare)}")
    check(problems, "Annotate every parameter and the return value.")


# ---- the repository


def repository_files() -> list[Path]:
    """Tracked files and new ones that git does not ignore; skips the test outside a git checkout."""
    if shutil.which("git") is None or not (REPO / ".git").exists():
        pytest.skip("needs a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := REPO / name).is_file()]


def test_no_file_is_called_utils() -> None:
    problems = [relative(path) for path in python_files("hf_dist", "tests", "examples") if path.stem == "utils"]
    check(problems, "Name the file after what is in it.")


def test_every_module_is_named_in_the_readme_of_its_folder() -> None:
    problems = []
    for path in python_files("hf_dist"):
        page = next(folder / "README.md" for folder in path.parents if (folder / "README.md").is_file())
        if not path.stem.startswith("__") and path.name not in page.read_text(encoding="utf-8"):
            problems.append(f"{relative(path)}: {relative(page)}")
    check(problems, "Say in that README, in one row, what is in the module.")


def test_top_level_holds_only_the_known_names() -> None:
    names = {path.relative_to(REPO).parts[0] for path in repository_files()}
    unknown = sorted(name for name in names - TOP_LEVEL if not name.startswith("."))
    check(unknown, f"The top level holds {sorted(TOP_LEVEL)} and dotfiles: move it, or have git ignore it.")


def test_no_folder_is_left_out_by_its_name(pytestconfig: pytest.Config) -> None:
    """pytest and ruff leave out folders by their names, in silence; by themselves every "dist"."""
    settings = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^exclude = (\[.*\])$", settings.partition("[tool.ruff]")[2], re.M)
    for key, left_out in (
        ("norecursedirs", pytestconfig.getini("norecursedirs")),
        ("exclude", ast.literal_eval(listed)),
    ):
        folders = {part for path in python_files("tests", "hf_dist") for part in path.parent.relative_to(REPO).parts}
        check([name for name in sorted(folders) if any(fnmatch(name, each) for each in left_out)], f"Change {key}.")


def test_no_file_names_a_path_of_one_machine() -> None:
    problems = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if found := MACHINE_PATH.search(line):
                problems.append(f"{relative(path)}:{number}: {found.group()}")
    check(problems, "Use a path relative to the file or the repository, an argument, or a temporary folder.")


# ---- the tests themselves


def test_time_outs_are_those_of_a_machine_that_has_time() -> None:
    """Whoever counts seconds of the clock fails when others use the processors."""
    problems = [
        f"{at(path, node)}: {ast.unparse(node)}"
        for path in python_files("tests")
        if relative(path) not in {"tests/processes.py", "tests/gpu/calls.py"}  # whoever lends a GPU counts minutes
        and not path.stem.startswith("bench_")
        and "/sweep/" not in relative(path)
        for node in nodes(path)
        if counts_the_clock(node)
    ]
    check(problems, "Use tests.processes.run, or hf_dist.dist.patience.Patience.")


def counts_the_clock(node: ast.AST) -> bool:
    """Whether a wait ends at a moment of the clock."""
    if isinstance(node, ast.Call) and any(keyword.arg == "timeout" for keyword in node.keywords):
        return re.fullmatch(r"subprocess\.\w+|\w+\.(communicate|wait)", ast.unparse(node.func)) is not None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return re.match(r"time\.(monotonic|time)\(\) \+", ast.unparse(node)) is not None
    return False


def test_ranks_that_fail_apart_are_brought_together() -> None:
    """A traceback kept by one rank while it goes on leaves the others in another job, until all of them are given up."""
    problems = [
        f"{at(path, node)}: {ast.unparse(node)}"
        for path in python_files("tests")
        if relative(path) not in {"tests/attempts.py", "tests/gpu_sim/server.py", "tests/sharding/loop.py"}
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "traceback.format_exc"
    ]
    check(problems, "Use tests.attempts.attempts.")
