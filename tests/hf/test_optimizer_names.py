"""Every name of `optim=` of the Trainer on two ranks: the numbers of one process, or refused by name. Never others.

Names whose package is not installed are left out: `pip install -e ".[optimizers]"` brings all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.training_args import OptimizerNames

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.optimizer_names import adafactor_rates, alone, on_two, options, parted, shown_rates, small_model

ELSEWHERE = {
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"), "other hardware, or gone"),
    **dict.fromkeys(("adalomo", "galore_adamw_8bit"), "CUDA"),
    **{f"{name}_layerwise": "HF refuses it on ranks" for name in ("galore_adamw", "galore_adafactor", "apollo_adamw")},
    "galore_adamw_8bit_layerwise": "both",
}
"""Names that two ranks on CPUs cannot try, and why."""
REFUSED = {
    "grokadamw": "GrokAdamW of grokadamw keeps tensors in its param groups",
    "lomo": "Lomo of lomo_optim updates parameters during the backward pass",
}
"""What the error says."""
NAMES = sorted(name.value for name in OptimizerNames if name.value not in ELSEWHERE)
RESUMED = (
    *("adamw_torch", "adafactor", "schedule_free_adamw", "galore_adamw", "galore_adafactor", "apollo_adamw"),
    *("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit"),
)
"""States of every shape: of elements, of whole tensors, in 8 and 4 bits, objects that project."""
STAGES = {name: (1, 3) if FULL_GRID else (3,) if name in RESUMED else (1,) for name in NAMES}
"""States of elements alone are cut at stage 3 as at stage 1; those of other shapes are at stage 1 where they are saved."""
ALIKE = ("adamw_8bit", "ademamix_8bit", "lion_32bit", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit")
if not FULL_GRID:  # of bitsandbytes every class once: pages and other bits are options of it
    STAGES = {name: at for name, at in STAGES.items() if name not in ALIKE and not name.startswith("paged_")}
    # torchao compiles its step, for half a minute; `test_block_states.py` has states of blocks.
    STAGES = {name: at for name, at in STAGES.items() if name not in ("adamw_torch_8bit", "adamw_torch_4bit")}
    RESUMED = tuple(name for name in RESUMED if name in STAGES)
WORLDS, RATES = ((1, 4), (0, 1, 3)) if FULL_GRID else ((1,), (0, 3))
"""Ranks that go on, and stages at which rates are shown."""
ABSENT = ("You need to install", "You need to have", "Please install", "No module named")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """What every one of two ranks returned, and the folder."""
    folder = str(tmp_path_factory.mktemp("trained"))
    return run_ranks(on_two, 2, (STAGES, list(RESUMED), RATES, folder), timeout=400), folder


def test_every_name_gives_the_numbers_of_one_process_or_is_refused(trained: tuple[list[Any], str]) -> None:
    start = small_model().state_dict()
    tried = []
    for name, found in trained[0][0][0].items():
        if any(isinstance(outcome, str) and any(word in outcome for word in ABSENT) for outcome in found.values()):
            continue
        tried.append(name)
        for stage, outcome in found.items():
            if name in REFUSED:
                assert isinstance(outcome, str) and f"ConfigError: optimizer: {REFUSED[name]}" in outcome, (
                    name,
                    stage,
                    outcome,
                )
                continue
            assert not isinstance(outcome, str), f"{name}, stage {stage}: {outcome}"
        if name in REFUSED:
            continue
        weights, loss = alone(name, trained[1])
        for stage, (ours, our_loss) in found.items():
            for key, value in weights.items():
                update = (value - start[key]).norm()
                assert (ours[key] - value).norm() <= 1e-5 * update, f"{name}, stage {stage}: {key}"
            assert our_loss == pytest.approx(loss, rel=1e-6), f"{name}, stage {stage}: evaluation"
    assert "adamw_torch" in tried


def test_states_of_every_shape_are_resumed_at_another_layout(trained: tuple[list[Any], str]) -> None:
    """Two ranks at stage 1 save; four at stage 3, and one alone, go on: the weights of one process that never stopped."""
    start = small_model().state_dict()
    (_, first, _), folder = trained[0][0], trained[1]
    absent = [n for n, found in first.items() if isinstance(found, str) and any(word in found for word in ABSENT)]
    here = [name for name in RESUMED if name not in absent]
    assert "adafactor" in here
    assert not any(isinstance(first[name], str) for name in here), [first[name] for name in here]
    for world in WORLDS:
        found = run_ranks(parted, world, (here, folder, 3, True), timeout=400)[0]
        for name in here:
            outcome = found[name]
            assert not isinstance(outcome, str), f"{name} on {world}: {outcome}"
            weights, loss = alone(name, folder)
            assert outcome[1] == pytest.approx(loss, rel=1e-6), (name, world)
            for key, value in weights.items():
                update = (value - start[key]).norm()
                assert (outcome[0][key] - value).norm() <= 1e-5 * update, f"{name} on {world}: {key}"


def test_rates_that_adafactor_chooses_are_shown_on_every_rank(trained: tuple[list[Any], str], tmp_path: Path) -> None:
    """HF's AdafactorSchedule reads what only the owner of a parameter has."""
    from transformers import Trainer, TrainingArguments

    expected = adafactor_rates(TrainingArguments(str(tmp_path), **options("adafactor")), Trainer, 1)
    assert len(expected) == 3
    assert 0 < expected[0][0] != expected[0][1]
    ranks = [found for _, _, found in trained[0]]
    if FULL_GRID:
        ranks += run_ranks(shown_rates, 1, (str(tmp_path), RATES), timeout=400)
    for found in ranks:
        for stage, rates in found.items():
            for got, right in zip(rates, expected, strict=True):
                assert got == pytest.approx(right, rel=1e-5), stage
