"""The documentation site builds without a warning, loads nothing from other servers, and its search answers questions."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_dist
from hf_dist.config.rows import Status
from hf_dist.config.support import SUPPORT
from tests import needs, processes

needs.package("mkdocstrings", 'the extra "site"')

REPO = Path(__file__).resolve().parent.parent.parent
SITE = REPO / "examples" / "site"
with (Path(__file__).parent / "questions.tsv").open(encoding="utf-8", newline="") as file:
    QUESTIONS = [tuple(row) for row in csv.reader(file, delimiter="\t")][1:]
ANSWERS = 2
"""The page must be among the first so many pages that the search names."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site. A strict build ends with an error at the first warning."""
    folder = tmp_path_factory.mktemp("site")
    command = ["bash", str(SITE / "build.sh"), "--site-dir", str(folder)]
    done = processes.run(command, timeout=240, cwd=REPO, env={**os.environ, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Documentation built" in done.stderr, (
        "with --quiet mkdocs counts no warnings: a strict build would always pass"
    )
    return folder


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[str, str]:
    """Path in the site -> HTML of the page."""
    return {path.relative_to(built).as_posix(): path.read_text(encoding="utf-8") for path in built.rglob("*.html")}


@pytest.fixture(scope="module")
def answers(built: Path) -> dict[str, list[str]]:
    """Question -> pages in the order of the site's search, as a browser runs it: the site's scripts, the theme's worker."""
    asked = json.dumps([question for question, _ in QUESTIONS])
    done = processes.run(["node", str(Path(__file__).parent / "search.js"), str(built), asked], timeout=120, cwd=REPO)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {question: places for (question, _), places in zip(QUESTIONS, found, strict=True)}


@pytest.mark.skipif(shutil.which("node") is None, reason="the search of the site is JavaScript")
@pytest.mark.parametrize(("question", "page"), [pytest.param(*row, id=row[0]) for row in QUESTIONS])
def test_the_search_answers(answers: dict[str, list[str]], pages: dict[str, str], question: str, page: str) -> None:
    assert any(path.startswith(page) for path in pages), page
    first = list(dict.fromkeys(place.partition(".html")[0] for place in answers[question]))[:ANSWERS]
    assert any(answer.startswith(page) for answer in first), answers[question][:5]


def test_pages_load_nothing_from_another_server(pages: dict[str, str]) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*rel=\"?stylesheet[^>]*href=\"?(?:https?:)?//"
    )
    assert [path for path, text in pages.items() if loads.search(text)] == []


def test_links_and_anchors_lead_somewhere(built: Path, pages: dict[str, str]) -> None:
    ids = {path: set(re.findall(r'\sid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        article = re.search(r"<article.*?</article>", text, re.S)
        for target in re.findall(r'(?:href|src)="([^"]+)"', article[0] if article else ""):
            if re.match(r"\w+:", target):
                continue
            file, _, anchor = target.partition("#")
            at = ((built / path).parent / file).resolve().relative_to(built.resolve()).as_posix() if file else path
            if not (built / at).is_file() or (anchor and anchor not in ids[at]):
                broken.append((path, target))
    assert broken == []


def test_nothing_is_left_out(pages: dict[str, str]) -> None:
    """Public names, config keys with an effect, refused keys, headings of every file."""
    assert [name for name in hf_dist.__all__ if f"api/{name}.html" not in pages] == []
    keys = "".join(text for path, text in pages.items() if path.startswith("keys/"))
    assert [key for key, row in SUPPORT.items() if f"<code>{key}</code>" not in keys] == []
    refused = "".join(text for path, text in pages.items() if path.startswith("keys/refused"))
    assert [
        k for k, row in SUPPORT.items() if row.status is Status.REFUSED and f"<code>{k}</code>" not in refused
    ] == []


@cache
def module(name: str) -> Any:
    """A module of the builder."""
    sys.path.insert(0, str(SITE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SITE))


def test_the_reference_shows_what_users_call(pages: dict[str, str]) -> None:
    """Each member that `reference.MEMBERS` lists has its heading; none of those that hf_dist itself calls has."""
    reference = "".join(text for path, text in pages.items() if path.startswith("api/"))
    shown = set(re.findall(r'id="hf_dist\.(\w+\.\w+)"', reference))
    assert shown == {f"{name}.{member}" for name, members in module("reference").MEMBERS.items() for member in members}


LINE = st.text("abc def", min_size=1, max_size=300).map(lambda words: f"x{words}x")
BLOCK = st.one_of(
    LINE,
    LINE.map(lambda words: f"## {words}"),
    LINE.map(lambda words: f"### {words}"),
    st.lists(LINE, min_size=1, max_size=60).map(lambda items: "\n".join(f"* {item}" for item in items)),
    st.lists(LINE, min_size=1, max_size=120).map(
        lambda rows: "| a |\n|---|\n" + "\n".join(f"| {row} |" for row in rows)
    ),
    st.lists(LINE, min_size=1, max_size=40).map(lambda rows: "```\n" + "\n".join(rows) + "\n```"),
)


@given(st.lists(BLOCK, min_size=1, max_size=30))
def test_a_divided_file_keeps_its_words_on_pages_of_two_screens(found: list[str]) -> None:
    blocks, document = module("blocks"), module("document")
    text = "\n\n".join(["# Title", *found])
    made = document.pages("folder/FILE.md", text)
    words = re.findall(r"x[abc def]*x", re.sub(r"^#.*", "", text, flags=re.M))
    kept = re.findall(r"x[abc def]*x", re.sub(r"^#.*|^More of this.*", "", "\n".join(p.text for p in made), flags=re.M))
    assert kept == words
    assert len({page.path for page in made}) == len({page.title for page in made}) == len(made)
    assert all(blocks.height(blocks.blocks(page.text)) <= blocks.LONGEST for page in made)
