"""The training state's files: torch's own reader understands them, and a rank reads little more than its part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from hf_dist.checkpoint import dcp
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.errors import CheckpointError

ALONE: Any = SimpleNamespace(group=None)
ROWS, COLUMNS = 2000, 50


def write(folder: Path) -> torch.Tensor:
    """Slices of longer tensors, which must not be written with their neighbours."""
    values = torch.randn(ROWS * COLUMNS)
    state = {
        "matrix": FlatSlice(values, 0, (ROWS, COLUMNS)),
        "part": FlatSlice(values[7:4900], 7, (100, 50)),
        "half": FlatSlice(values[:9].bfloat16()[3:9], 0, (6,)),
        "number": FlatSlice(values[:1], 0, ()),
        "step": torch.tensor(3.0),
    }
    dcp.write_state(folder, state, ALONE)
    return values


def test_torchs_own_reader_reads_it(tmp_path: Path) -> None:
    values = write(tmp_path)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 1.1 * 4 * (ROWS * COLUMNS + 4893)
    found = {
        "matrix": torch.zeros(ROWS, COLUMNS),
        "part": torch.zeros(100, 50),
        "half": torch.zeros(6, dtype=torch.bfloat16),
        "number": torch.zeros(()),
        "step": torch.zeros(()),
    }
    torch_dcp.load(found, storage_reader=torch_dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(found["matrix"].view(-1), values)
    assert torch.equal(found["part"].view(-1)[7:4900], values[7:4900])
    assert torch.equal(found["half"], values[3:9].bfloat16())
    assert found["number"] == values[0] and found["step"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_reads_its_part_of_a_stored_block(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = write(tmp_path)
    counted: list[int] = []
    monkeypatch.setattr("builtins.open", counting(counted))
    part = torch.zeros(30_000, dtype=dtype)
    dcp.read_state(tmp_path, {"matrix": FlatSlice(part, 333, (ROWS, COLUMNS))})
    assert torch.equal(part, values[333:30_333].to(dtype))
    assert 4 * 30_000 <= sum(counted) < 1.2 * 4 * 30_000, "the block has 400,000 bytes"


def counting(counted: list[int]) -> Any:
    """`open` whose files note how many bytes are read."""
    import io

    plain = open  # before it is replaced

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer)
            counted.append(count or 0)
            return count or 0

        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            counted.append(len(data))
            return data

    def act(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return Counted(path, mode) if mode == "rb" else plain(path, mode, *args, **kwargs)

    return act


def test_blocks_that_are_not_row_major_are_read_too(tmp_path: Path) -> None:
    square = torch.arange(12.0).view(3, 4)
    torch_dcp.save({"turned": square.t()}, checkpoint_id=tmp_path, no_dist=True)
    part = torch.zeros(5)
    dcp.read_state(tmp_path, {"turned": FlatSlice(part, 4, (4, 3))})
    assert torch.equal(part, square.t().reshape(-1)[4:9])


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    file = next(tmp_path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        dcp.read_state(tmp_path, {"part": FlatSlice(torch.zeros(10), 7, (100, 50)), "step": torch.zeros(())})
