"""A communication hook of accelerate's DDP options asks for the same bytes here, or is refused with a line of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DDPCommunicationHookType
from accelerate.utils import DistributedDataParallelKwargs

import hf_dist
from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.hf.comm_hook import with_comm_hook
from tests.harness import run_ranks
from tests.window.nets import Blocks, batch, config, loss_of, sgd

NO, FP16, BF16 = DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16
POWER, BATCHED = DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD
RANK = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}


def handler(hook: Any = NO, wrapper: Any = NO, **options: Any) -> DistributedDataParallelKwargs:
    """As in a script."""
    return DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)


def asked(given: DistributedDataParallelKwargs, file: dict[str, Any] | None = None) -> dict[str, Any]:
    """Values of the config that are read."""
    found = with_comm_hook(load_config(config(0) if file is None else file), [given])
    wires = found.hf_dist.wires
    factors = wires.powersgd if wires.gradients == "powersgd" else None
    return {
        "type": found.communication_data_type,
        "stage": found.zero_optimization.stage,
        "gradients": wires.gradients,
        "factors": None if factors is None else tuple(factors.model_dump().values()),
    }


SAME: dict[str, Any] = {"type": None, "stage": 0, "gradients": None, "factors": None}
CASES: dict[str, tuple[DistributedDataParallelKwargs, dict[str, Any]]] = {
    "no": (handler(), SAME),
    "a wrapper alone": (handler(NO, BF16), SAME),
    "fp16": (handler(FP16), SAME | {"type": "fp16"}),
    "bf16 twice": (handler(BF16, BF16), SAME | {"type": "bf16"}),
    "power": (handler(POWER), SAME | {"gradients": "powersgd", "factors": (1, 1000, True, True, 2.0)}),
    "options": (
        handler(BATCHED, use_error_feedback=False, warm_start=False, min_compression_rate=1.5, random_seed=3, **RANK),
        SAME | {"gradients": "powersgd", "factors": (2, 3, False, False, 1.5)},
    ),
    "power in bf16": (
        handler(POWER, BF16, **RANK),
        SAME | {"type": "bf16", "gradients": "powersgd", "factors": (2, 3, True, True, 2.0)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hook_is_these_keys(name: str) -> None:
    given, wanted = CASES[name]
    assert asked(given) == wanted


def test_the_file_says_what_the_hook_leaves_open() -> None:
    file = config(0, hf_dist={"wires": {"gradients": "powersgd", "powersgd": {"rank": 8}}})
    assert asked(handler(POWER, start_powerSGD_iter=5), file)["factors"] == (8, 5, True, True, 2.0)


REFUSED: dict[str, tuple[DistributedDataParallelKwargs, dict[str, Any], str]] = {
    "another dtype": (handler(FP16), {"communication_data_type": "bf16"}, "communication_data_type.*bf16.*Keep one"),
    "another stage": (handler(POWER), {"zero_optimization": {"stage": 2}}, "zero_optimization.stage.*2.*comm_hook"),
    "another rank": (
        handler(POWER, **RANK),
        {"hf_dist": {"wires": {"gradients": "powersgd", "powersgd": {"rank": 8}}}},
        "powersgd.rank.*8.*matrix_approximation_rank=2",
    ),
    "another codec": (handler(POWER), {"hf_dist": {"wires": {"gradients": "int8"}}}, "wires.gradients.*int8"),
    "two dtypes": (handler(FP16, BF16), {}, "two dtypes"),
    "a misspelt option": (handler(POWER, matrix_aproximation_rank=2), {}, 'no option.*Did you mean "matrix_approx'),
    "a rank of 0": (handler(POWER, matrix_approximation_rank=0), {}, "matrix_approximation_rank.*at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_file_says_otherwise_is_refused_by_its_line(name: str, tmp_path: Path) -> None:
    given, more, words = REFUSED[name]
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, **more}, indent=1))
    with pytest.raises(ConfigError, match=f"(?s){words}") as error:
        hf_dist.DistAccelerator(dist_config=str(file), kwargs_handlers=[given])
    assert not more or "file.json:" in str(error.value)


def trained(rank: int, world: int, hooked: bool) -> tuple[list[torch.Tensor], int]:
    """Weights after some steps of a raw loop, and bytes of reductions in the last one."""
    from hf_dist.dist import comm_counter

    wires = {"hf_dist": {"wires": {"gradients": "powersgd", "powersgd": {"rank": 2, "start_step": 1}}}}
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
    given: dict[str, Any] = {"dist_config": config(0, **({} if hooked else wires))}
    if hooked:
        given["kwargs_handlers"] = [handler(POWER, **options)]
    accelerator = hf_dist.DistAccelerator(**given)
    model = Blocks()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for i in range(3):
        with comm_counter.record() as log:
            accelerator.backward(loss_of(model, batch(i, 8)[4 * rank : 4 * rank + 4]))
            optimizer.step()
            optimizer.zero_grad()
    sent = sum(e.nbytes for e in log.entries if e.op == "all_reduce")
    return [p.detach().clone() for p in model.parameters()], sent


def both(rank: int, world: int) -> list[Any]:
    """With the hook, and with the keys."""
    return [trained(rank, world, hooked) for hooked in (True, False)]


def test_a_loop_with_a_hook_equals_one_with_the_keys() -> None:
    for (one, sent), (other, as_many) in run_ranks(both, 2):
        assert sent == as_many
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_trainer_whose_accelerator_has_a_hook_follows_it(tmp_path: Path) -> None:
    from transformers import Trainer

    class Own(hf_dist.DistTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            made = Accelerator.__init__

            def with_hook(self: Accelerator, *args: Any, **kwargs: Any) -> None:
                made(self, *args, **{**kwargs, "kwargs_handlers": [handler(BF16)]})

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Accelerator, "__init__", with_hook)
                super().create_accelerator_and_postprocess()

    assert issubclass(Own, Trainer)
    args = hf_dist.DistTrainingArguments(
        output_dir=str(tmp_path), dist_config={"zero_optimization": {"stage": 2}}, use_cpu=True, report_to=[]
    )
    trainer = Own(model=Blocks(), args=args)
    found: Any = trainer.accelerator
    assert found.dist_config.communication_data_type == "bf16"
