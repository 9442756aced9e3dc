"""Stored tensors under HF's kind of conversions, not read: any interval, slice and sample is what the conversion gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_dist.checkpoint import piece_source
from hf_dist.checkpoint.recording import RecordedTensor, recorded
from hf_dist.checkpoint.safetensors_source import SafetensorsFile, bytes_read
from hf_dist.tensors.tensor_slice import TensorSlice

Tensors = dict[str, torch.Tensor]
STORED: Tensors = {
    **{f"expert{i}": torch.randn(6, 4) for i in range(3)},
    "matrix": torch.randn(8, 6),
    "wide": torch.randn(4, 6, dtype=torch.float64),
    "number": torch.tensor(2.5),
}


def _interleaved(t: Tensors) -> torch.Tensor:
    return torch.stack([t["expert0"], t["expert1"]], dim=-1).flatten(-2)


CONVERSIONS: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "itself": lambda t: t["matrix"],
    "scalar": lambda t: t["number"],
    "stacked": lambda t: torch.stack([t[f"expert{i}"] for i in range(3)]),
    "fused": lambda t: torch.stack([torch.cat([t[f"expert{i}"], t[f"expert{2 - i}"]]) for i in range(3)]),
    "turned": lambda t: torch.stack([t[f"expert{i}"] for i in range(3)]).transpose(1, 2).contiguous(),
    "turned back": lambda t: t["matrix"].T.contiguous().T,
    "columns": lambda t: torch.cat([t["matrix"][:, 4:], t["matrix"][:, :3]], dim=1),
    "every second row": lambda t: t["matrix"][::2],
    "interleaved": _interleaved,
    "rope": lambda t: t["matrix"].view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6),
    "chunked": lambda t: torch.cat(t["matrix"].chunk(4)[::-1]),
    "cast": lambda t: t["matrix"].to(torch.bfloat16),
    "cast, then moved": lambda t: torch.cat([t["wide"].float(), t["matrix"]]),
    "cast twice": lambda t: t["matrix"].bfloat16().float(),
    "computed": lambda t: t["matrix"] * 2,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedTensor]:
    file = tmp_path_factory.mktemp("stored") / "model.safetensors"
    save_file(STORED, file)
    return recorded(SafetensorsFile(file).tensors().values())


@pytest.fixture(params=[64 * 2**10, 8], ids=["as it is", "small gaps and chunks"], autouse=True)
def limits(request: pytest.FixtureRequest) -> Iterator[None]:
    """With limits this small every part of a read is cut as parts of large tensors are."""
    before = piece_source.GAP, piece_source.CHUNK_NUMEL
    if request.param == 8:
        piece_source.GAP, piece_source.CHUNK_NUMEL = 8, 5
    yield
    piece_source.GAP, piece_source.CHUNK_NUMEL = before


@pytest.mark.parametrize("name", [name for name in CONVERSIONS if name not in ("computed", "cast twice")])
def test_every_interval_and_slice_is_what_the_conversion_gives(name: str, stored: dict[str, RecordedTensor]) -> None:
    wanted = CONVERSIONS[name](STORED)
    result = CONVERSIONS[name](stored)  # type: ignore[arg-type]
    assert isinstance(result, RecordedTensor) and result.shape == wanted.shape and result.dtype == wanted.dtype
    source = result.source

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        held = TensorSlice(tuple(wanted.shape), tuple(data.draw(ranges(size)) for size in wanted.shape))
        part = data.draw(st.sampled_from([TensorSlice.all(wanted.shape), held]))
        start = data.draw(st.integers(0, part.numel))
        stop = data.draw(st.integers(start, part.numel))
        out = torch.full((stop - start,), -1.0, dtype=data.draw(st.sampled_from([wanted.dtype, torch.float64])))
        cut = source if part.everything else source.sliced(part)
        cut.read(start, stop, out)
        flat = part.take(wanted).reshape(-1)
        assert torch.equal(out, flat[start:stop].to(out.dtype))
        indices = list(range(start, stop))[:3]
        assert torch.equal(cut.sample(indices), flat[indices])

    check()


@st.composite
def ranges(draw: st.DrawFn, size: int) -> tuple[tuple[int, int], ...]:
    """One or two ranges of [0, size)."""
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=4)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


def test_what_is_computed_is_read_and_becomes_an_ordinary_tensor(stored: dict[str, RecordedTensor]) -> None:
    for name in ("computed", "cast twice"):
        result = CONVERSIONS[name](stored)  # type: ignore[arg-type]
        assert type(result) is torch.Tensor
        assert torch.equal(result, CONVERSIONS[name](STORED))


def test_fingerprints_tell_other_places_apart(stored: dict[str, RecordedTensor], tmp_path: Path) -> None:
    found = {n: c(stored) for n, c in CONVERSIONS.items()}  # type: ignore[arg-type]
    twice = found.pop("turned back")
    assert twice.source.fingerprint() == found["itself"].source.fingerprint()  # type: ignore[attr-defined]
    prints = [t.source.fingerprint() for t in found.values() if isinstance(t, RecordedTensor)]
    assert len(set(prints)) == len(prints)
    save_file({**STORED, "matrix": STORED["matrix"] + 1}, tmp_path / "model.safetensors")
    other = recorded(SafetensorsFile(tmp_path / "model.safetensors").tensors().values())
    assert other["matrix"].source.fingerprint() != stored["matrix"].source.fingerprint()


def test_an_interval_reads_its_own_bytes_only(stored: dict[str, RecordedTensor]) -> None:
    source = CONVERSIONS["fused"](stored).source  # type: ignore[arg-type, attr-defined]
    before = bytes_read()
    source.read(30, 60, torch.empty(30))
    assert bytes_read() - before == 30 * 4
