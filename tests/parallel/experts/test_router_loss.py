"""The auxiliary loss of a mixture's routers is that of one process on the joined batch, in loops, Trainer and TRL."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dist.parallel.experts.router_loss import _is_usual
from tests.attempts import attempts_by_name
from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs
from tests.parallel.experts import router_jobs
from tests.parity.train import relative

LOOPS = [(accumulation, stage, 1, "global") for accumulation in (1, 3) for stage in (0, 3)]
LOOPS += [(3, 1, 2, "global"), (2, 3, 1, "local")]
# Windows in shards are the Trainer's below.
LOOPS = LOOPS if FULL_GRID else [(1, 0, 1, "global"), (3, 1, 2, "global"), (2, 3, 1, "local")]
HERE = "tests.parallel.experts.router_jobs:"
TRAINED: dict[str, dict[str, Any]] = {
    **{f"trainer-z{stage}": {"stage": stage} for stage in (0, 3)},
    "trainer-over-stages": {"stage": 1, "pp": 2, "micro": 4, "per_device_eval_batch_size": 2},
}
TRAINED = some_of(TRAINED, "trainer-z3")  # the other stages, and those of a pipeline, are in `LOOPS`
LENGTH = {} if FULL_GRID else {"max_steps": 4}
"""An epoch of the Trainer."""
# SFT is as the Trainer; DPO runs pairs, and a second model.
TRL = [(kind, stage) for kind in ("sft", "dpo") for stage in (1, 3)] if FULL_GRID else [("dpo", 3)]


def everything(rank: int, world: int, families: list[str], folder: str) -> dict[str, Any]:
    """One spawn."""
    jobs: list[tuple[str, dict[str, Any]]] = [(HERE + "trainer_job", {**given, **LENGTH}) for given in TRAINED.values()]
    jobs += (
        [(HERE + "trl_job", {"kind": kind, "stage": stage, "micro": 2}) for kind, stage in TRL] if world == 2 else []
    )
    return {
        "families": router_jobs.auxiliary_on_ranks(rank, world, families),
        "loops": attempts_by_name(
            rank, world, {case: functools.partial(router_jobs.engine_loop, rank, world, *case) for case in LOOPS}
        ),
        "jobs": run_jobs(rank, world, jobs, folder) if world == 2 else [],
    }


@functools.cache
def families() -> list[str]:
    """A few of them, all with the full grid."""
    few = {
        "GptOssForCausalLM",
        "GraniteMoeForCausalLM",
        "Qwen3VLMoeForConditionalGeneration",
    }
    return router_jobs.families(None if FULL_GRID else few)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes(world)`: of rank 0."""

    @functools.cache
    def run(world: int) -> dict[str, Any]:
        folder = str(tmp_path_factory.mktemp(f"world{world}"))
        return run_ranks(everything, world, (families(), folder), timeout=900)[0]

    return run


@pytest.mark.parametrize("family", families())
def test_value_and_gradient_are_those_of_the_joined_batch(family: str, outcomes: Any) -> None:
    found = outcomes(2)["families"][families().index(family)]
    if family in router_jobs.NOT_TINY:
        pytest.skip(f"no tiny model: {found}")
    assert not isinstance(found, str), found
    value, joined, gradient = found
    assert value == pytest.approx(joined, rel=1e-5)
    assert gradient < 1e-5


def test_the_function_of_every_family_is_the_usual_one() -> None:
    import transformers as tf

    for family in families():
        assert _is_usual(getattr(sys.modules[getattr(tf, family).__module__], router_jobs.NAME)), family


@functools.cache
def loop_reference(accumulation: int, parts: int) -> dict[str, Any]:
    """One process."""
    return router_jobs.one_process(accumulation, parts)


def check(found: Any, wanted: dict[str, Any]) -> None:
    """Losses, norms, weights, whichever there are."""
    assert not isinstance(found, str), found
    for key in ("losses", "norms", "aux", "evaluated"):
        if key in wanted:
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
    for name, weight in wanted.get("weights", {}).items():
        assert relative(found["weights"][name], weight) < 1e-5, name


