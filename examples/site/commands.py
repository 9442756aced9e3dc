"""Pages of the commands, from the program that reads their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from document import Page, pages

from hf_dist.tools.cli import app


def command_pages() -> list[Page]:
    """A page for each command of `hf-dist`, and one that lists them."""
    found = sorted(_commands(typer.main.get_command(app), "hf-dist"))
    rows = [f"| [`{name}`]({_file(name)}) | {_cell(command.help.split(chr(10))[0])} |" for name, command in found]
    index = "# Commands\n\n| command | what it does |\n|---|---|\n" + "\n".join(rows)
    each = [page for name, command in found for page in pages(f"commands/{_file(name)}", _page(name, command))]
    return [*pages("commands/README.md", index), *each]


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield name, command
    for word, child in children.items():
        yield from _commands(child, f"{name} {word}")


def _file(name: str) -> str:
    return f"{name.removeprefix('hf-dist ').replace(' ', '-')}.md"


def _page(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)]).replace("{", "").replace("}", "")
    text = f"# {name}\n\n{command.help}\n\n```\n{usage}\n```\n\n"
    records = [record for param in command.params if (record := param.get_help_record(context))]
    if records:
        rows = [f"| `{_cell(option)}` | {_cell(words)} |" for option, words in records]
        text += "| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    return text


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", "\\|"))
