"""Movements of replicas that travel in a codec: equal to one process that applies the same function; bytes by the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.dist.coded import Wire
from hf_dist.tensors.codecs import codec_of
from tests.harness import run_ranks
from tests.parallel.local_sgd.encoded import Met, alone, on_ranks, two_ranks
from tests.parity.train import relative

CASES: dict[str, Met] = {
    "int8": Met(),
    "mean of movements": Met(stage=1, outer_lr=1.0, momentum=0.0, meetings="int4", feedback=True),
    "int4, fragments": Met(every=4, fragments=2, overlap=1, mix=0.5, meetings="int4", steps=9),
    "fp8, every step": Met(stage=2, every=1, meetings="fp8_e4m3", feedback=True, accumulation=2),
    "shards, gradients in int8": Met(world=2, stage=3, weights="int8", gradients="int8", feedback=True),
    "shards, fragments": Met(
        world=2, stage=2, every=3, fragments=3, overlap=1, meetings="int4", feedback=True, bf16=True
    ),
    "four replicas": Met(replicas=4, stage=1, every=3, lora=True, momentum=0.0),
}


RESUMED = Met(meetings="int4", feedback=True, every=2, steps=8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks found, after one start."""
    cases = [case for case in CASES.values() if case.num_ranks == 2]
    return run_ranks(two_ranks, 2, (cases, RESUMED, str(tmp_path_factory.mktemp("meetings"))), timeout=300)


@pytest.fixture(scope="module")
def outcomes(pair: list[Any]) -> dict[str, list[Any]]:
    """By case: what each rank found."""
    twos, fours = ([n for n, case in CASES.items() if case.num_ranks == world] for world in (2, 4))
    found = {name: [rank["cases"][i] for rank in pair] for i, name in enumerate(twos)}
    ranks = run_ranks(on_ranks, 4, ([CASES[name] for name in fours],), timeout=300)
    return found | {name: [rank[i] for rank in ranks] for i, name in enumerate(fours)}


@pytest.mark.parametrize("name", CASES)
def test_replicas_equal_one_process_that_rounds_what_they_send(name: str, outcomes: dict[str, list[Any]]) -> None:
    case, ranks = CASES[name], outcomes[name]
    expected = alone(case, ranks[0]["parts"])
    for replica in range(case.replicas):
        here = ranks[replica * case.world : (replica + 1) * case.world]
        losses = [sum(row) / len(here) for row in zip(*(found["losses"] for found in here), strict=True)]
        assert losses == pytest.approx(expected["losses"][replica], rel=1e-6)
        assert here[0]["norms"] == pytest.approx(expected["norms"][replica], rel=1e-6)
    for found in ranks:
        for parameter, weight in found["weights"].items():
            assert relative(weight, expected["weights"][parameter]) < 1e-6, parameter


@pytest.mark.parametrize("name", CASES)
def test_bytes_between_replicas_are_those_of_the_codec(name: str, outcomes: dict[str, list[Any]]) -> None:
    case = CASES[name]
    codec = codec_of(case.meetings, case.block)
    assert codec is not None
    for found in outcomes[name]:
        parts = [[-(-n // (case.replicas * codec.block)) * codec.block for n in some] for some in found["numels"]]
        half = [(case.replicas - 1) * sum(map(codec.nbytes, some)) for some in parts]
        for step, sent in enumerate(found["sent"], 1):
            # Movements leave at once; without a GPU their means leave where they are taken up.
            taken_up = case.starting(step - case.overlap) if step > case.overlap else []
            assert sent == sum(half[p] for p in (*case.starting(step), *taken_up)), step


@pytest.mark.parametrize("name", CASES)
def test_bytes_at_rest_have_the_anchor(name: str, outcomes: dict[str, list[Any]]) -> None:
    for found in outcomes[name]:
        for at_rest, planned in found["held"]:
            assert at_rest == planned


def test_what_messages_left_out_is_resumed_bit_for_bit(pair: list[Any]) -> None:
    for rank in pair:
        found = rank["resumed"]
        assert found["straight"][0] == found["resumed"][0]
        for name, weight in found["straight"][1].items():
            assert torch.equal(weight, found["resumed"][1][name]), name


def test_a_loss_scale_does_not_change_the_unit_of_movements() -> None:
    codec = codec_of("int4", 64)
    assert codec is not None
    wire = Wire(codec, feedback=True, of_gradients=False)
    wire.encoded("parts", torch.randn(1, 64))
    before = wire.residuals["parts"].values
    assert before is not None
    kept = before.clone()
    wire.multiply(0.5)
    assert torch.equal(kept, before)
