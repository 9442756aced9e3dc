"""Every shipped config trains two steps as it is, and in fp32 all of them give the same losses; no code changes."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

FOLDER = Path(__file__).resolve().parent.parent / "configs"
FILES = sorted(FOLDER.glob("*.json"))
STEPS, RANKS = 2, 2
BASE = "zero0.json"
ALONE = "zero0.json on one rank"
"""What `BASE` gives on the rows of one data rank."""
MUON = "muon.json"
"""The one that names an optimizer."""
LOSS_RTOL = 1e-5
# Each mechanism once, on two ranks; `parity/` and `hf/` have the others, and several axes at once.
SHIPPED = [
    *("zero0", "zero3", "zero2_offload", "zero3_fp16", "zero3_fp32", "zero3_nvme", "local_sgd", "muon", "onebit_adam"),
    *("experts", "long_context", "pp_zero1", "tp_zero2"),
]
TRAINED = [path for path in FILES if FULL_GRID or path.stem in SHIPPED]
# Those whose base is `BASE`: their own numbers are compared in `parity/`.
COMPARED = [path for path in FILES if FULL_GRID or path.stem in ("zero0", "zero3_fp32", "zero3_nvme")]


def ranks_for(data: dict[str, Any]) -> int:
    """Pipeline stages x ranks that share a sequence x parts of a layer, times two data ranks.

    Where `alone` one data rank; two with HF_DIST_FULL_GRID=1.
    """
    return sharers(data) * (1 if alone(data) else RANKS)


def sharers(data: dict[str, Any]) -> int:
    """Ranks that train on the same rows."""
    stages = int(data.get("pipeline", {}).get("stages", 1))
    return (
        stages * int(data.get("sequence_parallel_size", 1)) * int(data.get("tensor_parallel", {}).get("autotp_size", 1))
    )


def alone(data: dict[str, Any]) -> bool:
    """Whether there is one data rank: of two axes, as eight ranks are dear; of one, but for experts and stages at ZeRO-3."""
    is_staged = "pipeline" in data and data.get("zero_optimization", {}).get("stage") == 3
    needs_two = recipe_for(data) == "moe" or is_staged
    return not FULL_GRID and (sharers(data) > RANKS or (sharers(data) == RANKS and not needs_two))


def recipe_for(data: dict[str, Any]) -> str:
    """A model that has what the config is about."""
    return "moe" if data.get("expert_parallel", {}).get("enabled") else "plain"


def in_folder(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with its files on disk in `folder`."""
    changed = copy.deepcopy(data)
    for section in ("offload_optimizer", "offload_param"):
        if "nvme_path" in changed.get("zero_optimization", {}).get(section, {}):
            changed["zero_optimization"][section]["nvme_path"] = str(folder)
    return changed


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """File -> (what it gave as shipped, what it gave in fp32); one spawn per number of ranks. "moe": a mixture at stage 0.

    What is no file has run in fp32 alone, what is not `COMPARED` as shipped alone.
    """
    found: dict[str, tuple[Any, Any]] = {}
    configs = {path.name: json.loads(path.read_text()) for path in TRAINED}
    files, compared = list(configs), [path.name for path in COMPARED]
    worlds = {name: ranks_for(data) for name, data in configs.items()}
    worlds |= {ALONE: 1} if any(alone(configs[name]) for name in compared) else {}
    worlds |= {"moe": ranks_for(configs[BASE])} if any(recipe_for(configs[name]) == "moe" for name in compared) else {}
    for world in sorted(set(worlds.values())):
        folder = tmp_path_factory.mktemp(f"world{world}")
        names = [name for name in worlds if worlds[name] == world]
        # At stage 0, as every other file's numbers are those of stage 0 with its optimizer.
        if MUON in set(names).intersection(compared):
            configs["muon0"] = {**configs[MUON], "zero_optimization": {"stage": 0}}
            names.append("muon0")
        jobs: list[Any] = []
        twins: dict[str, tuple[int, int]] = {}
        for name in names:
            shipped = in_folder(configs.get(name, configs[BASE]), folder)
            recipe = recipe_for(shipped) if name in configs or name == ALONE else name
            fp32 = copy.deepcopy({key: value for key, value in shipped.items() if key not in ("bf16", "fp16")})
            if "optimizer" in fp32:
                fp32["optimizer"]["params"]["ns_dtype"] = "fp32"
            settings = {"recipe": recipe, "stage": 0, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
            settings["warmup_steps"] = 0  # the first step changes weights, and the second has their loss
            runs = [shipped if name in files else fp32]
            runs += [fp32] if name in compared and shipped != fp32 else []
            twins[name] = len(jobs), len(jobs) + len(runs) - 1  # a file in fp32 runs once
            jobs += [("train", {**settings, "config": config}) for config in runs]
        results = run_ranks(run_jobs, world, (jobs, str(folder)))[0]
        found |= {name: (results[first], results[second]) for name, (first, second) in twins.items()}
    return found


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_every_config_trains_two_steps_as_shipped(path: Path, records: dict[str, tuple[Any, Any]]) -> None:
    record = records[path.name][0]
    assert isinstance(record, dict), record
    assert len(record["losses"]) == STEPS and all(math.isfinite(loss) for loss in record["losses"])


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.stem)
def test_in_fp32_every_config_gives_the_losses_of_zero0(path: Path, records: dict[str, tuple[Any, Any]]) -> None:
    record = records[path.name][1]
    assert isinstance(record, dict), record
    data = json.loads(path.read_text())
    base = "muon0" if path.name == MUON else "moe" if recipe_for(data) == "moe" else ALONE if alone(data) else BASE
    assert record["losses"] == pytest.approx(records[base][1]["losses"], rel=LOSS_RTOL)


def test_the_readme_lists_every_config() -> None:
    rows = dict(re.findall(r"^\| `(\w+\.json)` \|(.*)$", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert sorted(rows) == [path.name for path in FILES]
