"""Pages for users: links lead somewhere, blocks can be typed, quoted messages exist, lines are short."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from transformers import Trainer
from typer.testing import CliRunner

from hf_dist.config import read_config
from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.hf.trainer import DistTrainerMixin
from hf_dist.tools.cli import app

REPO = Path(__file__).resolve().parent.parent.parent
GUIDES = sorted((REPO / "examples" / "guides").glob("*.md"))
FOR_USERS = [REPO / "README.md", *GUIDES]
COMMANDED = [*FOR_USERS, REPO / "examples" / "README.md"]
"""Pages whose blocks are tried."""
WIDTH = 160
FRONT_PAGE = 130
LONGEST_SENTENCE = 40
"""Words; most have fewer than twenty."""
FOLDER = REPO / "examples" / "guides" / "pictures"
PICTURES = {
    "schedule.svg": "schedule --schedule zb_h1 --stages 4 --microbatches 8",
    "mesh.svg": "mesh --config configs/tp_pp.json --ranks 16",
    "roles.svg": "mesh --config configs/roles.json --ranks 4",
}
"""Picture -> the arguments of `hf-dist` that draw it."""
YOURS = {"train.py", "train_grpo.py", "no_trainer.py", "reward.py", "evaluate.py"}
"""Scripts of the reader's own."""


def pages() -> list[Path]:
    """Every page that a person writes; tables of sweeps are written by programs."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=REPO, capture_output=True, text=True, check=False).stdout
    found = [REPO / line for line in listed.splitlines()] or list(REPO.glob("hf_dist/**/*.md"))
    return [page for page in found if page.parent.name != "sweep" and page.exists()]


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, text) of the fenced blocks in `language`."""
    return [
        (f"{page.name}-{number}", text)
        for page in COMMANDED
        for number, text in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S))
    ]


def commands() -> list[tuple[str, list[str]]]:
    """The commands of all shell blocks, without variables in front, comments, and continued lines joined."""
    found = []
    for where, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                found.append((where, words))
    return found


COMMANDS = commands()


def of(program: str) -> list[object]:
    """Cases of one program."""
    return [pytest.param(words, id=where) for where, words in COMMANDS if words[0] == program]


def check_script(words: list[str]) -> None:
    """A script of ours exists, and so do its configs."""
    if words[:1] == ["-m"] and words[1] == "hf_dist.run":
        words = words[2:]
    scripts = [word for word in words if word.endswith(".py")]
    for script in scripts:
        assert script in YOURS or (REPO / script).is_file(), script
    for config in (word for word in words if word.startswith("configs/")):
        assert (REPO / config).is_file(), config


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(REPO))) for page in pages()])
def test_links_lead_to_files(page: Path) -> None:
    """Links inside of the project, those with an anchor too."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://|mailto:", target) and not target.startswith("#"):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(REPO))) for page in pages()])
def test_lines_are_short(page: Path) -> None:
    """Tables, too."""
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in FOR_USERS])
def test_sentences_are_short(page: Path) -> None:
    """Prose and bullets; no tables, no blocks."""
    text = re.sub(r"^```.*?^```|^\|.*?$|^#.*?$", "\n\n", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "code", text)
    sentences = re.split(r"[.!?:;](?:\*\*)?\s|\n\s*\n|\n\s*[*-] ", text)
    assert [" ".join(words) for sentence in sentences if len(words := sentence.split()) > LONGEST_SENTENCE] == []


def test_the_front_page_is_short_and_names_every_guide() -> None:
    text = (REPO / "README.md").read_text()
    assert len(text.splitlines()) <= FRONT_PAGE
    assert [page.name for page in GUIDES if f"(examples/guides/{page.name})" not in text] == []


@pytest.mark.parametrize("text", [pytest.param(text, id=where) for where, text in blocks("json")])
def test_configs_are_read_without_a_problem(text: str) -> None:
    read_config(json.loads(text))


@pytest.mark.parametrize("text", [pytest.param(text, id=where) for where, text in blocks("python")])
def test_python_is_python(text: str) -> None:
    compile(text, "guide", "exec")


@pytest.mark.parametrize("words", of("hf-dist"))
def test_our_commands_take_these_options(words: list[str]) -> None:
    command = typer.main.get_command(app)
    context = None
    words = words[1:]
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(command.name, list(words))
    context.close()
    check_script(words)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_commands_draw(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    done = CliRunner().invoke(app, [*PICTURES[name].split(), "--output", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / name).read_text(encoding="utf-8") == (FOLDER / name).read_text(encoding="utf-8")


def test_pictures_are_small() -> None:
    assert [
        path.name for path in REPO.glob("**/pictures/*") if path.stat().st_size > 200_000 or path.suffix != ".svg"
    ] == []


@pytest.mark.parametrize("words", of("torchrun"))
def test_torchrun_takes_these_options(words: list[str]) -> None:
    asked = get_args_parser().parse_args(words[1:])
    module = ["-m"] if asked.module else []
    check_script([*module, asked.training_script, *asked.training_script_args])


@pytest.mark.parametrize("words", of("accelerate"))
def test_accelerate_takes_these_options(words: list[str]) -> None:
    asked = launch_command_parser().parse_args(words[2:])
    module = ["-m"] if asked.module else []
    check_script([*module, asked.training_script, *asked.training_script_args])


def test_every_command_is_of_a_known_program() -> None:
    known = {
        "hf-dist",
        "torchrun",
        "accelerate",
        "bash",
        "docker",
        "export",
        "git",
        "hf",
        "pip",
        "python",
        "srun",
        "sbatch",
        "mpirun",
        "kubectl",
        "sky",
    }
    assert {words[0] for _, words in COMMANDS} <= known
    for _, words in COMMANDS:
        if words[0] in ("bash", "python"):
            assert words[1] == "-m" or (REPO / words[1]).is_file(), words


def texts() -> Iterator[str]:
    """Every string of the package, with `...` for what is put in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
        return ""

    for path in sorted((REPO / "hf_dist").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                yield text(node)


@cache
def said() -> str:
    """All of them."""
    return "\n".join(texts())


def quoted_messages() -> list[str]:
    """First cells of the tables about messages."""
    page = (REPO / "examples" / "guides" / "troubleshooting.md").read_text().split("## No message")[0]
    return re.findall(r"^\| `([^`]+)` \|", page, re.M)


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_are_said(message: str) -> None:
    assert len(quoted_messages()) > 20
    assert all(part.strip(" :") in said() for part in message.split("...") if part.strip(" :")), message


@pytest.mark.parametrize(
    ("ours", "theirs", "page"),
    [(DistTrainerMixin, Trainer, "trainer.py"), (DistAccelerator, Accelerator, "accelerator.py")],
)
def test_the_number_of_overridden_methods_is_told(ours: type, theirs: type, page: str) -> None:
    own = [cls for cls in ours.__mro__ if cls.__module__.startswith("hf_dist.")]
    stock = {name for cls in theirs.__mro__[:-1] for name in vars(cls)}
    methods = {
        name
        for cls in own
        for name, value in vars(cls).items()
        if name in stock
        and (callable(value) or isinstance(value, property))
        and (name == "__init__" or name[:2] != "__")
    }
    (line,) = [
        row for row in (REPO / "hf_dist/hf/README.md").read_text().splitlines() if row.startswith(f"| `{page}` |")
    ]
    assert f"overrides {len(methods)} methods" in line
