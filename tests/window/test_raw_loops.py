"""Raw torch loops on a prepared model: `p.grad`, torch's clipping, the plain optimizer's calls, failures, written weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_dist
from hf_dist.errors import ModelError
from hf_dist.sharding.full_params import full_tensors
from tests.covering import FULL_GRID, cells, chosen, some_of
from tests.harness import run_ranks
from tests.window import scripts
from tests.window.nets import Blocks, Kit, Shares, batch, config, loss_of, on_hf_dist, on_torch, sgd, weights

RELATIVE = 1e-5
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def close(found: tuple[torch.Tensor, list[float]], wanted: tuple[torch.Tensor, list[float]]) -> None:
    """Weights and notes are equal."""
    torch.testing.assert_close(found[0], wanted[0], rtol=RELATIVE, atol=RELATIVE * float(wanted[0].abs().max()))
    assert found[1] == pytest.approx(wanted[1], rel=RELATIVE)


def cases() -> list[Any]:
    """(script, stage)."""
    found = [(script, stage) for script in scripts.ANY_STAGE for stage in range(4)]
    found += [(script, stage) for script in scripts.NEEDS_WHOLE_WEIGHTS for stage in range(3)]
    return found


def passes(case: Any) -> dict[str, Any]:
    """Every script at stage 3, and at one of those where weights are whole."""
    return {"passes": (case[0], case[1] == 3), "stage": case[1]}


ON_RANKS = [
    scripts.clipped_by_torch, scripts.clipped_by_infinity_norm, scripts.clipped_by_value, scripts.parts_clipped_apart,
    scripts.more_backward_after_clipping, scripts.more_backwards_than_announced, scripts.head_by_itself_then_the_rest,
    scripts.gradients_scaled_by_hand, scripts.gradients_of_the_head_dropped, scripts.no_zero_grad,
    scripts.zeroed_in_place_where_a_part_is_unused, scripts.scaled_by_torch, scripts.gradients_set_by_hand,
    scripts.optimizer_zero_grad_skips_a_batch, scripts.written_inside_forward, scripts.written_through_data,
]  # fmt: skip
"""What ranks have to agree about: norms, gradients of which each has a part, writes."""
TWO_RANKS = chosen(cases(), passes, 1)
ALONE = cases()
if not FULL_GRID:  # where weights are whole, these run with the optimizer on the host
    TWO_RANKS = [(script, 1 if script in scripts.NEEDS_WHOLE_WEIGHTS else 3) for script in ON_RANKS]
    ALONE = [case for case in chosen(ALONE, passes, 1) if case[0] not in ON_RANKS]


@pytest.mark.parametrize(("script", "stage"), ALONE, ids=lambda x: getattr(x, "__name__", f"stage{x}"))
def test_a_torch_loop_on_a_prepared_model_gives_the_numbers_of_torch(script: Callable[[Kit], None], stage: int) -> None:
    close(on_hf_dist(script, config(stage)), on_torch(script))


ON_HOST = [(script, stage) for script in [*scripts.ANY_STAGE, *scripts.NEEDS_WHOLE_WEIGHTS] for stage in (1, 2)]
if not FULL_GRID:  # in turn at either, without those that fail before the optimizer has a say
    ON_HOST = [
        case
        for i, case in enumerate(ON_HOST)
        if i % 4 in (0, 3) and case[0] in (*ON_RANKS, *scripts.NEEDS_WHOLE_WEIGHTS)
    ]


@pytest.mark.parametrize(("script", "stage"), ON_HOST, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_same_with_the_optimizer_on_the_host(script: Callable[[Kit], None], stage: int) -> None:
    settings = config(stage)
    settings["zero_optimization"].update(OFFLOAD)
    close(on_hf_dist(script, settings), on_torch(script))


@pytest.mark.parametrize("stage", range(4))
def test_a_step_has_nothing_of_a_backward_that_failed_before_it(stage: int) -> None:
    found = on_hf_dist(functools.partial(scripts.stepped_after_a_backward, failed=True), config(stage))
    close(found, on_torch(functools.partial(scripts.stepped_after_a_backward, failed=False)))


@pytest.mark.parametrize("stage", range(4))
def test_a_unit_inside_of_another_units_forward(stage: int) -> None:
    close(on_hf_dist(scripts.plain_steps, config(stage), Shares), on_torch(scripts.plain_steps, Shares))


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda p: p.add_(1),
    "through data": lambda p: p.data.add_(1),
    "assigned": lambda p: setattr(p, "data", p.data + 1),
    "copied": lambda p: p.copy_(p + 1),
}


class Counting(torch.nn.Module):
    """Blocks with a frozen weight that forward writes: a counter, the momentum encoder of another one."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.seen = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(8), requires_grad=False) for _ in range(3))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, seen in zip(self.blocks, self.seen, strict=True):
            with torch.no_grad():
                self.write(seen)
            x = x + torch.tanh(block(x)) * (1 + 0.1 * seen)
        return self.head(x)


