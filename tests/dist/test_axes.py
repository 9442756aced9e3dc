"""The description of the axes: lines partition the world, coordinates and ranks are inverses, sizes divide or are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.config import axes_of, load_config
from hf_dist.dist.axes import AXES, EXPERTS, HOPS, NEIGHBOURS, Axes
from hf_dist.errors import ConfigError

VIEWS = list(dict.fromkeys(view for views in AXES.values() for view in views))
NAMES = [*AXES, *EXPERTS, *VIEWS]


@st.composite
def jobs(draw: st.DrawFn) -> Axes:
    """Up to a few hundred ranks, ep a divisor of the shard ranks."""
    sizes = {name: draw(st.integers(1, 3), label=name) for name in AXES}
    shard = sizes["dp_shard"] * sizes["cp_shard"]
    sizes["ep"] = draw(st.sampled_from([n for n in range(1, shard + 1) if shard % n == 0]), label="ep")
    return Axes(sizes)


@settings(deadline=None, max_examples=60)
@given(jobs())
def test_lines_of_every_view_partition_the_world_and_hold_ranks_by_coordinate(axes: Axes) -> None:
    for name in NAMES:
        lines = axes.lines(name)
        assert sorted(rank for line in lines for rank in line) == list(range(axes.world))
        assert {len(line) for line in lines} == {axes.size(name)}
        for line in lines:
            assert [axes.coordinate(name, rank) for rank in line] == list(range(axes.size(name)))
            assert axes.line(name, line[-1]) == line


@settings(deadline=None, max_examples=60)
@given(jobs())
def test_coordinates_and_ranks_are_inverses(axes: Axes) -> None:
    for rank in range(axes.world):
        assert axes.rank({name: axes.coordinate(name, rank) for name in AXES}) == rank


@settings(deadline=None, max_examples=60)
@given(jobs())
def test_views_are_what_they_are_made_of(axes: Axes) -> None:
    size = axes.size
    assert axes.world == math.prod(size(name) for name in AXES) == size("data") * size("batch")
    assert size("world") == size("dp") * size("model") and size("shard") == size("edp") * size("ep")
    for line in axes.lines("shard"):  # experts fold into the line that ZeRO shards over
        own = {rank for inner in axes.lines("ep") if inner[0] in line for rank in inner}
        assert own == set(line)
    for first in axes.lines("batch"):  # the ranks of one batch have one data coordinate
        assert len({axes.coordinate("data", rank) for rank in first}) == 1
    for line in axes.lines("tp"):  # innermost
        assert line == list(range(line[0], line[0] + size("tp")))


def test_a_world_is_cut_into_stages_then_into_copies_then_into_shards() -> None:
    axes = Axes.of(16, pp=2, shard=4)
    assert axes.describe() == "16 ranks = pp 2 x dp_replicate 2 x dp_shard 4"
    assert axes.lines("pp")[:2] == [[0, 8], [1, 9]] and axes.line("shard", 5) == [4, 5, 6, 7]
    assert axes.line("dp_replicate", 5) == [1, 5]
    assert Axes.of(1).describe() == "1 rank = dp_replicate 1 x dp_shard 1"
    assert Axes.of(8, ep=4).describe() == "8 ranks = dp_replicate 1 x dp_shard 8 (edp 2 x ep 4)"


def test_neighbours_under_tp_and_cp_read_the_same_rows() -> None:
    axes = Axes.of(8, tp=2, cp=2)
    assert axes.size("data") == 2
    assert [axes.coordinate("data", rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert axes.size("shard") == axes.size("dp") == 4


def test_shards_lie_inside_of_a_sequence_or_reach_over_several() -> None:
    axes = Axes.of(16, cp=8, shard=2)
    assert axes.describe() == "16 ranks = dp_replicate 2 x dp_shard 1 x cp 8 (cp_replicate 4 x cp_shard 2)"
    assert axes.line("cp", 5) == list(range(8)) and axes.line("shard", 5) == [4, 5]
    assert axes.line("cp_replicate", 5) == [1, 3, 5, 7] and axes.line("dp_replicate", 5) == [5, 13]
    assert axes.line("data", 5) == [5, 13] and axes.size("dp") == 16
    assert Axes.of(16, cp=2, shard=8).describe() == "16 ranks = dp_replicate 2 x dp_shard 4 x cp 2"
    spread = Axes.of(8, cp=8, shard=4, ep=2)
    assert (
        spread.line("shard", 5) == [4, 5, 6, 7] and spread.line("edp", 5) == [5, 7] and spread.line("ep", 5) == [4, 5]
    )


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (2, {"pp": 3}, "pipeline.stages: 3 does not divide the 2 processes of this job. Start a multiple of 3"),
        (8, {"pp": 2, "tp": 3}, "tensor_parallel.autotp_size: 3 does not divide the 4 that remain of 8 processes"),
        (8, {"tp": 2, "cp": 3}, "sequence_parallel_size: 3 does not divide the 4 that remain of 8 processes"),
        (
            8,
            {"shard": 3},
            "zero_optimization.mics_shard_size: 3 is not a divisor of the 8 ranks that hold the same layers",
        ),
        (12, {"cp": 6, "shard": 4}, "is a multiple or a divisor of sequence_parallel_size (6)"),
        (8, {"ep": 3}, "expert_parallel.autoep_size: 3 does not divide the 8 ranks among which states are sharded"),
        (8, {"pp": 0}, "pipeline.stages: 0 is not at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_their_key(world: int, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Axes.of(world, **sizes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"pipeline": {"stages": 3}}, "pipeline.stages"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "zero_optimization.mics_shard_size"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
            "zero_optimization.zero_hpz_partition_size",
        ),
    ],
)
def test_a_config_that_does_not_divide_is_told_its_line(section: dict[str, Any], path: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps(section, indent=1))
    with pytest.raises(ConfigError) as caught:
        axes_of(load_config(file), 4)
    (problem,) = caught.value.problems
    assert problem.path == path and problem.file.startswith(f"{file}:")


def test_as_many_neighbours_as_ranks_or_more_need_no_second_copy() -> None:
    for size in (1, 2, 4, 16):
        section = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}
        assert axes_of(load_config(section), 4).size("shard") == 4


def test_blocks_of_adjacent_ranks_are_axes_of_their_own() -> None:
    axes = Axes({"dp_shard": 4, "tp": 2}, {NEIGHBOURS: 2, HOPS[0]: 2})
    assert axes.lines(HOPS[0]) == axes.lines(NEIGHBOURS) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert axes.lines(HOPS[1]) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert [axes.size(name) for name in (NEIGHBOURS, *HOPS)] == [2, 2, 2]
    for name in (NEIGHBOURS, *HOPS):
        assert all(axes.line(name, rank) == line for line in axes.lines(name) for rank in line)
    assert Axes({"dp_shard": 4}).size(HOPS[1]) == 4


@pytest.mark.parametrize(("machines", "adjacent"), [("aabb", 2), ("aaaa", 4), ("abab", 1), ("aaab", 0), ("", 0)])
def test_adjacent_ranks_of_a_machine_are_as_many_in_every_line_or_unknown(machines: str, adjacent: int) -> None:
    assert Axes({"dp_shard": 4}).adjacent("shard", machines) == adjacent


def test_a_name_that_is_no_axis_is_refused() -> None:
    with pytest.raises(KeyError, match="there are pp, dp_replicate"):
        Axes.of(4).size("rows")
