"""A freed parameter answers metadata and refuses everything else by name; it never ends the process.

Reading freed memory is a segmentation fault, so all of it runs in child processes.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import operator
import pickle
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.dist.patience import Patience
from hf_dist.errors import FreedParameterError
from tests.harness import run_ranks
from tests.sharding.loop import adamw, attempt
from tests.sharding.models import Net, UnhookedNet, batch

NAME = "blocks.1.up.weight"
P = nn.Parameter

READS: dict[str, Callable[[P], Any]] = {
    "norm": lambda p: p.norm(),
    "add": lambda p: p + 1,
    "radd": lambda p: torch.ones(()) + p,
    "inplace": lambda p: p.add_(1),
    "eq": lambda p: p == p,
    "matmul": lambda p: p @ torch.ones(24),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.numpy(),
    "asarray": lambda p: np.asarray(p),
    "detach numpy": lambda p: p.detach().numpy(),
    "data sum": lambda p: p.data.sum(),
    "data of data": lambda p: p.data.data.sum(),
    "detach detach": lambda p: p.detach().detach() * 2,
    "data copy_": lambda p: p.data.copy_(torch.zeros(48, 24)),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "float": lambda p: float(p.data[0, 0]),
    "bool": lambda p: bool(p.any()),
    "format": lambda p: f"{p}",
    "view": lambda p: p.view(-1).sum(),
    "T": lambda p: p.T.sum(),
    "to dtype": lambda p: p.to(torch.bfloat16),
    "half": lambda p: p.half(),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "dlpack": lambda p: torch.from_dlpack(p),
    "as_tensor": lambda p: torch.as_tensor(p) + 1,
    "stack": lambda p: torch.stack([p, p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "out": lambda p: torch.add(torch.ones(48, 24), 1, out=p.data),
    "kwarg": lambda p: nn.functional.linear(torch.ones(24), weight=p),
    "init": lambda p: nn.init.normal_(p),
    "init data": lambda p: p.data.normal_(),
    "linear": lambda p: nn.functional.linear(torch.ones(24), p),
    "new parameter": lambda p: nn.Parameter(p.data).sum(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "deepcopy data": lambda p: copy.deepcopy(p.data),
    "pickle": lambda p: pickle.dumps(p),
    "pickle data": lambda p: pickle.dumps(p.data),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "set data": lambda p: setattr(p, "data", torch.zeros(48, 24)),
    "set item": lambda p: operator.setitem(p.data, 0, 1.0),
    "to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "norm of all": lambda p: sum(q.norm() for q in [p]),
    "backward": lambda p: p.sum().backward(),
}
"""Each must raise FreedParameterError with the name of the parameter."""


def model_reads(model: Net) -> dict[str, Callable[[], Any]]:
    """The same on the whole model."""
    return {
        "state_dict save": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "state_dict read": lambda: model.state_dict()[NAME].sum(),
        "state_dict keep_vars": lambda: model.state_dict(keep_vars=True)[NAME].sum(),
        "pickle parameters": lambda: pickle.dumps(list(model.parameters())),
        "block submodule": lambda: model.blocks[1].up(torch.ones(24)),
    }


ANSWERS: dict[str, tuple[Callable[[P], Any], Any]] = {
    "shape": (lambda p: tuple(p.shape), (48, 24)),
    "size": (lambda p: (p.size(0), p.dim(), p.ndim, p.stride()), (48, 2, 2, (24, 1))),
    "dtype": (lambda p: p.dtype, torch.float32),
    "device": (lambda p: p.device.type, "cpu"),
    "numel": (lambda p: (p.numel(), p.nelement(), torch.numel(p)), (1152, 1152, 1152)),
    "bytes": (lambda p: (p.element_size(), p.nbytes), (4, 4608)),
    "requires_grad": (lambda p: p.requires_grad, True),
    "grad": (lambda p: p.grad, None),
    "leaf": (lambda p: (p.is_leaf, p.grad_fn), (True, None)),
    "floating": (lambda p: (p.is_floating_point(), torch.is_floating_point(p)), (True, True)),
    "len": (lambda p: len(p), 48),
    "hash": (lambda p: {p: 1}[p], 1),
    "identity": (lambda p: p in {p} and p is p, True),
    "isinstance": (lambda p: isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor), True),
    "class name": (lambda p: type(p).__name__, "Parameter"),
    "contiguous": (lambda p: p.is_contiguous(), True),
    "repr": (lambda p: NAME in repr(p) and "48" in str(p), True),
    "repr data": (lambda p: NAME in repr(p.data), True),
    "to same": (lambda p: p.to("cpu") is p and p.to(torch.float32) is p and p.to(torch.device("cpu")) is p, True),
    "like": (lambda p: (torch.zeros_like(p).sum().item(), type(torch.empty_like(p))), (0.0, torch.Tensor)),
    "full_like": (lambda p: torch.full_like(p, 2.0).mean().item(), 2.0),
    "new": (lambda p: (tuple(p.new_zeros(3).shape), p.new_empty(2).dtype), ((3,), torch.float32)),
    "detached shape": (lambda p: (tuple(p.detach().shape), p.data.dtype), ((48, 24), torch.float32)),
    "detached grad": (lambda p: p.detach().requires_grad, False),
    "hook": (lambda p: p.register_hook(lambda g: g).remove(), None),
    "grad hook": (lambda p: p.register_post_accumulate_grad_hook(lambda q: None).remove(), None),
    "clear grad": (lambda p: setattr(p, "grad", None), None),
    "attribute": (lambda p: (setattr(p, "mark", 3), p.mark)[1], 3),
    "freeze and back": (lambda p: (p.requires_grad_(False).requires_grad, p.requires_grad_(True).requires_grad), (False, True)),
    "dir": (lambda p: "shape" in dir(p), True),
    "weakref": (lambda p: weakref.ref(p)() is p, True),
}  # fmt: skip

OPTIMIZERS = [
    torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
]  # fmt: skip


def outcome(run: Callable[[], Any]) -> str:
    """What came of it, in one line."""
    try:
        value = run()
    except FreedParameterError as error:
        return "refused" if "blocks.1." in str(error) or "first." in str(error) else f"refused without a name: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"gave {value!r}"


def engine_at(stage: int, optimizer: Any = None, model: nn.Module | None = None) -> Any:
    """An engine on a small model."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    return hf_dist.initialize(model or Net(), config=config, optimizer=optimizer, device="cpu")


