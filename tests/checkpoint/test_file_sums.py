"""Digests of a checkpoint's files: taken in whatever pieces ranks write, wrong after any flipped bit, checked by every load."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_dist.checkpoint import file_sums, folder
from hf_dist.checkpoint.file_sums import BLOCK, FileSums, damaged_files, digest_of
from hf_dist.checkpoint.verify import verify
from hf_dist.errors import CheckpointError
from hf_dist.tools.cli import app
from tests.checkpoint.digests import load_damaged, save
from tests.harness import run_ranks

LENGTHS = st.one_of(
    st.integers(0, 40), st.integers(BLOCK - 9, BLOCK + 9), st.integers(0, 3 * BLOCK), st.just(2 * BLOCK)
)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def content(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@some
@given(LENGTHS, st.integers(0, 1 << 30))
def test_pieces_in_any_order_add_up_to_the_whole(tmp_path: Path, nbytes: int, seed: int) -> None:
    data, chance = content(nbytes, seed), random.Random(seed)
    (tmp_path / "file").write_bytes(data)
    edges = sorted({0, nbytes, *(chance.randrange(nbytes + 1) for _ in range(chance.randrange(6)))})
    pieces = list(itertools.pairwise(edges))
    chance.shuffle(pieces)
    opened, grown = FileSums(), FileSums()
    opened.open("f", nbytes)
    for start, end in pieces:
        opened.add("f", start, data[start:end])
        with grown.beside("f", start, data[start:end]):
            pass
    if not pieces:
        grown.add("f", 0, b"")
    assert opened.digests()["f"] == grown.digests()["f"] == digest_of(tmp_path / "file")


@some
@given(LENGTHS.filter(bool), st.integers(0, 1 << 30))
def test_a_flipped_bit_another_length_and_another_place_are_seen(tmp_path: Path, nbytes: int, seed: int) -> None:
    path, data, chance = tmp_path / "file", bytearray(content(nbytes, seed)), random.Random(seed)
    path.write_bytes(data)
    wanted = {"file": (nbytes, digest_of(path))}
    assert damaged_files(tmp_path, wanted) == []
    data[chance.randrange(nbytes)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    assert damaged_files(tmp_path, wanted) == ["file"]
    path.write_bytes(content(nbytes, seed)[:-1])
    assert damaged_files(tmp_path, wanted) == ["file"]
    if nbytes >= 2 * BLOCK:
        path.write_bytes(content(nbytes, seed)[BLOCK : 2 * BLOCK] + content(nbytes, seed)[:BLOCK] + data[2 * BLOCK :])
        assert damaged_files(tmp_path, wanted) == ["file"]
    path.unlink()
    assert damaged_files(tmp_path, wanted) == ["file"]


def test_large_pieces_are_added_up_in_a_thread_and_files_in_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(5 * BLOCK + 3)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(file_sums, "_BESIDE", 100)
    monkeypatch.setattr(file_sums, "_READ", BLOCK)
    monkeypatch.setattr(file_sums, "_SHARE", 2 * BLOCK)
    sums, seen = FileSums(), []
    with sums.beside("file", 0, data):
        pass
    sums.close()
    digest = sums.digests()["file"]
    assert digest == digest_of(tmp_path / "file")
    assert damaged_files(tmp_path, {"file": (len(data), digest)}, seen=seen.append) == []
    assert seen == [2 * BLOCK, 2 * BLOCK, BLOCK + 3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks at stage 3, with the names of the files that were read back for their digests."""
    root = tmp_path_factory.mktemp("saved")
    read = run_ranks(save, 2, (str(root),))[0]
    (root / "read.json").write_text(json.dumps(read))
    return root / "checkpoint-1"


def test_digests_are_taken_as_files_are_written(saved: Path) -> None:
    written, read = folder.written(saved), json.loads((saved.parent / "read.json").read_text())
    everything = {str(p.relative_to(saved)) for p in saved.rglob("*") if p.is_file()} - {folder.MANIFEST}
    files = {name for name in everything if not folder.is_text(name)}
    assert written.keys() == files and "config.json" in everything - files
    assert json.loads((saved / folder.MANIFEST).read_text())["files"].keys() == everything
    assert written == {name: ((saved / name).stat().st_size, digest_of(saved / name)) for name in files}
    large = {name for name in files if name.endswith((".safetensors", ".distcp"))}
    assert len(large) == 3  # weights that both ranks write, and the state of each rank
    assert large.isdisjoint(read)


def flip(path: Path, seed: int) -> None:
    """One bit."""
    data, chance = bytearray(path.read_bytes()), random.Random(seed)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def test_no_load_takes_a_file_with_a_flipped_bit(saved: Path, tmp_path: Path) -> None:
    names = [*sorted(folder.written(saved)), folder.MANIFEST]
    copies = []
    for number, name in enumerate(names):
        copies.append(str(shutil.copytree(saved, tmp_path / f"checkpoint-{number}")))
        flip(Path(copies[-1]) / name, number)
    for rank in run_ranks(load_damaged, 2, (copies, str(saved))):
        for name, said in zip(names, rank["refused"], strict=True):
            assert name in said, said
        assert rank["whole"] == ""
        assert rank["unverified"] == "", "checkpoint.verify false loads it"


def test_the_command_names_what_is_damaged(saved: Path, tmp_path: Path) -> None:
    for number in (9, 10):
        shutil.copytree(saved, tmp_path / f"checkpoint-{number}")
    whole = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path)])
    assert whole.exit_code == 0 and whole.output.count("whole") == 2
    assert whole.output.index("checkpoint-9") < whole.output.index("checkpoint-10")
    flip(tmp_path / "checkpoint-10" / "model.safetensors", 0)
    (tmp_path / "checkpoint-9" / folder.MANIFEST).write_text("{}")
    found = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path)])
    assert found.exit_code == 1
    assert "checkpoint-10: " in found.output and "model.safetensors does not hold the bytes" in found.output
    assert f"{folder.MANIFEST} cannot be read" in found.output
    nothing = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "nothing")])
    assert isinstance(nothing.exception, CheckpointError)


def test_a_checkpoint_of_an_older_version_has_no_digests(saved: Path, tmp_path: Path) -> None:
    old = shutil.copytree(saved, tmp_path / "checkpoint-1")
    manifest: dict[str, Any] = json.loads((old / folder.MANIFEST).read_text())
    del manifest["digests"], manifest["own_digest"]
    (old / folder.MANIFEST).write_text(json.dumps(manifest))
    (verdict,) = verify([old])
    assert verdict.problems == (
        "no digests: it was saved by an older version of hf_dist, and only sizes can be compared",
    )
    assert run_ranks(load_damaged, 1, ([], str(old)))[0]["whole"] == ""