def trained_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def frozen_writes(rank: int, world: int, stages: Any) -> dict[tuple[str, int], torch.Tensor]:
    """Weights after three steps."""
    found = {}
    for way, stage in itertools.product(WAYS, stages):
        model = Counting(WAYS[way])
        optimizer = trained_sgd(model)
        engine = hf_dist.initialize(model, config=config(stage), optimizer=optimizer)
        scripts.plain_steps(Kit(model, optimizer, lambda i: batch(i, 4 * world)[4 * rank : 4 * rank + 4], []))
        assert engine.global_steps == 4
        found[way, stage] = weights(model)
    return found


ALONE_STAGES, STAGES_OF_TWO = (range(4), (1, 3)) if FULL_GRID else ((1,), (3,))


def test_frozen_weights_that_forward_writes_stay_written() -> None:
    for world in (1, 2):
        model = Counting(WAYS["in place"])
        scripts.plain_steps(Kit(model, trained_sgd(model), lambda i, n=4 * world: batch(i, n), []))
        wanted = weights(model)
        ranks = run_ranks(frozen_writes, 2, (STAGES_OF_TWO,)) if world == 2 else [frozen_writes(0, 1, ALONE_STAGES)]
        for found in ranks:
            for value in found.values():
                close((value, []), (wanted, []))


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    """Every such script, each rank with its own rows of a batch."""

    def rows(i: int) -> torch.Tensor:
        return batch(i, 4 * world)[4 * rank : 4 * rank + 4]

    found: dict[str, Any] = {}
    for script, stage in TWO_RANKS:
        try:
            found[f"{script.__name__}-{stage}"] = on_hf_dist(script, config(stage), rows=rows)
        except Exception as error:
            found[f"{script.__name__}-{stage}"] = repr(error)
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """What two ranks found, by script and stage."""
    return run_ranks(on_ranks, 2)


LOCAL_NOTES = {"plain_steps", "written_inside_forward", "interrupted_evaluation", "closures"}
"""Scripts that note this rank's own loss."""


@pytest.mark.parametrize(("script", "stage"), TWO_RANKS, ids=lambda x: getattr(x, "__name__", f"stage{x}"))
def test_two_ranks_give_the_numbers_of_one_process_on_the_joined_batch(
    script: Callable[[Kit], None], stage: int, two_ranks: list[dict[str, Any]]
) -> None:
    def joined(kit: Kit) -> None:
        kit.rows = lambda i: batch(i, 8)
        script(kit)

    wanted = on_torch(joined)
    for rank in two_ranks:
        found = rank[f"{script.__name__}-{stage}"]
        assert not isinstance(found, str), found
        if script.__name__ in LOCAL_NOTES:
            found, wanted = (found[0], []), (wanted[0], [])
        close(found, wanted)


COPIES = {
    f"stage {stage}{' on the host' * bool(more)}": {**config(stage)["zero_optimization"], "mics_shard_size": 2, **more}
    for stage, more in ((1, {}), (2, {}), (3, {}), (3, OFFLOAD))
}
"""Two copies of the shards of two ranks each (HSDP)."""
BACKWARDS = [
    scripts.plain_steps, scripts.more_backward_after_clipping, scripts.more_backwards_than_announced,
    scripts.head_by_itself_then_the_rest, scripts.accumulated_in_one_loop, scripts.no_zero_grad, scripts.stepped_twice,
]  # fmt: skip
"""Any number of backwards before a step."""
if not FULL_GRID:
    COPIES = some_of(COPIES, "stage 1", "stage 3", "stage 3 on the host")
    BACKWARDS = BACKWARDS[1:4]
COPIED = cells({"copies": tuple(COPIES), "script": BACKWARDS}, 1)
"""Every script with one of the layouts."""


def on_copies(rank: int, world: int) -> dict[tuple[str, str], Any]:
    """These scripts in layouts with copies."""

    def rows(i: int) -> torch.Tensor:
        return batch(i, 4 * world)[4 * rank : 4 * rank + 4]

    return {
        (cell["copies"], cell["script"].__name__): on_hf_dist(
            cell["script"], config(zero_optimization=COPIES[cell["copies"]]), rows=rows
        )
        for cell in COPIED
    }