def step(engine: Any) -> None:
    """One training step."""
    x, y = batch(0)
    engine.backward(nn.functional.mse_loss(engine(x), y))
    engine.step()


def probe(rank: int, world: int) -> dict[str, Any]:
    """Everything that is asked of freed parameters, on this rank."""
    model = Net()
    plain_class = type(dict(model.named_parameters())[NAME])
    engine = engine_at(3, adamw(model), model)
    found: dict[str, Any] = {}
    p = dict(model.named_parameters())[NAME]
    found["reads"] = {k: outcome(lambda read=read: read(p)) for k, read in READS.items()}
    found["model"] = {k: outcome(read) for k, read in model_reads(model).items()}
    found["answers"] = {k: attempt(lambda ask=ask: ask(p)) for k, (ask, _) in ANSWERS.items()}
    found["names"] = [n for n, _ in model.named_parameters()]
    found["moved"] = attempt(lambda: model.to("cpu") is model and model.train().requires_grad_(True) is model)
    found["cast"] = attempt(lambda: model.to(torch.bfloat16)).splitlines()[-1]
    alias = p.data
    with hf_dist.gathered(model):
        found["inside"] = attempt(lambda: bool(p.norm() > 0 and alias.norm() == p.norm()) and _is_plain(p, plain_class))
        other = copy.deepcopy(model)
        found["copied"] = torch.equal(other.blocks[1].up.weight, p)
    found["copy moves"] = attempt(
        lambda: other.to(torch.bfloat16) is other and other.head.weight.dtype == torch.bfloat16
    )
    found["after"] = [outcome(lambda: p.norm()), outcome(lambda: alias.norm())]
    found["constructors"] = {c.__name__: attempt(lambda c=c: bool(c(model.parameters(), lr=0.1))) for c in OPTIMIZERS}
    step(engine)
    found["after a step"] = outcome(lambda: p.norm())
    found["unhooked"] = outcome(lambda: engine_at(3, model=UnhookedNet())(batch(0)[0]))
    found["adagrad"] = attempt(lambda: step(engine_at_3_with_late_adagrad()))
    found["stage 1"] = attempt(read_after_step_at_stage_1)
    found["leaks"] = {stage: attempt(lambda stage=stage: left_over(stage)) for stage in range(4)}
    del engine
    found["without engine"] = outcome(lambda: p.norm())
    return found


def engine_at_3_with_late_adagrad() -> Any:
    """An optimizer made from guarded parameters, with state made at construction."""
    engine = engine_at(3)
    engine.attach_optimizer(torch.optim.Adagrad(engine.model.parameters(), lr=0.1, initial_accumulator_value=0.5))
    return engine


