"""Lightning's Trainer with our strategy equals Lightning alone in one process on the joined batch."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.lightning import DistStrategy
from tests import forked, needs
from tests.covering import FULL_GRID_ONLY, some_of
from tests.harness import ROOT
from tests.hf.on_ranks import Job, found, outcomes_by_world

needs.package("lightning", "the test extra installs it")
JOBS = "tests.lightning.jobs:"


def job(name: str, **arguments: Any) -> Job:
    """One of `jobs.py`."""
    return (JOBS + name, arguments)


GRID = [*((stage, "llama") for stage in (0, 1, 2, 3)), (3, "lora")]
JSON_OPTIMIZER = {"type": "AdamW", "params": {"lr": 5e-3, "eps": 1e-3, "weight_decay": 0.01}}
PLAIN = job("fit", stage=None)
LORA = job("fit", stage=None, kind="lora")
SHORT = job("without_schedule", stage=None)
BY_HAND = job("by_hand", stage=None)
PARTS = job("parts", stage=None)
SPLIT = {"tensor_parallel": {"autotp_size": 2}}
CASES: dict[str, tuple[Job, Job]] = {
    **{f"z{z}-{kind}": (job("fit", stage=z, kind=kind), PLAIN if kind == "llama" else LORA) for z, kind in GRID},
    "tensor-parallel": (job("fit", stage=1, config=SPLIT, shared=True), PLAIN),
    "clipped-by-json": (job("fit", stage=2, config={"gradient_clipping": 0.5}, gradient_clip_val=None), PLAIN),
    "validated-before": (job("validated_before", stage=3), PLAIN),
    "json-optimizer": (job("without_schedule", stage=2, optimizer=JSON_OPTIMIZER), SHORT),
    "pytorch-lightning": (job("other_package", stage=3), SHORT),
    **{f"parts-z{z}": (job("parts", stage=z), PARTS) for z in (1, 3)},
    "by-hand": (job("by_hand", stage=2), BY_HAND),
}
# `test_checkpoints.py` fits with other arguments, also against Lightning alone.
CASES = some_of(CASES, "validated-before")
REST = some_of({name: job(name) for name in ("seen", "halves", "refusals")}, "seen", "refusals")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One spawn; Lightning alone in this process, which has to import it anyway."""
    sharded = [mine for mine, _ in CASES.values()]
    ranks = outcomes_by_world({2: [*sharded, *REST.values()]}, tmp_path_factory)

    @functools.cache
    def alone() -> dict[str, list[Any]]:
        from tests.lightning import jobs

        folder = tmp_path_factory.mktemp("alone")
        asked = {str(reference): reference for _, reference in CASES.values()}
        return {
            name: [getattr(jobs, path.removeprefix(JOBS))(folder, **given)] for name, (path, given) in asked.items()
        }

    return lambda world: alone() if world == 1 else ranks(world)


@pytest.mark.parametrize("case", CASES)
def test_fit_equals_lightning_alone(case: str, outcomes: Any) -> None:
    sharded, alone = CASES[case]
    (reference,) = found(outcomes, 1, alone)
    for rank in found(outcomes, 2, sharded):
        for key in ("losses", "norms", "rates"):
            assert key != "losses" or len(set(reference[key])) >= 5
            assert rank[key] == pytest.approx(reference[key], rel=1e-5), key
        assert rank["logged"] == pytest.approx(reference["logged"], rel=1e-5)
        assert rank["steps"] == reference["steps"] >= 3
        for name, value in reference["weights"].items():
            assert torch.allclose(rank["weights"][name], value, rtol=1e-5, atol=1e-6), name


def test_validation_before_and_after_sees_the_weights_of_then(outcomes: Any) -> None:
    (rank, _), (reference,) = found(outcomes, 2, CASES["validated-before"][0]), found(outcomes, 1, PLAIN)
    assert rank["before"] != rank["after"]
    assert rank["after"] != reference["logged"]["val"], "there were steps after the last validation of fit"


def test_lightning_deals_other_rows_to_each_rank(outcomes: Any) -> None:
    ranks = found(outcomes, 2, REST["seen"])
    assert [replicas for _, replicas in ranks] == [2, 2]
    assert ranks[0][0] != ranks[1][0]


@FULL_GRID_ONLY  # what is refused below shows which of the two decides
def test_half_precision_is_the_configurations(outcomes: Any) -> None:
    for rank in found(outcomes, 2, REST["halves"]):
        by_json, by_argument = rank
        assert by_json == by_argument
        assert by_json[1] == "torch.bfloat16"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "mixed",
            "ConfigError: precision: 'bf16-mixed' would work around a model whose dtype the configuration decides",
        ),
        ("half", "differs from bf16.enabled of the configuration, which is false"),
        ("pipeline", "pipeline.stages: 2 is not available in Lightning"),
        ("two optimizers", "configure_optimizers: 2 optimizers: the engine has one"),
        ("listed", "Listed.model is a ModuleList, which has no forward"),
        ("accumulation", "gradient_accumulation_steps: 4 differs from Trainer(accumulate_grad_batches=2)"),
        ("clipping", "gradient_clipping: 1.0 differs from Trainer(gradient_clip_val=0.5)"),
        ("optimizer twice", "optimizer: is given by configure_optimizers, too"),
        ("batch norm", "sync_batchnorm: True has no effect"),
        ("foreign", "holds no lightning.pt"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(name: str, says: str, outcomes: Any) -> None:
    for rank in found(outcomes, 2, REST["refusals"]):
        assert says in rank[name]


def test_a_version_that_lost_what_is_overridden_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.plugins.precision import Precision

    from hf_dist.errors import ModelError
    from hf_dist.lightning import packages

    packages.joined.cache_clear()
    monkeypatch.delattr(Precision, "clip_grad_by_norm")
    with pytest.raises(ModelError, match="Precision has no clip_grad_by_norm any more, which hf_dist overrides"):
        DistStrategy({})
    packages.joined.cache_clear()


def test_lightning_starts_the_ranks_itself(tmp_path: Path) -> None:
    """Its launcher leaves RANK out for the first process."""
    script = Path(__file__).parent / "script.py"
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    env["PYTHONPATH"] = os.pathsep.join([ROOT, env.get("PYTHONPATH", "")])
    done = forked.run([sys.executable, str(script), str(tmp_path)], env=env, timeout=240)
    assert done.returncode == 0, done.stdout
    said = [path.read_text() for path in sorted(tmp_path.glob("rank*.txt"))]
    assert [line.split()[:4] for line in said] == [["rank", "0", "of", "2"], ["rank", "1", "of", "2"]], done.stdout
    assert said[0].split("weights")[1] == said[1].split("weights")[1]
