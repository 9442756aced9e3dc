"""transformers' `DistributedConfig` under `hf_dist.run`: its sizes are followed, and weights equal those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.hf.distributed_jobs import Case, refusals, save_models, train

pytest.importorskip("transformers.distributed.mixin", reason="DistributedConfig has sizes since 5.20 or so")
CASES: list[Case] = [
    {"name": "fsdp", "layout": {"fsdp_size": 2}, "rows": 4, "model": "llama", "sizes": [3, 1, 1]},
    {"name": "tp", "layout": {"tp_size": 2}, "rows": 8, "model": "llama", "model_first": True, "sizes": [0, 2, 1]},
    {"name": "ep", "layout": {"fsdp_size": 2, "ep_size": 2}, "rows": 4, "model": "moe", "sizes": [3, 1, 2]},
    {
        "name": "json",
        "layout": {"tp_size": 2},
        "rows": 8,
        "model": "moe",
        "config": '{"zero_optimization": {"stage": 1}}',
        "sizes": [1, 2, 1],
    },
]
WRONG: list[Case] = [
    {**CASES[0], "name": "stage", "config": '{\n"zero_optimization": {"stage": 1}}'},
    {**CASES[0], "name": "ranks", "layout": {"fsdp_size": 4}},
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """`outcomes(world)`: what the cases gave on the main rank of so many."""
    root = tmp_path_factory.mktemp("layouts")
    save_models(root)

    @functools.cache
    def run(world: int) -> list[Any]:
        # Alone, the layout plays no part: one case per model.
        cases = [*CASES, *WRONG] if world > 1 else [CASES[0], CASES[2]]
        return run_ranks(train, world, (str(root), cases))[0]

    return run


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["name"] for case in CASES])
def test_a_layout_is_followed_and_weights_are_those_of_one_process(number: int, outcomes: Any) -> None:
    case = CASES[number]
    here, alone = outcomes(2)[number], outcomes(1)[case["model"] == "moe"]
    assert not isinstance(here, str), here
    assert (here["sizes"], here["kinds"]) == (case["sizes"], ["Parameter"])
    assert here["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert here["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(here["weights"][name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (0, ":2: zero_optimization.stage: 1 is not 3, which distributed_config asks for (fsdp_size 2)"),
        (1, "distributed_config: fsdp_size 4 spans 4 ranks with the keys of the file, and the job has 2"),
    ],
)
def test_a_conflict_is_named_with_its_line(number: int, message: str, outcomes: Any) -> None:
    assert message in outcomes(2)[len(CASES) + number]


def test_models_that_others_distribute_are_named_as_what_they_are(tmp_path: Path) -> None:
    save_models(tmp_path)
    said = run_ranks(refusals, 2, (str(tmp_path),))[0]
    assert "is a DTensor, which fully_shard (FSDP2)" in said["fully_shard"] and "stage 3" in said["fully_shard"]
    assert "up_proj.weight is a DTensor, which parallelize_module" in said["distribute_tensor"]
    assert not [text for text in said.values() if "QLoRA" in text or "4 bits" in text]
    assert said["evaluated"] == said["followed"] == ""
    assert said["own loop"].startswith("ModelError: LlamaForCausalLM was loaded with distributed_config(tp_size=2)")
    assert said["layout"] == "{'tp': (2, 'tp_size')}"
