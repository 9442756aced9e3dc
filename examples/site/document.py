"""A Markdown file as pages of the site, each at most two screens: the file is divided at its headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from blocks import LONGEST, Block, blocks, height, joined, shown
from pymdownx.slugs import slugify

_slug = slugify(case="lower")
ROOM = LONGEST - 6
"""Lines of a page without its heading, and without the list of the pages that follow on the first of them."""
DEEPEST = 4
"""Level of the deepest headings in files."""
NAMED = 3
"""Most sections that the title of a page names."""


@dataclass(frozen=True)
class Page:
    """One page."""

    path: str
    """In the site, as `guides/layout.md`. Pages of a file lie in the folder of that file, so that its links keep their form."""
    title: str
    """In the navigation."""
    text: str
    anchors: tuple[str, ...] = ()
    """Ids of the headings on it."""
    source: str = ""
    """The file it comes from; empty for a page that is generated."""


@dataclass(frozen=True)
class _Part:
    headings: tuple[str, ...]
    """Words of the headings of its sections; empty for what stands before the first heading."""
    held: tuple[Block, ...]

    @property
    def height(self) -> float:
        return height(list(self.held))


def slug(title: str) -> str:
    """The id of a heading, as on GitHub."""
    return str(_slug(shown(title), "-"))


def pages(source: str, text: str) -> list[Page]:
    """The pages of one file, in order. The first has the path of the file."""
    found = blocks(text)
    assert found and found[0].level == 1, f"{source}: the first line is not a heading of level 1"
    name = shown(found[0].title)
    parts = list(_packed(_divided(_sections(found[1:], 2), 2)))
    if len(parts) == 1:
        return [_page(source, name, [found[0], *parts[0].held], source)]
    result = [_page(source, name, [found[0], *parts[0].held], source)]
    titles = {name}
    for part in parts[1:]:
        title = _unused(f"{name}: {_listed(part.headings)}" if part.headings else f"{name}, continued", titles)
        path = _path(source, _short(title, name))
        result.append(_page(path, title, [*_headed(part, title)], source))
    rest = ", ".join(f"[{_short(each.title, name)}]({PurePosixPath(each.path).name})" for each in result[1:])
    result[0] = replace(result[0], text=f"{result[0].text}\nMore of this: {rest}.\n")
    return result


def _short(title: str, name: str) -> str:
    return title.removeprefix(name).lstrip(":, ")


def _listed(headings: tuple[str, ...]) -> str:
    """The first headings of a page that holds several sections."""
    words = ", ".join(shown(heading) for heading in headings[:NAMED])
    return words if len(headings) <= NAMED else f"{words} …"


def _unused(title: str, titles: set[str]) -> str:
    found = next(each for each in (title, *(f"{title} ({n})" for n in range(2, 100))) if each not in titles)
    titles.add(found)
    return found


def _headed(part: _Part, title: str) -> Iterator[Block]:
    """The blocks of a part, under a heading of level 1 that keeps the anchor of the one heading that it replaces."""
    first, *rest = part.held
    if first.level and len(part.headings) == 1:
        yield Block("heading", f"# {title} {{#{slug(first.title)}}}")
        yield from rest
    else:
        yield Block("heading", f"# {title}")
        yield from part.held


def _page(path: str, title: str, held: list[Block], source: str) -> Page:
    anchors = tuple(_anchor(block) for block in held if block.level)
    return Page(path, title, joined(held), anchors, source)


def _anchor(heading: Block) -> str:
    named = re.search(r"\{#([^}]+)\}$", heading.text)
    return named[1] if named else slug(heading.title)


def _path(source: str, words: str) -> str:
    at = PurePosixPath(source)
    return str(at.with_name(f"{at.stem.lower()}-{slug(words).strip('-')}.md"))


def _sections(found: list[Block], level: int) -> list[list[Block]]:
    """Blocks, cut before each heading of `level`."""
    result: list[list[Block]] = [[]]
    for block in found:
        if block.level == level:
            result.append([])
        result[-1].append(block)
    return [section for section in result if section]


def _divided(sections: list[list[Block]], level: int) -> Iterator[_Part]:
    """Sections that fit on a page: one that does not is cut at its own headings, then between blocks and rows."""
    for section in sections:
        headings = (section[0].title,) if section[0].level else ()
        if height(section) <= ROOM:
            yield _Part(headings, tuple(section))
        elif level < DEEPEST:
            yield from (
                replace(part, headings=part.headings or headings)
                for part in _divided(_sections(section, level + 1), level + 1)
            )
        else:
            yield from _cut(headings, section)


def _cut(headings: tuple[str, ...], section: list[Block]) -> Iterator[_Part]:
    held: list[Block] = []
    for block in (piece for each in section for piece in _rows(each)):
        if held and height([*held, block]) > ROOM:
            yield _Part(headings, tuple(held))
            held = []
        held.append(block)
    if held:
        yield _Part(headings, tuple(held))


def _rows(block: Block) -> Iterator[Block]:
    """A long table as tables of half a page, each with the head of the first; a long list as its items."""
    lines = block.text.splitlines()
    if block.height <= LONGEST / 2 or block.kind not in ("table", "text"):
        yield block
        return
    if block.kind == "text":
        yield from (Block("text", item) for item in re.split(r"\n(?=[*-] |\d+\. )", block.text))
        return
    head, rows = lines[:2], lines[2:]
    held: list[str] = []
    for row in rows:
        if held and Block("table", "\n".join([*head, *held, row])).height > LONGEST / 2:
            yield Block("table", "\n".join([*head, *held]))
            held = []
        held.append(row)
    yield Block("table", "\n".join([*head, *held]))


def _packed(parts: Iterator[_Part]) -> Iterator[_Part]:
    """Neighbours that fit on one page together."""
    held: _Part | None = None
    for part in parts:
        if held is not None and held.height + part.height <= ROOM:
            headings = tuple(dict.fromkeys((*held.headings, *part.headings)))
            held = _Part(headings, (*held.held, *part.held))
            continue
        if held is not None:
            yield held
        held = part
    if held is not None:
        yield held
