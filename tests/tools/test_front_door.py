"""What every command answers to: its help, the version, and the shell's completion."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hf_dist.tools.cli import app
from hf_dist.version import __version__
from tests.tools.test_written import commands

NAMES = [name.replace("_", "-") for name, _ in commands(app)]


@pytest.mark.parametrize("name", ["", "config", "checkpoint", *NAMES])
def test_every_command_has_a_short_name_for_its_help(name: str) -> None:
    short, long = (CliRunner().invoke(app, [*name.split(), option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0 and short.output == long.output
    assert "Usage" in short.output and f"hf-dist {name}".strip() in short.output


def test_the_version_is_printed_alone() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and done.output == f"hf-dist {__version__}\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [("hf-dist conf", {"config"}), ("hf-dist config ch", {"check"}), ("hf-dist plan --sugg", {"--suggest"})],
)
def test_the_shell_completes_commands_and_options(line: str, found: set[str]) -> None:
    words = {"_HF_DIST_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = CliRunner().invoke(app, [], env=words, prog_name="hf-dist")
    assert set(done.output.split()) == found
    offered = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert "--install-completion" in offered