@pytest.mark.parametrize("world", [2, *([4] if FULL_GRID else [])])
@pytest.mark.parametrize("case", LOOPS, ids=lambda case: "-".join(map(str, case)))
def test_a_loop_of_ones_own_equals_one_process(case: Any, world: int, outcomes: Any) -> None:
    accumulation, _, pp, scope = case
    parts = world // pp if scope == "local" else 1
    check(outcomes(world)["loops"][case], loop_reference(accumulation, parts))


def test_the_mean_over_ranks_of_local_losses_is_another_function() -> None:
    assert loop_reference(2, 2)["losses"] != pytest.approx(loop_reference(2, 1)["losses"], rel=1e-5)


@functools.cache
def alone(kind: str, folder: Path) -> dict[str, Any]:
    """One process of the stock Trainer, or of TRL's."""
    if kind == "trainer":
        return router_jobs.stock_trainer(folder, 2, **LENGTH)
    return router_jobs.trl_job(folder, kind, None, 4)


@pytest.mark.parametrize("name", TRAINED)
def test_the_trainer_weighs_it_as_one_process(
    name: str, outcomes: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = outcomes(2)["jobs"][list(TRAINED).index(name)]
    check(found, alone("trainer", tmp_path_factory.getbasetemp() / "trainer"))


@pytest.mark.parametrize(("averages", "parts"), [(True, 6), (False, 3)])
def test_ranks_count_only_where_hf_multiplies_by_them(averages: bool, parts: int) -> None:
    from hf_dist.hf.window_loss import tell_router_loss

    router = SimpleNamespace(parts=None)
    trainer = SimpleNamespace(
        dist_engine=SimpleNamespace(router_loss=router),
        args=SimpleNamespace(average_tokens_across_devices=averages),
        accelerator=SimpleNamespace(num_processes=2),
    )
    tell_router_loss(trainer, 3)
    assert router.parts == parts


def test_in_an_evaluation_it_is_no_part_of_a_window() -> None:
    from hf_dist.dist.mesh import build_mesh
    from hf_dist.parallel.experts.router_loss import router_loss_for
    from tests.hf.recipes import make_model

    model = make_model("moe_router_loss")
    assert router_loss_for(model, build_mesh(device="cpu"), 3, "global") is not None
    batch, items = router_jobs.windows(1, 1)[0][0], torch.tensor(40)  # 8 rows of 5 targets
    model.eval()
    with torch.no_grad():
        plain, counted = model(**batch), model(**batch, num_items_in_batch=items)
    assert counted.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert torch.equal(counted.aux_loss, plain.aux_loss) and plain.aux_loss > 0


@pytest.mark.parametrize("index", range(len(TRL)), ids=[f"{kind}-z{stage}" for kind, stage in TRL])
def test_trl_equals_its_own_single_process(index: int, outcomes: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("trl", reason="TRL needs Python 3.11")
    found = outcomes(2)["jobs"][len(TRAINED) + index]
    kind, _ = TRL[index]
    check(found, alone(kind, tmp_path_factory.getbasetemp() / kind))


def test_a_copy_of_a_prepared_model_waits_for_nobody() -> None:
    import copy

    from hf_dist.dist.mesh import build_mesh
    from hf_dist.parallel.experts.router_loss import router_loss_for
    from tests.hf.recipes import make_model

    model = make_model("moe_router_loss")
    router = router_loss_for(model, build_mesh(device="cpu"), 2, "global")
    assert router is not None
    hooks = [hook.__self__ for hook in copy.deepcopy(model)._forward_pre_hooks.values() if hasattr(hook, "__self__")]
    assert [hook.joined for hook in hooks] == [False]
    batch = router_jobs.windows(1, 1)[0][0]
    plain, counted = model(**batch), model(**batch, num_items_in_batch=torch.tensor(40))
    assert torch.equal(plain.aux_loss, counted.aux_loss)
    own = 40 / 40 * (plain.loss - plain.aux_loss)  # 8 rows of 5 targets
    assert counted.loss.item() == pytest.approx((own + plain.aux_loss / 2).item(), rel=1e-6)
