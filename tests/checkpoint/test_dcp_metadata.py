"""A checkpoint's metadata may come from anybody: nothing in it runs, and what is not DCP's is refused with the file's name."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hf_dist.checkpoint import dcp, dcp_metadata
from hf_dist.errors import CheckpointError
from tests.checkpoint.payloads import AsPython3112, broken, payloads


def classes() -> dict[str, Any]:
    """Attributes of DCP's classes, which a pickle could change."""
    kinds = [value for module in (described, filesystem) for value in vars(module).values() if isinstance(value, type)]
    return {f"{kind.__name__}.{name}": value for kind in kinds for name, value in vars(kind).items()}


def test_no_pickle_runs_anything(tmp_path: Path) -> None:
    mark = tmp_path / "touched"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    before, found = classes(), list(payloads(str(mark)))
    assert len(found) >= 35
    for what, content in found:
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"checkpoint/\.metadata"):
            dcp.stored_tensors(folder)
        assert not mark.exists(), what
        assert [p.name for p in folder.iterdir()] == [".metadata"], what
        assert classes() == before, what


def test_an_ordinary_unpickler_runs_them(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    mark = tmp_path / "touched"
    ran = 0
    for what, content in payloads(str(mark)):
        if "system" in what and "_local" not in what and "new" not in what:
            with contextlib.suppress(Exception):
                pickle.loads(content)
            ran += mark.exists()
            mark.unlink(missing_ok=True)
    assert ran >= 10


@pytest.mark.parametrize(("what", "content"), list(broken()), ids=[what for what, _ in broken()])
def test_what_is_not_dcps_is_refused_with_the_files_name(what: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        dcp.stored_tensors(tmp_path)


def stored(path: str = "a.distcp", offset: int = 0, size: tuple[int, ...] = (4,)) -> Metadata:
    """One tensor of four elements."""
    box = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    box.sizes = size  # type: ignore[assignment]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [box])
    return Metadata({"w": tensor}, storage_data={MetadataIndex("w"): filesystem._StorageInfo(path, offset, 4)})


@pytest.mark.parametrize(
    "given",
    [{"path": "/etc/hostname"}, {"path": "../a"}, {"path": ".."}, {"path": "sub/../../a"}, {"path": ""},
     {"path": "link"}, {"offset": -4}, {"offset": 2**70}, {"size": (-1,)}, {"size": (2.5,)}, {"size": (2**63,)}],
    ids=str,
)  # fmt: skip
def test_files_outside_of_the_folder_and_impossible_sizes_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "a").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "a")
    (folder / ".metadata").write_bytes(pickle.dumps(stored()))
    assert dcp.stored_tensors(folder) == {"w": ((4,), torch.float32)}
    (folder / ".metadata").write_bytes(pickle.dumps(stored(**given)))
    with pytest.raises(CheckpointError, match=r"checkpoint/\.metadata"):
        dcp.stored_tensors(folder)


def test_an_enumeration_may_be_an_attribute_of_its_class() -> None:
    stream = io.BytesIO()
    AsPython3112(stream).dump(list(_MEM_FORMAT_ENCODING))
    assert dcp_metadata._Unpickler(io.BytesIO(stream.getvalue())).load() == list(_MEM_FORMAT_ENCODING)
