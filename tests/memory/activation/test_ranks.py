"""On ranks, at the two ends of ZeRO: checkpointing and chunks change no bit, tiles change nothing beyond rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.memory.loss import tiles
from tests.covering import FULL_GRID, cells, some_of
from tests.harness import run_ranks
from tests.memory.activation.families import VOCAB
from tests.memory.activation.on_ranks import run_cases, run_trainer_jobs

CHECKPOINTING = {
    "every block": {"activation_checkpointing": {"every_n_layers": 1}},
    "every second": {"activation_checkpointing": {"every_n_layers": 2}},
    "on the host": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "selective": {"activation_checkpointing": {"selective": True}},
    "all": {"activation_checkpointing": {"selective": True, "cpu_checkpointing": True, "every_n_layers": 2}},
}
TILED: dict[str, Any] = {"hf_dist": {"tiled_loss": True}}
AS_IT_IS: dict[str, Any] = {"hf_dist": {"tiled_loss": False}}
KINDS = ("whole", "gpt2", "lora", "frozen")
WORLDS, STAGES = (1, 2), (0, 3)
NAMED = {"plain": {}, "as it is": AS_IT_IS, **CHECKPOINTING, "tiled": TILED}
NAMED |= {"tiled and host": {**TILED, **CHECKPOINTING["on the host"]}}


def few(kinds: tuple[str, ...], names: list[str]) -> list[tuple[int, int, str, str]]:
    """World, stage, kind, section: all of them."""
    grid = cells({"world": WORLDS, "stage": STAGES, "kind": kinds, "name": names}, 4)
    return [(cell["world"], cell["stage"], cell["kind"], cell["name"]) for cell in grid]


if FULL_GRID:
    SAME_BITS = few(KINDS, ["as it is", *CHECKPOINTING])
    ROUNDED = few((*KINDS, "tied"), ["tiled", "tiled and host"])
else:  # every kind and section at one of the ends, beside each other: what they are compared with is run once
    SAME_BITS = [(1, 0, "whole", "on the host"), (1, 0, "whole", "selective"), (1, 0, "gpt2", "every block")]
    SAME_BITS += [(2, 3, "frozen", "all")]
    ROUNDED = [(1, 0, "whole", "tiled and host"), (1, 0, "gpt2", "tiled"), (2, 3, "lora", "tiled and host")]
    ROUNDED += [(2, 3, "tied", "tiled")]
RTOL = 1e-5


@pytest.fixture(scope="module")
def records() -> dict[tuple[Any, ...], Any]:
    """(world, kind, stage, section's name) -> what each rank recorded."""
    found: dict[tuple[Any, ...], Any] = {}
    for world in WORLDS:
        wanted = [(kind, stage, name) for ranks, stage, kind, name in (*SAME_BITS, *ROUNDED) if ranks == world]
        cases = list(dict.fromkeys([*((kind, stage, "plain") for kind, stage, _ in wanted), *wanted]))
        asked = [(kind, stage, NAMED[name]) for kind, stage, name in cases]
        small = tiles.BYTES_PER_LOGIT * VOCAB * 16
        results = run_ranks(run_cases, world, (asked, small), timeout=480)
        for i, (kind, stage, name) in enumerate(cases):
            found[world, kind, stage, name] = [rank[i] for rank in results]
    return found


def parts(records: dict[tuple[Any, ...], Any], *key: Any) -> list[dict[str, Any]]:
    for record in records[key]:
        assert isinstance(record, dict), record
    return records[key]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("world", "stage", "kind", "name"), SAME_BITS)
def test_checkpointing_and_chunks_change_no_bit(records: Any, world: int, stage: int, kind: str, name: str) -> None:
    for plain, found in zip(
        parts(records, world, kind, stage, "plain"), parts(records, world, kind, stage, name), strict=True
    ):
        assert found["losses"] == plain["losses"] and found["norms"] == plain["norms"]
        assert [n for n in plain["weights"] if not torch.equal(found["weights"][n], plain["weights"][n])] == []


@pytest.mark.parametrize(("world", "stage", "kind", "name"), ROUNDED)
def test_tiles_change_nothing_beyond_rounding(records: Any, world: int, stage: int, kind: str, name: str) -> None:
    for plain, found in zip(
        parts(records, world, kind, stage, "plain"), parts(records, world, kind, stage, name), strict=True
    ):
        assert found["tiled"] and not plain["tiled"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=RTOL)
        assert found["norms"] == pytest.approx(plain["norms"], rel=RTOL)
        for name_, weight in plain["weights"].items():
            assert float((found["weights"][name_] - weight).norm() / weight.norm().clamp(min=1e-12)) < RTOL, name_


TRAININGS: dict[str, dict[str, Any]] = {
    "off": {"config": AS_IT_IS},
    "by default": {},
    "with checkpointing": {"config": {**TILED, **CHECKPOINTING["all"]}},
    "smoothed": {"label_smoothing_factor": 0.1},
}
TRAININGS = some_of(TRAININGS, "off", "by default", "smoothed")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """At stage 3 on two ranks: tiles off, on by default, on by name with checkpointing; with label smoothing."""
    job = "tests.memory.activation.on_ranks:train_and_evaluate"
    common: dict[str, Any] = {"recipe": "plain", "stage": 3, "max_steps": 2}
    jobs = [(job, {**common, **changes}) for changes in TRAININGS.values()]
    found: list[dict[str, Any]] = run_ranks(
        run_trainer_jobs, 2, (jobs, str(tmp_path_factory.mktemp("trainer"))), timeout=480
    )[0]
    for record in found:
        assert isinstance(record, dict), record
    return dict(zip(TRAININGS, found, strict=True))


@pytest.mark.parametrize("which", [name for name in TRAININGS if name not in ("off", "smoothed")])
def test_the_trainer_gives_the_same_with_tiles_and_without(trainings: dict[str, dict[str, Any]], which: str) -> None:
    plain, found = trainings["off"], trainings[which]
    assert found["tiled"] and not plain["tiled"]
    for key in ("losses", "norms", "eval_loss"):
        assert found[key] == pytest.approx(plain[key], rel=RTOL), key
    for name, weight in plain["weights"].items():
        assert float((found["weights"][name] - weight).norm() / weight.norm().clamp(min=1e-12)) < RTOL, name


def test_label_smoothing_turns_tiles_off(trainings: dict[str, dict[str, Any]]) -> None:
    assert not trainings["smoothed"]["tiled"] and trainings["smoothed"]["losses"] != trainings["off"]["losses"]


def test_the_switches_are_read_from_the_folder_of_configs() -> None:
    from hf_dist.config import load_config

    config = load_config(Path(__file__).parents[3] / "configs" / "long_context.json")
    assert config.hf_dist.tiled_loss is True and config.activation_checkpointing.cpu_checkpointing
