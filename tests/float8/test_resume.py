"""A job that is resumed with float8 switched off, or on again, in another layout: states are those of bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.float8.training import Case, alone, batches_of, config_of, model_of
from tests.harness import run_ranks
from tests.sharding.wires.training import optimizer_of

needs.package("torchao", "it multiplies in float8")

CASE = Case(accumulation=2, steps=6, in_bf16=(2, 3))
PARTS = ((3, True, (0, 1)), (1, False, (2, 3)), (2, True, (4, 5)))
"""(ZeRO stage, whether in float8, steps) of each start."""


def in_three_starts(rank: int, world: int, root: str) -> dict[str, Any]:
    """Losses and the last gradient norm; what a checkpoint and an export hold."""
    import hf_dist

    losses = []
    for number, (stage, float8, steps) in enumerate(PARTS):
        case = replace(CASE, stage=stage)
        model, config = model_of(case), config_of(case)
        config["hf_dist"]["fp8"]["enabled"] = float8
        engine = hf_dist.initialize(model, config=config, optimizer=optimizer_of([*model.parameters()]))
        if number:
            engine.load_checkpoint(Path(root) / str(number - 1))
        for step in steps:
            mine = []
            for batch in batches_of(case, step)[rank]:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                mine.append(float(loss.detach()))
            losses.append(sum(mine) / len(mine))
        engine.save_checkpoint(Path(root) / str(number))
    norm = float(engine.get_global_grad_norm())
    return {"losses": losses, "norm": norm, "weights": hf_dist.hf.state_dict.full_state_dict(engine.sharded)}


def test_it_goes_on_as_one_process_that_switches(tmp_path: Path) -> None:
    ranks, wanted = run_ranks(in_three_starts, 2, (str(tmp_path),)), alone(CASE)
    for step, loss in enumerate(wanted["losses"]):
        assert sum(rank["losses"][step] for rank in ranks) / 2 == pytest.approx(loss, rel=1e-5)
    assert ranks[0]["norm"] == pytest.approx(wanted["norms"][-1], rel=1e-5)
    for name, value in wanted["weights"].items():
        apart = float((ranks[0]["weights"][name].float() - value.float()).norm() / value.float().norm())
        assert apart < 1e-5, (name, apart)
    # As of a run that always was in bf16: no file and no name comes from float8.
    plain = alone(replace(CASE, in_bf16=tuple(range(6))))
    assert plain["losses"] != wanted["losses"] and set(plain["weights"]) == set(ranks[0]["weights"])
