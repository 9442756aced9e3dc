"""Bytes that rest on device, host and disk equal the formulas, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID, chosen
from tests.harness import run_ranks
from tests.memory.offload.test_parity import BF16, offload
from tests.memory.offload.training import make_engine, train

CASES = {
    f"{stage}-{kind}-{dtype}": (stage, kind, dtype)
    for stage in (1, 2, 3)
    for kind in ("", "cpu", "nvme", *(("cpu+cpu", "nvme+nvme", "+cpu") if stage == 3 else ()))
    for dtype in ("fp32", "bf16")
}
PLACES = chosen(list(CASES.values()), lambda case: {"place": case[:2], "dtype": case[2]}, 1)
"""Everywhere where states rest, with either dtype in turn."""
CASES = {name: case for name, case in CASES.items() if case in PLACES}
WORLDS = (1, 2) if FULL_GRID else (2,)  # shards of one rank are whole
PAGE = 4096


def measure(rank: int, world: int, folder: str) -> dict[str, Any]:
    """By case: (what the engine says, what the formulas say); pools of transfers apart."""
    found = {}
    for name, (stage, kind, dtype) in CASES.items():
        engine = make_engine(offload(kind, folder), stage=stage, **(BF16 if dtype == "bf16" else {}))
        train(engine, count=2)
        buffers = sum(engine.sharded.storage.buffer_nbytes().values())
        held = engine.resident_nbytes()
        held["host"] -= buffers
        largest = max(pages(4 * g.layout.shard_numel) for g in engine.sharded.groups)
        found[name] = (
            held,
            expected(engine, stage, kind, 2 if dtype == "bf16" else 4),
            buffers <= 9 * largest + 5 * largest,
        )
    return found


def pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def expected(engine: Any, stage: int, kind: str, element: int) -> dict[str, int]:
    """The README's table of bytes per element, with Adam's two states and a 4-byte step per fragment."""
    optim, _, params = kind.partition("+")
    place = {"": "device", "cpu": "host", "nvme": "disk"}
    held = {"device": 0, "host": 0, "disk": 0}

    def add(where: str, nbytes: int) -> None:
        held[where] += pages(nbytes) if where == "disk" else nbytes

    for group in engine.sharded.groups:
        shard = group.layout.shard_numel
        if stage < 3:
            add("device", group.layout.numel * element)
            separate = optim or element == 2
        else:
            separate = True
            one = optim == params and (not optim or (optim == "cpu" and element == 4))
            if not one:
                add(place[params], shard * element)
        if separate:
            add(place[optim], shard * 4)
        if optim:
            add("host", shard * 4)  # gradients
        if optim == "nvme":
            for _ in range(2):
                add("disk", shard * 4)
    for f in engine.fragments.fragments:
        stepped = not f.name.startswith("unused")
        if stepped and optim != "nvme":
            add(place[optim], 8 * (f.stop - f.start))
        if stepped:
            add("host" if optim else "device", 4)
    return held


@pytest.fixture(scope="module", params=WORLDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Measured and expected bytes, by rank and case."""
    return run_ranks(measure, request.param, (str(tmp_path_factory.mktemp("swap")),))


@pytest.mark.parametrize("case", CASES)
def test_bytes_at_rest_equal_the_formula(case: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        held, formula, bounded = of_rank[case]
        assert held == formula
        assert bounded


def test_no_more_weights_than_max_in_cpu_rest_on_the_host_and_the_others_on_disk(tmp_path: Path) -> None:
    limit = 6000
    sections = offload("+nvme", str(tmp_path))
    sections["offload_param"]["max_in_cpu"] = limit
    engine = make_engine(sections, stage=3)
    shards = [g.layout.shard_numel for g in engine.sharded.groups]
    buffers = sum(engine.sharded.storage.buffer_nbytes().values())
    on_host = (engine.resident_nbytes()["host"] - buffers) // 4
    assert max(shards) < on_host <= limit < sum(shards)
    assert engine.resident_nbytes()["disk"] >= 4 * (sum(shards) - on_host)
