"""Files of a checkpoint that are damaged, made by somebody else, or not to be read: an error that names the file, never
another one; and neither a resume nor a save depends on such a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_dist.checkpoint import folder
from hf_dist.checkpoint.describe import describe
from hf_dist.checkpoint.safetensors_header import files_of_index, read_header
from hf_dist.checkpoint.safetensors_source import SafetensorsFile
from hf_dist.errors import CheckpointError

NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.sampled_from([-1, 0, 2**63, 2**70]))
NAMES = st.one_of(
    st.text(max_size=6), st.sampled_from(["../x", "/etc/hostname", "a\0", "a" * 5000, "model.safetensors", "."])
)
JSON = st.recursive(
    st.one_of(NUMBERS, NAMES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
)
MANIFESTS = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"format": st.one_of(st.just(1), JSON), "files": st.one_of(st.dictionaries(NAMES, NUMBERS), JSON)}
    ),
    st.fixed_dictionaries({"format": st.just(1), "files": st.just({"model.safetensors": 80}), "step": JSON}),
)
ENTRIES = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.just("F32"), JSON),
            "shape": st.lists(NUMBERS, max_size=3),
            "data_offsets": st.lists(NUMBERS),
        }
    ),
)
often = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def checkpoint(root: Path, step: int) -> Path:
    """A complete one, tiny."""
    path = root / f"checkpoint-{step}"
    path.mkdir(exist_ok=True)
    (path / folder.MANIFEST).unlink(missing_ok=True)
    save_file({"w": torch.ones(4)}, path / "model.safetensors")
    folder.seal(path, {"step": step})
    return path


def check_root(root: Path, good: Path) -> None:
    """The damaged newest folder is passed over by whoever looks for a checkpoint."""
    assert folder.newest_complete(root)[0] == good
    assert folder.complete(root) == [good]
    assert folder.rotate(root, 5, []) == []


def damaged(manifest: Any) -> bool:
    """Whether it is not what `seal` writes; a manifest may tell more."""
    try:
        return bool(folder._checked_format(manifest) != folder.FORMAT or manifest["files"] != {"model.safetensors": 80})
    except (ValueError, LookupError, TypeError):
        return True


@often
@given(MANIFESTS)
def test_no_manifest_stops_a_resume_or_a_save(tmp_path: Path, manifest: Any) -> None:
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (bad / folder.MANIFEST).write_text(json.dumps(manifest))
    if damaged(manifest):
        check_root(tmp_path, good)
        assert describe(bad).problems
        try:
            folder.read_manifest(bad)
        except CheckpointError as error:
            assert str(bad) in str(error)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"format": Infinity, "files": {}}', '{"format": 1, "files": {}}']
)
def test_a_manifest_that_is_no_json_or_names_nothing(tmp_path: Path, text: str) -> None:
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (bad / folder.MANIFEST).write_text(text)
    check_root(tmp_path, good)


def test_a_folder_that_may_not_be_read_and_a_link_that_leads_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    elsewhere = tmp_path / "elsewhere"
    (bad / "model.safetensors").rename(elsewhere)
    (bad / "model.safetensors").symlink_to(elsewhere)
    check_root(tmp_path, good)
    stock = Path.is_file

    def is_file(path: Path) -> bool:
        if bad in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stock(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    check_root(tmp_path, good)


def test_an_old_folder_that_cannot_be_removed_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        checkpoint(tmp_path, step)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folder, "remove", refuse)
    assert folder.rotate(tmp_path, 1, []) == []
    assert "checkpoint-1 is beyond the limit" in caplog.text


@often
@given(st.one_of(JSON, st.dictionaries(NAMES, ENTRIES, max_size=3)))
def test_a_header_is_right_or_refused_with_the_files_name(tmp_path: Path, header: Any) -> None:
    path, text = tmp_path / "x.safetensors", json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 64)
    try:
        for tensor in SafetensorsFile(path).tensors().values():
            tensor.read(0, min(tensor.numel, 8), torch.empty(min(tensor.numel, 8), dtype=tensor.dtype))
    except CheckpointError as error:
        assert str(path) in str(error)
    describe(tmp_path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": ([4], [-16, 0])}, {"a": ([-2, -2], [0, 16])}, {"a": ([4], [0, 16]), "b": ([4], [8, 24])},
        {"a": ([4], [0, 16]), "b": ([4], [20, 36])}, {"a": ([2**60], [0, 2**62])}, {"a": ([4], [0, 12])}, {"a": ([4], [16, 0])},
        {"a": ([4], [8, 24])}, {"a": ([16], [0, 64]), "b": ([16], [0, 64])},
    ],
    ids=str,
)  # fmt: skip
def test_offsets_that_overlap_leave_holes_or_lead_out_are_refused(tmp_path: Path, tensors: dict[str, Any]) -> None:
    header = {name: {"dtype": "F32", "shape": s, "data_offsets": o} for name, (s, o) in tensors.items()}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    last = max(o[1] for _, o in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * min(last, 64))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(path)


@often
@given(st.one_of(JSON, st.fixed_dictionaries({"weight_map": st.one_of(JSON, st.dictionaries(NAMES, NAMES))})))
def test_an_index_names_files_of_its_folder_or_is_refused(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    try:
        assert all(tmp_path in (tmp_path / name).resolve().parents for name in files_of_index(path))
    except CheckpointError as error:
        assert str(path) in str(error)
