"""What the pages claim is true: outputs are those of their commands, figures are in the cited run, blocks have a language."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from hf_dist.config.schema import fields
from tests.config import test_corpus
from tests.covering import FULL_GRID_ONLY
from tests.docs import outputs
from tests.docs.test_guides import COMMANDED, REPO, said

READERS = COMMANDED
LANGUAGES = {"bash", "console", "diff", "json", "python", "text", "yaml"}
CONSOLE = [pytest.param(*block, id=f"{block[0].stem}-{n}") for n, block in enumerate(outputs.blocks())]
VARIES = "|".join(
    [
        *(r"\d[\d,.-]*(?: s)?", r"\bgpu-\S+", r"\bmodel\.\S+", r"\.\.\.", ">", r"\bpid\b", r"\bof rank\b", r"\brank\b"),
        *("waits for", " in:", "data loader", "collate", "training step", "forward"),
    ]
)
"""What is between the words of a report."""
RESULTS = (REPO / "hf_dist" / "sharding" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in READERS])
def test_every_block_has_a_language_that_a_test_knows(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.M)
    assert set(fences[::2]) <= LANGUAGES and set(fences[1::2]) <= {""}


@pytest.mark.parametrize(("page", "command", "lines"), CONSOLE)
def test_an_output_is_that_of_its_command(page: Path, command: str, lines: list[str]) -> None:
    """`python -m tests.docs.outputs` has run it; every line is there, in this order."""
    kept = outputs.file_of(command)
    assert kept.exists(), f"python -m tests.docs.outputs ({command})"
    first, *said_lines = kept.read_text(encoding="utf-8").splitlines()
    assert first == f"$ {command}"
    position = 0
    for line in (line.rstrip() for line in lines if line.strip() not in ("", "...")):
        wanted = line.removesuffix("...")
        found = [
            n
            for n, text in enumerate(said_lines)
            if n >= position and (text == line or (line != wanted and text.startswith(wanted)))
        ]
        assert found, f"{page.name}: {line!r} is not printed by {command}, or earlier"
        position = found[0] + 1


@FULL_GRID_ONLY  # the commands take minutes
@pytest.mark.parametrize("command", sorted({command for _, command, _ in outputs.blocks()}))
def test_a_command_still_prints_its_output(command: str) -> None:
    """Digits apart: they are those of the machine."""
    _, kept = outputs.file_of(command).read_text(encoding="utf-8").split("\n", 1)
    digits = re.compile(r"[\d.e+-]+")
    assert digits.sub("#", outputs.output_of(command)) == digits.sub("#", kept)


def test_every_kept_output_is_on_a_page() -> None:
    assert sorted(outputs.FOLDER.glob("*.txt")) == sorted(
        {outputs.file_of(command) for _, command, _ in outputs.blocks()}
    )


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in READERS])
def test_reports_without_a_command_are_made_of_what_is_said(page: Path) -> None:
    """`text` blocks: what a job prints that nobody can repeat, such as a hang. Words around names and numbers are ours."""
    for block in re.findall(r"^```text\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.splitlines():
            parts = re.split(VARIES, line)
            phrases = [part.strip(" ():,") for part in parts]
            assert all(phrase in said() for phrase in phrases if len(phrase) > 3), (line, phrases)


@pytest.mark.parametrize("text", re.findall(r"^```diff\n(.*?)^```", (REPO / "README.md").read_text(), re.M | re.S))
def test_both_sides_of_a_difference_are_python(text: str) -> None:
    for sign in "+-":
        compile(
            textwrap.dedent("\n".join(line[1:] for line in text.splitlines() if line[:1] in (sign, " "))),
            "diff",
            "exec",
        )


def table_rows(text: str) -> list[list[str]]:
    """Cells of the rows of the Markdown tables in it."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


def test_the_table_of_speed_has_the_ratios_of_the_cited_run() -> None:
    section = (REPO / "README.md").read_text().split("## Speed and memory")[1].split("\n## ")[0]
    assert "hf_dist/sharding/RESULTS.md#whole-steps-fp32" in section
    run = RESULTS.split("## Whole steps, fp32")[1].split("\n## ")[0].split("The same machine and method in bf16")[0]
    measured, workload, ours = {}, "", ""
    for cells in table_rows(run):
        if len(cells) == 7 and cells[0] != "":
            workload = cells[0]
        ours = cells[1] if len(cells) == 7 and cells[1] else ours
        if len(cells) == 7:
            measured[workload, ours, cells[3]] = (cells[5], cells[6])
    models = {"26M": "w1", "124M": "w2"}
    rows = [row for row in table_rows(section) if row[0].startswith("ZeRO")]
    assert len(rows) == 5
    for first, peers, ratios, peaks in rows:
        engine, _, size = first.partition(", ")
        for peer, ratio, peak in zip(*(cell.split("; ") for cell in (peers, ratios, peaks)), strict=True):
            found, memory = measured[models[size.split()[0]], engine, peer]
            own, other = map(int, memory.split(" / "))
            assert found.split(" ")[0] == ratio and f"{own / other:.2f}" == peak, (first, peer)


def test_the_table_of_experts_is_in_the_cited_run() -> None:
    page = (REPO / "examples/guides/experts.md").read_text()
    run = (REPO / "hf_dist/parallel/experts/RESULTS.md").read_text()
    figures = re.findall(r"\d\.\d\d \(\d\.\d\d, \d\.\d\d\)", page)
    assert len(figures) == 11 and "hf_dist/parallel/experts/RESULTS.md" in page
    assert [figure for figure in figures if figure not in run] == []


def test_two_pages_count_the_public_files_alike() -> None:
    readme = (REPO / "hf_dist/config/README.md").read_text()
    guide = (REPO / "examples/guides/deepspeed.md").read_text()
    (counts,) = re.findall(
        r"Of the (\d+)\n.*?, (\d+) load, (\d+) use features out of scope.*?\n(\d+) contain a mistake", readme, re.S
    )
    (told,) = re.findall(
        r"Of (\d+) public files (\d+) load unchanged, (\d+) ask .*?, and (\d+) contain a mistake", guide
    )
    assert counts == told
    if test_corpus.FILES:
        kinds = [test_corpus.kind_of(outcome) for outcome in test_corpus.outcomes().values()]
        names = ("loads", "out of scope", "mistake in the file")
        assert told == (str(len(kinds)), *(str(kinds.count(name)) for name in names))


def test_the_ranks_of_a_page_are_those_of_its_file() -> None:
    page = (REPO / "examples/guides/long_context.md").read_text()
    own = json.loads(re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)[0])["sequence_parallel_size"]
    file = json.loads((REPO / "configs/long_context.json").read_text())["sequence_parallel_size"]
    assert own == file == int(re.findall(r"--nproc_per_node (\d+) examples/long_text.py", page)[0])


@pytest.mark.parametrize("path", fields())
def test_the_sentence_of_a_field_begins_with_its_path(path: str) -> None:
    sentence = fields()[path].description or ""
    assert sentence.startswith(f"`{path}`: ") and sentence.endswith("."), sentence
