"""What user code does to a prepared model between and inside steps: the same as in one process, or an error by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.errors import FreedParameterError, ModelError
from tests.covering import FULL_GRID, chosen
from tests.harness import run_ranks
from tests.sharding import models
from tests.sharding.loop import Loop, Scenario, adamw, assert_equal, on_one_process, run_all
from tests.sharding.models import Net, batch
from tests.sharding.test_edge import loss_of, plain


def full(loop: Loop) -> Any:
    """A block in which weights may be read; nothing in one process."""
    import contextlib

    return hf_dist.gathered(loop.model) if loop.engine else contextlib.nullcontext()


def freeze_and_unfreeze(loop: Loop) -> None:
    """Blocks are frozen one after the other, then all learn again; some have never had a step before."""
    blocks = loop.model.blocks
    frozen = [[0], [0, 1], [0, 1, 2], [1], [], [2]]
    for step, which in enumerate(frozen):
        for i, block in enumerate(blocks):
            block.requires_grad_(i not in which)
        loop.backward(loss_of(loop, step))
        loop.step()


def freeze_all_but_the_head(loop: Loop) -> None:
    """Right after the model was prepared, as for probing first and fine-tuning later."""
    loop.model.requires_grad_(False)
    loop.model.head.requires_grad_(True)
    plain(loop, 2)
    loop.model.requires_grad_(True)
    for step in range(2, 5):
        loop.backward(loss_of(loop, step))
        loop.step()


def model_zero_grad(loop: Loop) -> None:
    """A window is abandoned by the model's own `zero_grad`, as plain torch loops do."""
    for step in range(4):
        if step % 2:
            loop.backward(loss_of(loop, step + 10))
            loop.losses.pop()
            loop.model.zero_grad()
        loop.backward(loss_of(loop, step))
        loop.step()


def moving_average(loop: Loop) -> None:
    """An average of the weights, kept by the loop, as EMA callbacks do."""
    with full(loop):
        average = {n: p.detach().clone() for n, p in loop.model.named_parameters()}
    for step in range(4):
        loop.backward(loss_of(loop, step))
        loop.step()
        with full(loop):
            for name, p in loop.model.named_parameters():
                average[name].lerp_(p.detach(), 0.1)
    loop.extra |= {f"average {name}": value for name, value in average.items()}


def forward_hooks(loop: Loop) -> None:
    """Hooks of a user, set before and in the middle, which read what the module has and change what it gives."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + module.weight.detach().norm() / 100)

    handle = loop.model.blocks[1].up.register_forward_hook(hook)
    loop.model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    for step in range(4):
        if step == 2:
            handle.remove()
            loop.model.blocks[0].up.register_forward_hook(hook)
        loop.backward(loss_of(loop, step))
        loop.step()


class DroppingNet(Net):
    """Leaves blocks out at random, as LayerDrop does."""

    dropped: frozenset[int] = frozenset()

    def run_block(self, block: nn.Module, x: Any) -> Any:
        """Nothing happens where it is left out."""
        return x if list(self.blocks).index(block) in self.dropped else block(x)


def layer_drop(loop: Loop) -> None:
    """Each microbatch leaves out another block, the last too; ranks in some steps. One process runs part after part."""
    parts = 6
    for step in range(5):
        x, y = batch(step)
        total = 0.0
        own = range(parts)[loop.rank * parts // loop.world : (loop.rank + 1) * parts // loop.world]
        if loop.engine:
            loop.engine.set_gradient_accumulation_boundary(False)
        losses = []
        for part in own:
            loop.model.dropped = frozenset([(step + part + step * (part // 3)) % 3])
            loss = nn.functional.mse_loss(loop.model(x.chunk(parts)[part]), y.chunk(parts)[part])
            total += loss.item() / len(own)
            if loop.engine:
                loop.engine.set_gradient_accumulation_boundary(part == own[-1])
                loop.engine.backward(loss / len(own), scale_wrt_gas=False)
            else:
                (loss / len(own)).backward()
            losses.append(loss)
        loop.losses.append(total)
        loop.step()


def deepcopy_gathered(loop: Loop) -> None:
    """A frozen copy, as reference models are made; it computes on its own."""
    import copy

    plain(loop, 2)
    with full(loop):
        reference = copy.deepcopy(loop.model).requires_grad_(False)
    for step in range(2, 4):
        x, y = loop.part(*batch(step))
        with torch.no_grad():
            target = reference(x)
        loop.backward(nn.functional.mse_loss(loop.model(x), (y + target) / 2))
        loop.step()


class RenamingBlock(models.Block):
    """Reads files in which a layer still has its older name, as models do that have been rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """What was `wide` is `up`."""
        for name in [name for name in state if name.startswith(f"{prefix}wide.")]:
            state[f"{prefix}up.{name.removeprefix(f'{prefix}wide.')}"] = state.pop(name)


class RenamingNet(Net):
    """With these blocks."""

    block = RenamingBlock


def load_between_steps(loop: Loop) -> None:
    """Back to a state from before, as a loop that keeps the best weights does; some under older names; every rank loads."""
    plain(loop, 2)
    with full(loop):
        state = loop.model.state_dict()
        kept = {name.replace("1.up.", "1.wide."): tensor.clone() for name, tensor in state.items()}
    plain(loop, 2)
    loop.model.load_state_dict(kept)
    plain(loop, 2)