@pytest.fixture(scope="module")
def four_ranks() -> list[Any]:
    """What four ranks found."""
    return run_ranks(on_copies, 4)


@pytest.mark.parametrize(
    ("copies", "script"), [(*cell.values(),) for cell in COPIED], ids=lambda x: getattr(x, "__name__", x)
)
def test_any_number_of_backwards_with_copies_of_shards(
    copies: str, script: Callable[[Kit], None], four_ranks: list[Any]
) -> None:
    def joined(kit: Kit) -> None:
        kit.rows = lambda i: batch(i, 16)
        script(kit)

    wanted = on_torch(joined)[0]
    for rank in four_ranks:
        close((rank[copies, script.__name__][0], []), (wanted, []))


IN_BF16 = cells({"script": scripts.NEEDS_WHOLE_WEIGHTS, "stage": (0, 1, 2)}, 1)


@pytest.mark.parametrize(
    ("script", "stage"), [(*cell.values(),) for cell in IN_BF16], ids=lambda x: getattr(x, "__name__", None)
)
def test_weights_written_between_steps_stay_written_in_bf16(script: Callable[[Kit], None], stage: int) -> None:
    """The masters follow: as far as bf16 has digits the weights are those of fp32."""
    found, _ = on_hf_dist(script, config(stage, bf16={"enabled": True}))
    wanted, _ = on_torch(script)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2] if FULL_GRID else [0, 1])
def test_what_was_not_written_keeps_the_low_bits_of_its_masters(stage: int) -> None:
    """And the bias that was written keeps what was written, in whatever way."""

    def low_bits(write: Callable[[torch.Tensor], object] | None) -> torch.Tensor:
        model = Blocks()
        engine = hf_dist.initialize(model, config=config(stage, bf16={"enabled": True}), optimizer=sgd(model))
        for i in range(3):
            engine.backward(loss_of(engine.model, batch(i).bfloat16()))
            engine.step()
            if write is not None:
                with torch.no_grad():
                    write(model.head.bias)
        masters = {slot.name: full for g in engine.sharded.groups for slot, full in full_tensors(g)}
        assert (float(masters["head.bias"]) == 0.5) == (write is not None)
        return masters["first.weight"]

    half = torch.full((1,), 0.5, dtype=torch.bfloat16)
    for write in (
        None,
        lambda p: p.fill_(0.5),
        lambda p: p.data.fill_(0.5),
        lambda p: setattr(p, "data", half.clone()),
    ):
        first = low_bits(write)
        assert not torch.equal(first, first.bfloat16().float())


def test_weights_written_after_the_last_step_are_in_the_checkpoint(tmp_path: Any) -> None:
    model = Blocks()
    engine = hf_dist.initialize(model, config=config(1, bf16={"enabled": True}), optimizer=sgd(model))
    engine.backward(loss_of(model, batch(0).bfloat16()))
    engine.step()
    for p in model.parameters():
        p.data.fill_(0.25)
    engine.save_checkpoint(tmp_path / "c")
    again = Blocks(1)
    other = hf_dist.initialize(again, config=config(1, bf16={"enabled": True}), optimizer=sgd(again))
    other.load_checkpoint(tmp_path / "c")
    assert torch.equal(weights(again), torch.full_like(weights(again), 0.25))


@pytest.mark.parametrize("stage", range(4))
def test_a_param_group_that_is_added_later_is_trained(stage: int) -> None:
    def run(prepared: bool) -> torch.Tensor:
        model = Blocks()
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01, momentum=0.9)
        if prepared:
            engine = hf_dist.initialize(model, config=config(stage), optimizer=optimizer)
            assert engine.optimizer is optimizer
        for i in range(5):
            if i == 2:
                optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.03})
            optimizer.zero_grad()
            loss_of(model, batch(i)).backward()
            optimizer.step()
        return weights(model)

    torch.testing.assert_close(run(True), run(False), rtol=RELATIVE, atol=RELATIVE)


def test_a_param_group_that_cannot_be_trained_is_refused_by_name() -> None:
    model = Blocks()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.blocks.parameters(), *model.head.parameters()], lr=0.1)
    engine = hf_dist.initialize(model, config=config(1), optimizer=optimizer)
    with pytest.raises(ValueError, match=r"more than one parameter group.*head.weight"):
        optimizer.add_param_group({"params": [model.head.weight]})
    model.first.requires_grad_(True)
    with pytest.raises(ModelError, match=r"first\.weight was unfrozen"):
        optimizer.add_param_group({"params": list(model.first.parameters())})
    assert engine.optimizer is optimizer


