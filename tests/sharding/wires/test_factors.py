"""PowerSGD: gradients in two thin factors equal one process that sends itself the same; bytes by the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_dist.dist.coded import Residual
from hf_dist.dist.low_rank import LowRank, LowRankMean, matrices_of, orthonormal
from hf_dist.dist.mesh import MeshAxis
from tests.harness import run_ranks
from tests.parity.train import relative
from tests.sharding.wires.factors import Factors, alone, on_ranks, two_ranks

CASES: dict[str, Factors] = {
    "rank 2": Factors(),
    "rank 1 at once, tied": Factors(rank=1, start=0, tied=True, family="gpt2"),
    "no feedback, cold": Factors(rest=False, warm=False, start=0, accumulation=2),
    "bf16": Factors(bf16=True, rank=3, start=0),
    "factors in bf16": Factors(wire="bf16", start=0),
    "all matrices, lora": Factors(least=0.1, rank=1, start=0, lora=True, checkpointing=True),
    "three ranks": Factors(world=3, family="bert", rank=2, start=2, steps=5),
}
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks found, after one start."""
    cases = [case for case in CASES.values() if case.world == 2]
    return run_ranks(two_ranks, 2, (cases, str(tmp_path_factory.mktemp("factors"))), timeout=300)


@pytest.fixture(scope="module")
def outcomes(pair: list[Any]) -> dict[str, list[Any]]:
    """By case: what each rank found."""
    twos, threes = ([n for n, case in CASES.items() if case.world == world] for world in (2, 3))
    found = {name: [rank["cases"][i] for rank in pair] for i, name in enumerate(twos)}
    ranks = run_ranks(on_ranks, 3, ([CASES[name] for name in threes],), timeout=300)
    return found | {name: [rank[i] for rank in ranks] for i, name in enumerate(threes)}


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process_that_applies_the_same_function(name: str, outcomes: dict[str, list[Any]]) -> None:
    expected, ranks = alone(CASES[name]), outcomes[name]
    losses = [sum(row) / len(ranks) for row in zip(*(found["losses"] for found in ranks), strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=TOLERANCE)
    for found in ranks:
        assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        for parameter, weight in found["weights"].items():
            if parameter in expected["weights"]:  # a tied one has one name there
                assert relative(weight, expected["weights"][parameter]) < TOLERANCE, parameter


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_factors(name: str, outcomes: dict[str, list[Any]]) -> None:
    case = CASES[name]

    def ring(numel: int) -> int:
        return 2 * (case.world - 1) * numel * (2 if case.wire else 4) // case.world

    for found in outcomes[name]:
        for step, sent in enumerate(found["sent"]):
            expected = []
            for group, whole in zip(found["groups"], found["whole"], strict=True):
                shapes = [shape for _, shape in group if case.is_sent_in_factors(shape)]
                if step < case.start or not shapes:
                    expected.append(ring(whole))
                    continue
                beside = sum(math.prod(shape) for _, shape in group if not case.is_sent_in_factors(shape))
                ranks = [case.columns_of(shape) for shape in shapes]
                first = sum(rank * shape[0] for rank, shape in zip(ranks, shapes, strict=True))
                second = sum(rank * math.prod(shape[1:]) for rank, shape in zip(ranks, shapes, strict=True))
                expected += [ring(first + beside), ring(second)]
            assert sent == sorted(expected), step


def test_the_same_layout_resumes_bit_for_bit(pair: list[Any]) -> None:
    for rank in pair:
        found = rank["resumed"]
        assert found["straight"][0] == found["resumed"][0]
        for name, weight in found["straight"][1].items():
            assert torch.equal(weight, found["resumed"][1][name]), name


def test_a_step_with_inf_leaves_no_trace(pair: list[Any]) -> None:
    for rank in pair:
        found = rank["inf"]
        assert found["same"] and not any(found["changed"])
        assert all(map(math.isfinite, found["losses"]))


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_columns_become_orthonormal_and_missing_directions_zero(scale: float) -> None:
    made = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) * scale
    found = orthonormal(made)
    assert torch.allclose(found.T @ found, torch.eye(4), atol=1e-3)
    made[:, 3] = made[:, 0]
    found = orthonormal(made)
    assert found.isfinite().all() and torch.linalg.matrix_norm(found.T @ found, 2) < 1 + 1e-3
    assert not orthonormal(torch.zeros(40, 4)).any()
    made[2, 1] = torch.nan
    assert not orthonormal(made).isfinite().all()


def test_the_host_reads_nothing_of_a_device() -> None:
    """Tensors on meta have no numbers, so whoever asks for one raises."""
    form = LowRank(rank=2, start=0)
    wire = LowRankMean(form, *matrices_of([("w", (40, 30), 0), ("b", (40,), 1216)], form))
    wire.residuals["directions"] = Residual()
    wire.residuals["directions"].values = torch.empty(60, device="meta")
    for _ in range(2):
        wire.all_reduce(MeshAxis("shard", 1, 0, None), torch.empty(1280, device="meta")).wait()