def read_after_step_at_stage_1() -> bool:
    """Weights that are on their way are waited for; nothing raises."""
    model = Net()
    before = model.blocks[1].up.weight.detach().clone()
    engine = engine_at(1, adamw(model), model)
    step(engine)
    return not torch.equal(model.blocks[1].up.weight.data, before) and bool(model.head.bias.norm() > 0)


def left_over(stage: int) -> list[str]:
    """Which big buffers outlive engine and model, without help from the cyclic collector."""
    gc.collect()
    gc.disable()
    try:
        model = Net()
        optimizer = adamw(model)
        engine = engine_at(stage, optimizer, model)
        step(engine)
        x, y = batch(1)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        alive: dict[str, Any] = {"sharded": weakref.ref(engine.sharded), "model": weakref.ref(model)}
        for g, group in enumerate(engine.sharded.groups):
            for name in ("full.values", "source", "grad"):
                tensor = attrgetter(name)(group)
                if tensor is not None:
                    alive[f"{name} {g}"] = weakref.ref(tensor.untyped_storage())
                    alive[f"{name} tensor {g}"] = weakref.ref(tensor)
                del tensor
            alive[f"group {g}"] = weakref.ref(group)
            alive[f"parameter {g}"] = weakref.ref(group.params[0])
            del group
        del engine, model, optimizer
        # gloo's thread lets go of the tensors of its last collective a moment after it is done.
        Patience(5).until(lambda: all(ref() is None for ref in alive.values()), every=0.01)
        return [name for name, ref in alive.items() if ref() is not None]
    finally:
        gc.enable()


@functools.cache
def spawned() -> list[dict[str, Any]] | str:
    """One spawn for the whole file; its error if it failed, so that it is not tried again."""
    try:
        return run_ranks(probe, 2, timeout=240)
    except RuntimeError as error:
        return str(error)


def _is_plain(param: nn.Parameter, kind: type) -> bool:
    """Whether reading is not guarded; the class may be the prepared twin of `kind`."""
    return (
        isinstance(param, kind) and type(param).__name__ == kind.__name__ and not hasattr(type(param), "_hf_dist_plain")
    )


def probed() -> list[dict[str, Any]]:
    """What each rank found."""
    found = spawned()
    assert not isinstance(found, str), found
    return found


both_ranks = pytest.mark.parametrize("rank", [0, 1])


@both_ranks
@pytest.mark.parametrize("name", READS)
def test_reading_raises_with_the_name(rank: int, name: str) -> None:
    assert probed()[rank]["reads"][name] == "refused"


@both_ranks
@pytest.mark.parametrize("name", model_reads(Net()))
def test_reading_the_model_raises(rank: int, name: str) -> None:
    assert probed()[rank]["model"][name] == "refused"


@both_ranks
@pytest.mark.parametrize("name", ANSWERS)
def test_metadata_is_answered(rank: int, name: str) -> None:
    assert probed()[rank]["answers"][name] == ANSWERS[name][1]


@both_ranks
def test_names_moving_and_training_mode_work(rank: int) -> None:
    assert probed()[rank]["names"] == [n for n, _ in Net().named_parameters()]
    assert probed()[rank]["moved"] is True
    assert "ModelError" in probed()[rank]["cast"]


@both_ranks
def test_gathered_parameters_are_plain_and_freed_ones_raise_again(rank: int) -> None:
    found = probed()[rank]
    assert found["inside"] is True and found["copied"] is True
    assert found["copy moves"] is True
    assert found["after"] == ["refused", "refused"]
    assert found["after a step"] == "refused"


@both_ranks
def test_weights_fetched_ahead_are_for_the_hooks_alone(rank: int) -> None:
    assert probed()[rank]["unhooked"].startswith("refused")
    assert "instead of `block.forward(x)`, `block(x)`" in probed()[rank]["unhooked"]


@both_ranks
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_optimizers_take_freed_parameters(rank: int, cls: type) -> None:
    assert probed()[rank]["constructors"][cls.__name__] is True


@both_ranks
def test_an_optimizer_made_from_freed_parameters_steps(rank: int) -> None:
    assert probed()[rank]["adagrad"] is None


@both_ranks
def test_replicated_weights_are_waited_for(rank: int) -> None:
    assert probed()[rank]["stage 1"] is True


@both_ranks
def test_reading_after_the_engine_is_gone_raises(rank: int) -> None:
    assert probed()[rank]["without engine"] == "refused"


@both_ranks
@pytest.mark.parametrize("stage", range(4))
def test_no_buffer_outlives_engine_and_model(rank: int, stage: int) -> None:
    assert probed()[rank]["leaks"][stage] == []
