"""Schedules without a tensor: complete, free of dead-locks, as short and as small as they promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_dist.errors import TopologyError
from hf_dist.parallel.pipeline.actions import Action, Kind, Schedule, ScheduleError
from hf_dist.parallel.pipeline.communication import add_communication, channel_of, matching_send
from hf_dist.parallel.pipeline.draw import draw_schedule, draw_text
from hf_dist.parallel.pipeline.schedule import SCHEDULES, forward_only, make_schedule
from hf_dist.parallel.pipeline.simulate import Costs, simulate, validate

RANKS, MICROBATCHES = st.integers(1, 6), st.integers(1, 14)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from([*SCHEDULES, "forward_only"]))
    virtual = draw(st.integers(1, 4)) if name in ("interleaved_1f1b", "forward_only") else 1
    ranks, microbatches = draw(RANKS), draw(MICROBATCHES)
    if name == "forward_only":
        return forward_only(ranks, microbatches, virtual)
    return make_schedule(name, ranks, microbatches, virtual)


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_every_schedule_is_complete_ordered_and_runs_through(schedule: Schedule) -> None:
    validate(schedule)
    validate(add_communication(schedule))


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_every_boundary_is_crossed_once_per_microbatch_and_direction(schedule: Schedule) -> None:
    complete = add_communication(schedule)
    sends = Counter(a for rank in complete.ranks for a in rank if a.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
    boundaries = [s for s in range(schedule.num_stages - 1) if schedule.rank_of(s) != schedule.rank_of(s + 1)]
    expected = {Action(s, Kind.SEND_FORWARD, m) for s in boundaries for m in range(schedule.num_microbatches)}
    if schedule.name != "forward_only":
        expected |= {Action(s + 1, Kind.SEND_BACKWARD, m) for s in boundaries for m in range(schedule.num_microbatches)}
    assert sends == Counter(expected)
    receives = [a for rank in complete.ranks for a in rank if a.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)]
    assert Counter(map(matching_send, receives)) == sends


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_backwards_of_a_stage_take_microbatches_in_order(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for stage in schedule.stages_of(rank):
            for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                order = [a.microbatch for a in actions if a.stage == stage and a.kind is kind]
                assert order == sorted(order)


def bubble(name: str, ranks: int, microbatches: int, virtual: int) -> float:
    """The papers' formulas, for F = I = W and no transfer time."""
    work = {"interleaved_1f1b": virtual, "zb_h1": 3}.get(name, 1) * microbatches
    return (ranks - 1) / (work + ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4)]
)
def bench_bubble_is_that_of_the_formula(name: str, ranks: int, rounds: int, virtual: int) -> None:
    microbatches = rounds * ranks
    found = simulate(make_schedule(name, ranks, microbatches, virtual)).bubble
    assert found == pytest.approx(bubble(name, ranks, microbatches, virtual), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(RANKS, MICROBATCHES, st.integers(1, 4))
def test_interleaving_never_idles_more_than_1f1b(ranks: int, microbatches: int, virtual: int) -> None:
    interleaved = simulate(make_schedule("interleaved_1f1b", ranks, microbatches, virtual)).bubble
    assert interleaved <= simulate(make_schedule("1f1b", ranks, microbatches)).bubble + 1e-12


@settings(max_examples=60, deadline=None)
@given(RANKS, MICROBATCHES)
def test_microbatches_in_flight_are_as_promised(ranks: int, microbatches: int) -> None:
    promised = {
        "gpipe": [microbatches] * ranks,
        "1f1b": [min(microbatches, ranks - rank) for rank in range(ranks)],
        "zb_h1": [min(microbatches, ranks)] * ranks,
    }
    for name, expected in promised.items():
        assert list(simulate(make_schedule(name, ranks, microbatches)).in_flight) == expected


def test_transfers_and_costs_lengthen_the_step() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    # F0 2, transfer 3, F1 2, B1 4 + 1, transfer 3, B0 4 + 1
    result = simulate(schedule, Costs(forward=2, backward_input=4, backward_weight=1, transfer=3))
    assert result.makespan == 2 + 3 + 2 + 5 + 3 + 5
    assert result.bubble == pytest.approx(1 - 14 / 40)


def swap(schedule: Schedule, rank: int, first: int, second: int) -> Schedule:
    actions = list(schedule.ranks[rank])
    actions[first], actions[second] = actions[second], actions[first]
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def test_a_missing_a_doubled_and_a_misplaced_action_are_named() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    shorter = replace(schedule, ranks=(schedule.ranks[0][:-1], schedule.ranks[1]))
    with pytest.raises(ScheduleError, match=r"rank 0 does not run 0B2 exactly once\nrank 0: 0F0"):
        validate(shorter)
    doubled = replace(schedule, ranks=((*schedule.ranks[0], schedule.ranks[0][0]), schedule.ranks[1]))
    with pytest.raises(ScheduleError, match="0F0 exactly once"):
        validate(doubled)
    with pytest.raises(ScheduleError, match="in another order"):
        validate(swap(schedule, 1, 0, 1))


def test_a_deadlock_is_found_and_says_who_waits_where() -> None:
    complete = add_communication(make_schedule("1f1b", 2, 2))
    actions = list(complete.ranks[0])
    receive = actions.index(Action(0, Kind.RECV_BACKWARD, 0))
    actions.insert(0, actions.pop(receive))
    with pytest.raises(ScheduleError, match="dead-locks: rank 0 waits at 0RB0; rank 1 waits at 1RF0"):
        simulate(replace(complete, ranks=(tuple(actions), complete.ranks[1])))


def test_receives_in_another_order_than_the_sends_are_refused() -> None:
    complete = add_communication(make_schedule("gpipe", 2, 2))
    positions = [i for i, a in enumerate(complete.ranks[1]) if channel_of(complete, a) and a.kind is Kind.RECV_FORWARD]
    with pytest.raises(ScheduleError, match="rank 1 does not receive from rank 0 in its order"):
        validate(swap(complete, 1, *positions))


def test_wrong_numbers_name_the_key() -> None:
    with pytest.raises(TopologyError, match="'1f2b' is not one of gpipe, 1f1b"):
        make_schedule("1f2b", 2, 2)
    with pytest.raises(TopologyError, match=r"pipeline.microbatches: 0 is below 1"):
        make_schedule("1f1b", 2, 0)
    with pytest.raises(TopologyError, match="interleaved_1f1b"):
        make_schedule("1f1b", 2, 2, 2)


def test_the_text_grid_shows_idle_time_and_the_picture_is_well_formed() -> None:
    text = draw_text(make_schedule("1f1b", 2, 2))
    assert text.splitlines()[:2] == ["rank 0 | F0 F1 .. .. B0 B0 .. B1 B1", "rank 1 | .. F0 B0 B0 F1 B1 B1 .. .."]
    assert "Bubble 33.3%" in text and "in flight per stage: 2, 1" in text
    svg = ElementTree.fromstring(draw_schedule(make_schedule("interleaved_1f1b", 2, 4, 2)).svg())
    titles = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert Counter(titles) == Counter(f"{s}{k}{m}" for s in range(4) for k in "FB" for m in range(4))


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("asked", [("1f1b", 4, 8, 1), ("interleaved_1f1b", 12, 24, 2), ("zb_h1", 3, 4, 1)])
def test_a_long_grid_goes_on_below_in_the_width_of_the_terminal(asked: tuple[str, int, int, int], width: int) -> None:
    plan = make_schedule(*asked)
    *whole, _, _, _, _ = draw_text(plan).splitlines()
    lines = draw_text(plan, line_width=width).splitlines()
    assert max(map(len, lines)) <= width
    grid = [line.split(" |") for line in lines if " |" in line]
    for rank in range(plan.num_ranks):
        name, cells = (part.strip() for part in whole[rank].split("|"))
        assert "".join(part for start, part in grid if start.strip() == name).strip() == cells


def test_the_command_prints_the_grid_and_writes_the_picture(tmp_path: Path) -> None:
    import typer

    from hf_dist.tools.cli.schedule import schedule

    app = typer.Typer()
    app.command()(schedule)
    path = tmp_path / "grid.svg"
    result = CliRunner().invoke(
        app, ["--schedule", "zb_h1", "--stages", "3", "--microbatches", "4", "--output", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert "rank 2 |" in result.output and "Bubble 14.3%" in result.output
    assert "a backward takes two" in result.output
    ElementTree.parse(path)

    (config := tmp_path / "ds.json").write_text(
        '{"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, "gradient_accumulation_steps": 6}'
    )
    of_file = CliRunner().invoke(app, ["--config", str(config)]).output
    assert "interleaved_1f1b: 4 stages on 2 ranks, 6 microbatches" in of_file
    asked = ["--config", str(config), "--microbatches", "4", "--virtual-stages", "1", "--schedule", "gpipe"]
    assert "gpipe: 2 stages on 2 ranks, 4 microbatches" in CliRunner().invoke(app, asked).output
