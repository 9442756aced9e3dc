"""Each option of accelerate's `Accelerator` is honoured or refused, and its public calls answer wrong objects by name."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, GradScalerKwargs
from accelerate.utils.dataclasses import KwargsHandler
from torch import nn

import hf_dist
from hf_dist.errors import ConfigError, ModelError
from hf_dist.hf.accelerator_options import HANDLERS, HONOURED, OPTIONS
from tests import forked, processes
from tests.covering import FULL_GRID
from tests.harness import ROOT, run_ranks
from tests.window.nets import Blocks, batch, config, loss_of, sgd


def test_the_table_has_every_option_of_accelerate() -> None:
    assert set(inspect.signature(Accelerator.__init__).parameters) - {"self"} <= set(OPTIONS)  # older ones have fewer
    assert {kind.__name__ for kind in KwargsHandler.__subclasses__()} <= set(HANDLERS)


REFUSED: dict[str, dict[str, Any]] = {
    "dynamo_backend": {"dynamo_backend": "eager"},
    "GradScalerKwargs": {"kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]},
    **{name: {name: object()} for name, fix in OPTIONS.items() if fix != HONOURED and "dynamo" not in name},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_no_effect_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*Remove it"):
        hf_dist.DistAccelerator(dist_config=config(1), **REFUSED[name])


def test_options_of_ddp_that_change_no_number_pass() -> None:
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    assert hf_dist.DistAccelerator(dist_config=config(1), kwargs_handlers=handlers, dynamo_backend="no")


def test_an_accelerator_can_be_pickled_without_its_models() -> None:
    accelerator = hf_dist.DistAccelerator(dist_config=config(1))
    model = Blocks()
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    assert optimizer._is_accelerate_prepared and loader._is_accelerate_prepared
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.num_processes == 1 and not again.engines and again.gradient_accumulation_steps == 1
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 2


def synced(rank: int, world: int) -> list[torch.Tensor]:
    """Gradients after each of two microbatches, which all ranks have summed up."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = hf_dist.DistAccelerator(dist_config=config(0, 2), gradient_accumulation_plugin=plugin)
    model = Blocks()
    model, optimizer = accelerator.prepare(model, sgd(model))
    found = []
    for i in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch(i, 8)[4 * rank : 4 * rank + 4]))
            found.append(model.head.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_gradients_of_each_batch_are_those_of_all_ranks_if_asked() -> None:
    model = Blocks()
    wanted = []
    for i in range(2):
        (loss_of(model, batch(i, 8)) / 2).backward()
        wanted.append(model.head.weight.grad.clone())
    for found in run_ranks(synced, 2):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def clipped(rank: int, world: int, degree: float) -> float:
    """The norm that accelerate's clip reports at stage 2."""
    accelerator = hf_dist.DistAccelerator(dist_config=config(2))
    model = Blocks()
    model, _ = accelerator.prepare(model, sgd(model))
    accelerator.backward(loss_of(model, batch(0, 8)[4 * rank : 4 * rank + 4]))
    return float(accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=degree))


@pytest.mark.parametrize("degree", [1.0, float("inf")])
def test_norms_of_any_degree(degree: float) -> None:
    model = Blocks()
    loss_of(model, batch(0, 8)).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=degree))
    assert run_ranks(clipped, 2, (degree,)) == pytest.approx([wanted, wanted], rel=1e-5)


def test_clipping_before_a_model_is_prepared_is_torchs() -> None:
    accelerator = hf_dist.DistAccelerator(dist_config=config(1))
    model = Blocks()
    loss_of(model, batch(0)).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(float(wanted))


WRONG: dict[str, Callable[[], Any]] = {
    "gathered": lambda: hf_dist.gathered("x").__enter__(),  # type: ignore[arg-type]
    "full_gradient": lambda: hf_dist.full_gradient("x"),  # type: ignore[arg-type]
    "full_shape": lambda: hf_dist.full_shape("x"),  # type: ignore[arg-type]
    "unprepare": lambda: hf_dist.unprepare("x"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", WRONG)
def test_public_calls_name_what_they_got(call: str) -> None:
    with pytest.raises(ModelError, match="found str: 'x'"):
        WRONG[call]()


def test_an_engine_without_an_optimizer_says_so_at_its_step() -> None:
    engine = hf_dist.initialize(nn.Linear(8, 1), config=config(1))
    engine.backward(engine(batch(0)).sum())
    with pytest.raises(ModelError, match="no optimizer to step"):
        engine.step()


def test_an_object_in_the_place_of_the_jsons_optimizer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("hf_dist.engine.optimizer_step.say_once", said.append)
    model = Blocks()
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = hf_dist.initialize(model, config=config(1, **section), optimizer=sgd(model))
    assert isinstance(engine.optimizer, torch.optim.SGD)
    assert ['"optimizer" of the JSON (AdamW) is not used: the program has given SGD' in text for text in said] == [True]
    hf_dist.initialize(Blocks(), config=config(1, **section))
    assert len(said) == 1


class Uneasy(nn.Sequential):
    """Has no truth value, as a wrapper of a container may not."""

    def __bool__(self) -> bool:
        raise TypeError("ambiguous")


def test_nobody_takes_the_truth_of_a_model() -> None:
    model = Uneasy(nn.Linear(8, 1))
    accelerator = hf_dist.DistAccelerator(dist_config=config(1))
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(model(batch(0)).sum())
    optimizer.step()


LAUNCHED = """
import torch, hf_dist
from accelerate import debug_launcher

def main():
    accelerator = hf_dist.DistAccelerator(dist_config={"train_micro_batch_size_per_gpu": 2})
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    assert accelerator.num_processes == 2

for _ in range(2):
    debug_launcher(main, num_processes=2)
"""


def test_accelerates_debug_launcher_is_understood(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    (tmp_path / "launched.py").write_text(LAUNCHED)
    run = processes.run if FULL_GRID else forked.run  # five processes, each of which would import everything
    path = os.pathsep.join(filter(None, [ROOT, environment.get("PYTHONPATH")]))
    given = {**environment, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
    ran = run([sys.executable, "launched.py"], cwd=tmp_path, env=given, timeout=300)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]
