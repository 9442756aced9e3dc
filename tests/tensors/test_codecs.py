"""Wire codecs: every one keeps its bound, hides nothing, and sends the bytes that it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.tensors.codecs import CODECS, Codec, codec_of

SEEDS = st.integers(0, 2**31)
LENGTHS = st.integers(1, 700)
EXPONENTS = st.integers(-140, 120)
"""Of 2: below the normal numbers of fp32, and near the largest."""


def numbers(seed: int, numel: int, exponents: list[int], zeros: float) -> torch.Tensor:
    """Random numbers of mixed sizes: element i is near 2 to the power of one of `exponents`; a share is zero."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(exponents, dtype=torch.float32)[torch.randint(len(exponents), (numel,), generator=g)]
    values = torch.randn(numel, generator=g).double() * torch.exp2(chosen.double())
    return values.float().masked_fill(torch.rand(numel, generator=g) < zeros, 0.0)


def sent(codec: Codec, values: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """The bytes of `rows` equal parts."""
    parts = values.view(rows, -1)
    wire = torch.empty(rows, codec.nbytes(parts.shape[1]), dtype=torch.uint8)
    codec.encode(parts, wire)
    return wire


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60, deadline=None)
@given(SEEDS, LENGTHS, st.lists(EXPONENTS, min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_what_arrives_is_within_the_bound(
    name: str, seed: int, numel: int, exponents: list[int], zeros: float, wide: bool
) -> None:
    values, codec = numbers(seed, numel, exponents, zeros), CODECS[name](256 if wide else 64)
    arrived = codec.rounded(values)
    assert arrived.isfinite().all()
    error, bound = (arrived.double() - values.double()).abs(), codec.bound(values).double()
    assert (error <= bound).all(), float((error / bound).max())
    for start in range(0, numel, codec.block):
        block = values[start : start + codec.block]
        if not block.any():
            assert not arrived[start : start + codec.block].any()


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25, deadline=None)
@given(SEEDS, LENGTHS, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 10**6))
def test_a_number_that_is_not_finite_spoils_its_block_and_no_other(
    name: str, seed: int, numel: int, bad: float, at: int
) -> None:
    values, codec, at = numbers(seed, numel, [0], 0.1), CODECS[name](64), at % numel
    clean = codec.rounded(values)
    values[at] = bad
    arrived = codec.rounded(values)
    first = at // 64 * 64
    assert not arrived[first : first + 64].isfinite().any()
    assert torch.equal(arrived[:first], clean[:first]) and torch.equal(arrived[first + 64 :], clean[first + 64 :])


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 4), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_parts_of_whole_blocks_are_encoded_as_the_whole_is(
    name: str, seed: int, blocks: int, rows: int, dtype: torch.dtype
) -> None:
    """However many ranks cut the numbers at blocks: bytes of a block depend on its elements alone. Sums add what arrives."""
    codec = CODECS[name](64)
    values = numbers(seed, rows * blocks * 64, [0, -6], 0.1).to(dtype)
    wire = sent(codec, values, rows)
    assert wire.numel() == rows * blocks * (64 * codec.bits // 8 + 4) == codec.nbytes(values.numel())
    out = torch.empty(rows, blocks * 64, dtype=dtype)
    codec.decode(wire, out)
    assert torch.equal(out.view(-1), codec.rounded(values))
    total = values.float().view(rows, -1).clone()
    codec.decode(wire, total, add=True)
    alone = torch.empty(rows, blocks * 64)
    codec.decode(wire, alone)
    assert torch.equal(total, values.float().view(rows, -1) + alone)


@pytest.mark.parametrize("name", CODECS)
def test_large_messages_are_encoded_chunk_by_chunk_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, codec = numbers(0, 3 * 4096, [0, -9], 0.2), CODECS[name](256)
    whole = sent(codec, values, 3)
    monkeypatch.setattr("hf_dist.tensors.codecs.codec._CHUNK_BLOCKS_NUMEL", 512)
    assert torch.equal(sent(codec, values, 3), whole)


def test_a_codec_is_its_name_and_block() -> None:
    assert codec_of(None, 64) is codec_of("whole", 64) is None
    assert codec_of("int8", 64) == CODECS["int8"](64) != CODECS["int8"](128)
    assert codec_of("int8", 64) != codec_of("int4", 64)
    assert len({codec_of("int8", 64), CODECS["int8"](64)}) == 1
    assert repr(codec_of("int8", 256)) == "int8 in blocks of 256"
    for block in (0, -64, 100):
        with pytest.raises(AssertionError):
            CODECS["int8"](block)


@pytest.mark.parametrize("name", CODECS)
def test_the_operators_of_a_codec_are_one_graph(name: str) -> None:
    """`torch.compile` can fuse them: no break, no number read by the host."""
    codec, blocks = CODECS[name](64), numbers(1, 512, [0], 0.1).view(2, 4, 64)
    packed = codec.pack(blocks)
    pack = torch.compile(codec.pack, backend="eager", fullgraph=True)
    unpack = torch.compile(codec.unpack, backend="eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(pack(blocks), packed, strict=True))
    assert torch.equal(unpack(*packed), codec.unpack(*packed))
