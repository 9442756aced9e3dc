"""Pages of the public names: mkdocstrings fills them from docstrings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from blocks import LONGEST, SCREEN
from document import Page

import hf_dist

MEMBER = 5
"""Lines of a member's name and signature."""


def reference_pages(collect: Callable[[str], Any]) -> list[Page]:
    """A page for each name of `hf_dist.__all__`, and one that lists them. `collect`: gives griffe's object of a path."""
    found = {name: collect(f"hf_dist.{name}") for name in hf_dist.__all__}
    rows = [f"| [`{name}`]({name}.md) | {_first_sentence(thing)} |" for name, thing in found.items()]
    index = "# API\n\nWhat `import hf_dist` offers.\n\n| name | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"
    each = [page for name, thing in found.items() for page in _pages(name, thing)]
    return [Page("api/README.md", "API", index), *each]


def _pages(name: str, thing: Any) -> Iterator[Page]:
    """One page, or as many as the members of a class need."""
    groups = list(_groups(thing)) if thing.is_class else [[]]
    for number, members in enumerate(groups):
        title = name if number == 0 else f"{name}: {members[0]} to {members[-1]}"
        path = f"api/{name}.md" if number == 0 else f"api/{name}-{number + 1}.md"
        options = f"      members: {members or 'false'}\n" if thing.is_class else ""
        if number:
            options += "      show_docstring_description: false\n"
        yield Page(
            path, title, f"# {title}\n\n::: hf_dist.{name}\n    options:\n      show_root_heading: false\n{options}"
        )


def _groups(thing: Any) -> Iterator[list[str]]:
    """Public members of a class of ours, page by page."""
    held, used = list[str](), _height(thing) + MEMBER
    for name, member in sorted(thing.all_members.items()):
        if (
            name.startswith("_")
            or not member.has_docstring
            or (member.is_attribute and "property" not in member.labels)
        ):
            continue
        if held and used + _height(member) + MEMBER > LONGEST - SCREEN / 4:
            yield held
            held, used = [], MEMBER
        held.append(name)
        used += _height(member) + MEMBER
    yield held


def _height(thing: Any) -> int:
    return len(thing.docstring.value.splitlines()) if thing.docstring else 0


def _first_sentence(thing: Any) -> str:
    text = thing.docstring.value.split("\n\n")[0].replace("\n", " ") if thing.docstring else ""
    return text.replace("|", "\\|")
