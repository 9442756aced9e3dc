"""Gathers the pages of the site and tells mkdocs about them. Nothing of it is kept in git."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from blocks import LONGEST, blocks, height
from commands import command_pages
from document import Page, pages
from keys import key_pages
from links import Links
from mkdocs.structure.files import File
from reference import reference_pages

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = {"examples/guides/": 4, "commands/": 3, "keys/": 3, "api/": 0.5}
"""Start of a path -> how much its pages count in the search: what tells how to do something before what tells how it works."""
log = logging.getLogger("mkdocs.hf_dist")


def on_files(files: Any, config: Any) -> Any:
    """Adds every page and picture, and the order of the pages in the navigation. A warning of ours ends a strict build."""
    handler = config.plugins["mkdocstrings"].get_handler("python")
    generated = {
        "commands/": command_pages(),
        "keys/": key_pages(),
        "api/": reference_pages(lambda path: handler.collect(path, handler.get_options({}))),
    }
    gathered = {source: pages(source, (ROOT / source).read_text("utf-8")) for source in _sources(config.nav)}
    every = [page for group in (*gathered.values(), *generated.values()) for page in group]
    links = Links.between(every, ROOT, config.repo_url or _repository())
    for page in every:
        files.append(File.generated(config, page.path, content=_weighed(page) + links.rewritten(page)))
        if page.path.partition("/")[0] != "api" and height(blocks(page.text)) > LONGEST:
            log.warning("%s is longer than two screens: %.0f lines", page.path, height(blocks(page.text)))
    for picture in sorted(links.pictures):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    for target in links.broken:
        log.warning("a link leads nowhere: %s", target)
    for guide in sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples/guides").glob("*.md")):
        if guide not in gathered:
            log.warning("%s has no place in the navigation: add it to nav in examples/site/mkdocs.yml", guide)
    config.nav = _navigation(config.nav, gathered, generated)
    return files


def _weighed(page: Page) -> str:
    """What the search multiplies the page's score with, as mkdocs-material reads it."""
    weight = next((weight for start, weight in WEIGHTS.items() if page.path.startswith(start)), 1)
    return f"---\nsearch:\n  boost: {weight}\n---\n\n"


def _repository() -> str:
    """Address of the code, from the package's metadata."""
    try:
        named = metadata("hf-dist").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    address = dict(line.split(", ", 1) for line in named)
    return next((address[name].rstrip("/") for name in ("Repository", "Source", "Homepage") if name in address), "")


def _sources(nav: Any) -> Iterator[str]:
    """Files of the repository that the navigation names."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from _sources(value)
            elif value.endswith(".md"):
                yield value


def _navigation(nav: Any, gathered: dict[str, list[Page]], generated: dict[str, list[Page]]) -> list[Any]:
    """The navigation of mkdocs.yml with pages in the place of files and kinds."""
    result: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            result.append(_entry(gathered[entry]))
            continue
        ((title, value),) = entry.items()
        if isinstance(value, list):
            result.append({title: _navigation(value, gathered, generated)})
        else:
            result.append({title: _grouped(generated[value])})
    return result


def _entry(group: list[Page]) -> Any:
    """A file's page, or its pages under its title."""
    if len(group) == 1:
        return {group[0].title: group[0].path}
    name = group[0].title
    return {name: [{page.title.removeprefix(f"{name}: "): page.path} for page in group]}


def _grouped(group: list[Page]) -> list[Any]:
    """Pages with those that continue them."""
    by_source: defaultdict[str, list[Page]] = defaultdict(list)
    for page in group:
        by_source[page.source or re.sub(r"-\d+\.md$", ".md", page.path)].append(page)
    return [_entry(pages_) for pages_ in by_source.values()]
