"""Links of a page, made to lead from its place in the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from document import Page

_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)")
PICTURES = (".svg", ".png")


@dataclass
class Links:
    """Where the files of the repository are in the site."""

    root: Path
    repository: str
    """Address of the repository, without a slash at its end; empty if the package names none: then only the words are shown."""
    pages: Mapping[str, Page]
    """Path in the repository -> the first page made of it; path in the site -> the page."""
    anchors: Mapping[tuple[str, str], Page]
    """(path in the repository, id of a heading) -> the page with that heading."""
    pictures: set[str] = field(default_factory=set)
    """Paths in the repository of pictures that pages show."""
    broken: list[str] = field(default_factory=list)

    @classmethod
    def between(cls, pages: Iterable[Page], root: Path, repository: str) -> Links:
        """Links between these pages."""
        first: dict[str, Page] = {}
        anchors: dict[tuple[str, str], Page] = {}
        for page in pages:
            first.setdefault(page.source, page)
            first[page.path] = page
            for anchor in page.anchors:
                anchors.setdefault((page.source or page.path, anchor), page)
        return cls(root, repository, first, anchors)

    def rewritten(self, page: Page) -> str:
        """The text of a page with links that lead somewhere."""
        parts = _CODE.split(_held_code(page.text))
        words = (
            part if index % 2 else _LINK.sub(lambda m: self._link(page, m), part) for index, part in enumerate(parts)
        )
        return _freed_code("".join(words))

    def _link(self, page: Page, match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if re.match(r"\w+:", target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = page.source or page.path
        at = posixpath.normpath(posixpath.join(posixpath.dirname(file), path)) if path else file
        if f"{at}/README.md" in self.pages:
            at = f"{at}/README.md"
        if at in self.pages:
            return f"[{words}]({self._to(page, at, anchor)})"
        if mark and at.endswith(PICTURES):
            self.pictures.add(at)
            return f"![{words}]({target})"
        if not (self.root / at).exists():
            self.broken.append(f"{file}: {target}")
        kind = "tree" if (self.root / at).is_dir() else "blob"
        return f"[{words}]({self.repository}/{kind}/main/{at})" if self.repository else words

    def _to(self, page: Page, at: str, anchor: str) -> str:
        if not anchor:
            place = self.pages[at]
        elif (at, anchor) in self.anchors:
            place = self.anchors[at, anchor]
        else:
            self.broken.append(f"{page.source or page.path}: {at}#{anchor}")
            place = self.pages[at]
        relative = posixpath.relpath(place.path, PurePosixPath(page.path).parent)
        return f"{relative}#{anchor}" if anchor and f"{{#{anchor}}}" not in place.text.partition("\n")[0] else relative


def _held_code(text: str) -> str:
    """Code as the words of a link, kept from the search for code."""
    return re.sub(r"\[`([^`\]]+)`\]", "[\0\\1\0]", text)


def _freed_code(text: str) -> str:
    return text.replace("\0", "`")