def no_zero_grad(model: Any, optimizer: Any) -> None:
    for i in range(2):
        loss_of(model, batch(i)).backward()
        optimizer.step()


def stepped_twice(model: Any, optimizer: Any) -> None:
    loss_of(model, batch(0)).backward()
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("loop", [no_zero_grad, stepped_twice])
@pytest.mark.parametrize("by", ["initialize", "accelerate"])
def test_gradients_that_ended_in_backward_are_missed_by_name(loop: Any, by: str) -> None:
    model = Blocks()
    optimizer: Any = sgd(model)
    settings = config(2, hf_dist={"optimizer_in_backward": True})
    if by == "initialize":
        kept: Any = hf_dist.initialize(model, config=settings, optimizer=optimizer)
    else:
        kept = hf_dist.DistAccelerator(dist_config=settings)
        model, optimizer = kept.prepare(model, optimizer)
    with pytest.raises(ModelError, match=r"optimizer.zero_grad\(\) is missing after optimizer.step\(\)"):
        loop(model, optimizer)
    optimizer.zero_grad()
    loss_of(model, batch(2)).backward()
    optimizer.step()


class Wrapped(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model


CLEARED: dict[str, Callable[[Any, Any], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "a module around it": lambda model, optimizer: Wrapped(model).zero_grad(),
    "one by one": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.parametrize("how", CLEARED)
def test_every_way_to_clear_gradients_counts(how: str) -> None:
    weights_by = []
    for prepared in (True, False):
        model = Blocks()
        optimizer = sgd(model)
        kept = hf_dist.initialize(model, config=config(1), optimizer=optimizer) if prepared else None
        for i in range(3):
            loss_of(model, batch(i)).backward()
            optimizer.step()
            CLEARED[how](model, optimizer)
        weights_by.append(weights(model))
        del kept
    torch.testing.assert_close(*weights_by, rtol=RELATIVE, atol=RELATIVE)


def test_an_optimizer_whose_engine_was_not_kept_says_so_instead_of_training_nothing() -> None:
    model = Blocks()
    optimizer = sgd(model)
    hf_dist.initialize(model, config=config(1), optimizer=optimizer)
    loss_of(model, batch(0)).backward()
    with pytest.raises(ModelError, match=r"Keep what hf_dist.initialize returns"):
        optimizer.step()


def refusals(rank: int, world: int) -> list[str]:
    """What is said of gradients of which a rank holds a part."""
    model = Blocks()
    engine = hf_dist.initialize(model, config=config(2), optimizer=sgd(model))
    loss_of(model, batch(rank)).backward()
    said = []
    for read in (lambda p: p.grad + 1, lambda p: p.grad.sum(), lambda p: p.grad.add_(torch.ones(8, 8))):
        try:
            read(model.first.weight)
        except ModelError as error:
            said.append(str(error))
    said.append(repr(model.first.weight.grad))
    model.first.to(torch.float32)  # as Switch's router does in each forward; it changes nothing
    with pytest.raises(ModelError, match=r"first.weight"):
        model.first.weight.grad.to(torch.bfloat16)
    assert model.first.weight.grad.shape == (8, 8) and model.first.weight.grad.numel() == 64
    whole = hf_dist.full_gradient(model.first.weight)
    both = [torch.autograd.grad(loss_of(m := Blocks(), batch(r)), m.first.weight)[0] for r in range(world)]
    torch.testing.assert_close(whole, sum(both) / world)
    assert engine.global_steps == 0
    return said


def test_what_a_shard_of_a_gradient_cannot_answer_is_refused_by_name() -> None:
    for said in run_ranks(refusals, 2):
        assert len(said) == 4
        for text in said[:3]:
            assert "first.weight" in text and "full_gradient" in text
        assert "shard of the gradient of first.weight" in said[3]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_closure_of_an_accelerated_optimizer_adds_is_clipped_too(stage: int) -> None:
    accelerator = hf_dist.DistAccelerator(dist_config=config(stage, gradient_clipping=0.5))
    model = Blocks()
    model, optimizer = accelerator.prepare(model, sgd(model))
    loss = loss_of(model, batch(0))
    optimizer.step(lambda: loss.backward())
    other = Blocks()
    torch_optimizer = sgd(other)
    loss_of(other, batch(0)).backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    torch_optimizer.step()
    close((weights(model), []), (weights(other), []))