SCENARIOS = {
    "load-between-steps": Scenario(RenamingNet, load_between_steps),
    "freeze-and-unfreeze": Scenario(Net, freeze_and_unfreeze),
    "freeze-at-once": Scenario(Net, freeze_all_but_the_head),
    "freeze-with-checkpointing": Scenario(models.Outside, freeze_and_unfreeze),
    "model-zero-grad": Scenario(Net, model_zero_grad),
    "moving-average": Scenario(Net, moving_average),
    "forward-hooks": Scenario(Net, forward_hooks),
    "layer-drop": Scenario(DroppingNet, layer_drop),
    "deepcopy-gathered": Scenario(Net, deepcopy_gathered),
}
CASES = [(name, stage) for name, scenario in SCENARIOS.items() for stage in scenario.stages]
BOTH = ("load-between-steps", "freeze-and-unfreeze", "layer-drop")
"""At stage 3 and at one of the others, which run the same passes."""
CASES = chosen(CASES, lambda case: {"name": (case[0], case[0] in BOTH and case[1] == 3), "stage": case[1]}, 1)
STAGES = range(4) if FULL_GRID else (1, 3)


def errors(stage: int) -> dict[str, str]:
    """What is refused, by what it says."""
    model = Net()
    model.blocks[0].requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine = hf_dist.initialize(model, config=config, optimizer=adamw(model), device="cpu")
    loop = Loop(model, None, engine)
    found = {}

    def note(name: str, kind: type[Exception], run: Callable[[], Any]) -> None:
        try:
            run()
            found[name] = "passed"
        except kind as error:
            found[name] = str(error)

    plain(loop, 1)
    note("assigned", ModelError, lambda: model.load_state_dict(Net().state_dict(), assign=True))
    model.blocks[0].requires_grad_(True)
    note("unfrozen", ModelError, lambda: plain(loop, 1))
    if stage == 3:
        note("average", FreedParameterError, lambda: torch.zeros(24).lerp_(model.first.bias, 0.1))
    return found


class TowerBehind(Net):
    """With a tower that no data reaches, and a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.blocks[1].spare = nn.Parameter(torch.ones(5))


def report_of_the_first_step(stage: int) -> list[str]:
    """What is said in two steps about parameters without a gradient."""
    import logging

    lines: list[str] = []

    class Lines(logging.Handler):
        """Keeps what is logged."""

        def emit(self, record: logging.LogRecord) -> None:
            """One line."""
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("hf_dist"), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = TowerBehind()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine = hf_dist.initialize(model, config=config, optimizer=adamw(model), device="cpu")
    plain(Loop(model, None, engine), 2)
    logger.removeHandler(handler)
    return [line for line in lines if "got no gradient" in line]


def run(rank: int, world: int) -> tuple[list[Any], dict[int, dict[str, str]], list[list[str]]]:
    """Everything on this rank."""
    said = [report_of_the_first_step(stage) for stage in (0, 3)]
    return run_all(rank, world, __name__, CASES), {stage: errors(stage) for stage in STAGES}, said


@functools.cache
def results() -> list[Any]:
    """By rank; one spawn."""
    return run_ranks(run, 2)


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """The same in one process."""
    return on_one_process(SCENARIOS[name])


@pytest.mark.parametrize(("name", "stage"), [pytest.param(*case, id=f"{case[0]}-z{case[1]}") for case in CASES])
def test_user_code_has_the_effect_that_it_has_in_one_process(name: str, stage: int) -> None:
    for cases, _, _ in results():
        assert_equal(cases[CASES.index((name, stage))], expected(name))


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_that_would_replace_the_parameters_is_refused(stage: int) -> None:
    for _, found, _ in results():
        assert "load_state_dict(assign=True)" in found[stage]["assigned"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_unfrozen_too_late_is_an_error_by_name(stage: int) -> None:
    for _, found, _ in results():
        text = found[stage]["unfrozen"]
        assert "blocks.0." in text
        assert "was unfrozen after the model was prepared" in text
        assert "freeze it right afterwards" in text


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_leaves_the_model_in_the_mode_that_it_found(training: bool) -> None:
    model = Net()
    engine = hf_dist.initialize(model, config={"train_micro_batch_size_per_gpu": 1}, device="cpu").train(training)
    seen: list[bool] = []

    def loss(model: nn.Module, microbatch: Any) -> torch.Tensor:
        seen.append(model.training)
        return model(microbatch[0]).mean()  # type: ignore[no-any-return]

    engine.eval_batch(iter([batch(0)]), loss)
    assert seen == [False] and {module.training for module in model.modules()} == {training}


def test_the_loss_of_a_window_is_the_mean_of_all_digits_that_its_microbatches_have() -> None:
    model = Net()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 7, "bf16": {"enabled": True}}
    engine = hf_dist.initialize(model, config=config, optimizer=adamw(model), device="cpu")
    losses: list[float] = []

    def loss(model: nn.Module, microbatch: Any) -> torch.Tensor:
        value = model(microbatch[0].bfloat16()).square().mean()
        assert value.dtype == torch.bfloat16
        losses.append(float(value.detach()))
        return value  # type: ignore[no-any-return]

    for run in (engine.train_batch, engine.eval_batch):
        losses.clear()
        found = run(iter([batch(i) for i in range(7)]), loss)
        assert len(losses) == 7 and float(found) == pytest.approx(sum(losses) / 7, rel=1e-6)


def test_an_average_of_freed_weights_is_refused_by_name() -> None:
    for _, found, _ in results():
        assert "first.bias" in found[3]["average"]
        assert "hf_dist.gathered" in found[3]["average"]


def test_the_first_step_names_trainable_parameters_without_a_gradient() -> None:
    first, other = (said for _, _, said in results())
    for lines in first:
        assert len(lines) == 1, "once, not in every step"
        assert "5 trainable parameters (45 elements) got no gradient in the first step" in lines[0]
        assert "blocks.1.spare" in lines[0]
        assert "tower.* (4)" in lines[0]
    assert other == [[], []], "one rank speaks"
