"""Hidden states and gradients that travel between stages in a codec: equal to one process that rounds at the same places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.parallel.pipeline.freight import Freight
from hf_dist.parallel.pipeline.probe import TensorSpec
from hf_dist.tensors.codecs import codec_of
from tests.covering import some_of
from tests.harness import run_ranks
from tests.parallel.pipeline.freight.training import Staged, alone, bytes_between, on_stages
from tests.parity.train import relative

CASES: dict[str, Staged] = {
    "1f1b int8": Staged(),
    "gpipe int4 bf16": Staged(schedule="gpipe", stages="int4", bf16=True),
    "interleaved fp8": Staged(family="GPT2", schedule="interleaved_1f1b", virtual=2, stages="fp8_e4m3", accumulation=4),
    "zb_h1 int8, tied": Staged(family="GPT2", schedule="zb_h1", tied=True),
    "fewer bytes as they are": Staged(stages="int8", bf16=True, accumulation=1),
    "stage 3 with wires": Staged(stage=3, weights="int8", gradients="int8", accumulation=1),
    "tensor parallel": Staged(tp=2, world=1, stages="fp8_e4m3"),
    "three stages, checkpointing": Staged(pp=3, world=1, stages="int4", checkpointing=True),
    "three stages, zb_h1 bf16": Staged(pp=3, world=1, family="Qwen3", schedule="zb_h1", stages="int4", bf16=True),
}
CASES = some_of(
    CASES,
    *("1f1b int8", "interleaved fp8", "zb_h1 int8, tied", "stage 3 with wires", "tensor parallel"),
    "three stages, checkpointing",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    """By case: what each rank found; a spawn for each number of ranks."""
    found: dict[str, list[Any]] = {}
    for world in sorted({case.num_ranks for case in CASES.values()}):
        names = [name for name, case in CASES.items() if case.num_ranks == world]
        ranks = run_ranks(on_stages, world, ([CASES[name] for name in names],), timeout=300)
        found |= {name: [rank[i] for rank in ranks] for i, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tp == 1])
def test_stages_equal_one_process_that_rounds_at_the_same_places(name: str, outcomes: dict[str, list[Any]]) -> None:
    expected = alone(CASES[name])
    for found in outcomes[name]:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6)
        for parameter, weight in found["weights"].items():
            if parameter in expected["weights"]:  # a tied one has one name there
                assert relative(weight, expected["weights"][parameter]) < 1e-6, parameter


def test_slices_of_layers_differ_by_rounding_alone(outcomes: dict[str, list[Any]]) -> None:
    # Products of slices add up in another order, and a number between two steps of a codec may be rounded to the other one.
    expected = alone(CASES["tensor parallel"])
    for found in outcomes["tensor parallel"]:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_bytes_between_stages_are_those_of_the_codec(name: str, outcomes: dict[str, list[Any]]) -> None:
    assert sum(found["sent"] for found in outcomes[name]) == bytes_between(CASES[name])


def test_only_hidden_states_are_encoded() -> None:
    """A position bias with minus infinity for hidden tokens would erase its block."""
    tensors = [
        torch.randn(2, 3, 100),
        torch.full((1, 4, 3, 100), -torch.inf),
        torch.arange(6).view(2, 3),
        torch.randn(2, 5, 100),
        torch.randn(6, 4),
        torch.tensor(1.5),
        torch.randn(2, 3, 100).bool(),
        torch.empty(2, 0, 100),
    ]
    specs = [TensorSpec.of(t) for t in tensors]
    codec = codec_of("int8", 64)
    assert codec is not None
    freight = Freight(codec)
    wires = freight.packed(tensors, specs)
    assert [w.numel() for w in wires] == freight.nbytes(specs)
    assert freight.nbytes(specs)[0] == 6 * codec.nbytes(100)
    arrived = freight.unpacked(wires, specs)
    for i, (sent, back) in enumerate(zip(tensors, arrived, strict=True)):
        assert back.shape == sent.shape and back.dtype == sent.dtype
        if i in (0, 3):
            bound = torch.stack([codec.bound(row) for row in sent.reshape(-1, 100)]).view(sent.shape)
            assert ((back - sent).abs() <= bound).all() and not torch.equal(back, sent)
        else:
            assert torch.equal(back, sent)


def test_what_the_sender_keeps_is_not_rounded() -> None:
    sent = torch.randn(2, 3, 128)
    before = sent.clone()
    Freight(codec_of("int4", 64)).packed([sent], [TensorSpec.of(sent)])
    assert torch.equal(sent, before)


def test_the_host_reads_nothing_of_a_device() -> None:
    """Tensors on meta have no numbers, so whoever asks for one raises."""
    sent = torch.empty(2, 3, 100, device="meta")
    specs = [TensorSpec.of(sent)]
    freight = Freight(codec_of("int8", 64))
    assert freight.unpacked(freight.packed([sent], specs), specs)[0].shape == sent.shape
