"""`sight_of` tells optimizers that can step fragments from those that need whole tensors, and those that need more."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor as TransformersAdafactor

from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.optim import stepping
from hf_dist.optim.adafactor import Adafactor
from hf_dist.optim.build import build_optimizer
from hf_dist.optim.lamb import Lamb
from hf_dist.optim.lion import Lion
from hf_dist.optim.stepping import Stepping, check_whole, sight_of

ELEMENTWISE: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    (torch.optim.AdamW, {"capturable": True, "lr": torch.tensor(1e-5)}),
    (torch.optim.Adam, {"weight_decay": 0.1, "lr": 0.0}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 1.0}),
    (Lion, {"weight_decay": 0.1}),
]
WHOLE_TENSOR: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (TransformersAdafactor, {}),
    (TransformersAdafactor, {"lr": 1e-3, "relative_step": False, "scale_parameter": False}),
    (torch.optim.Adafactor, {}),
    (Lamb, {}),
    (Adafactor, {}),
]


class _Stepped(torch.optim.Optimizer):
    """A base for the optimizers of these tests: subclasses give the update of one parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.update(p, group), alpha=group["lr"])

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class TrustRatio(_Stepped):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return p.grad * p.norm() / p.grad.norm()


class ClippedByRms(_Stepped):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return p.grad / p.grad.square().mean().sqrt().clamp(min=1.0)


class SumOverParameters(_Stepped):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return p.grad * sum(q.grad.abs().sum() for q in group["params"])


class OrthogonalWhereAsked(_Stepped):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return torch.linalg.qr(p.grad)[0] if group.get("use_qr") else p.grad


class Noisy(_Stepped):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        torch.rand(1)
        return p.grad


class Came(_Stepped):
    """Element-wise in fact, but of a name known not to be."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return p.grad


class DerivedFromIt(Came):
    pass


class NeedsTheModel(torch.optim.SGD):
    def __init__(self, model: torch.nn.Module, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.model = model

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.model.training
        super().step()


class NeverMoves(_Stepped):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return torch.zeros_like(p)


def stepping_of(optimizer: torch.optim.Optimizer) -> Stepping:
    return sight_of(optimizer).stepping


def _parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, 5))


def _id(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value) or "default"


@pytest.mark.parametrize(("cls", "options"), ELEMENTWISE, ids=_id)
def test_elementwise_optimizers_step_fragments_by_probe(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = cls([_parameter()], **options)
    assert stepping_of(optimizer) is Stepping.FRAGMENTS
    assert stepping._probed(optimizer) is Stepping.FRAGMENTS, "also those that are known, for which nothing is probed"
    assert not caplog.records


def test_every_known_class_is_probed_above() -> None:
    assert {cls for cls, _ in ELEMENTWISE} >= stepping._ELEMENTWISE


@pytest.mark.parametrize(("cls", "options"), WHOLE_TENSOR, ids=_id)
@pytest.mark.parametrize("by_name", [True, False])
def test_optimizers_that_look_at_whole_tensors_are_known_by_name_and_by_probe(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_name:
        monkeypatch.setattr(stepping, "_WHOLE_TENSOR", frozenset())
    assert stepping_of(cls([_parameter()], **options)) is Stepping.WHOLE


@pytest.mark.parametrize("cls", [TrustRatio, ClippedByRms, Came, DerivedFromIt])
def test_an_unknown_optimizer_is_told_by_what_it_does_and_a_known_one_by_its_name(cls: type[_Stepped]) -> None:
    assert stepping_of(cls([_parameter()])) is Stepping.WHOLE


def test_muon_is_known_by_its_class() -> None:
    assert stepping_of(torch.optim.Muon([_parameter()])) is Stepping.MUON
    assert stepping_of(build_optimizer("Muon", {}, [_parameter()])) is Stepping.MUON


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (SumOverParameters, "updates a parameter from the values of others"),
        (torch.optim.LBFGS, "searches along a direction of all parameters at once"),
        (torch.optim.SparseAdam, "takes sparse gradients"),
    ],
)
def test_what_no_owner_can_step_is_refused(cls: type[torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"{cls.__name__} of \w+ {reason}.*AdamW"):
        stepping_of(cls([_parameter()]))


def test_options_of_every_param_group_are_probed() -> None:
    groups = [{"params": [_parameter()]}, {"params": [_parameter()], "use_qr": True}]
    assert stepping_of(OrthogonalWhereAsked(groups[:1])) is Stepping.FRAGMENTS
    assert stepping_of(OrthogonalWhereAsked(groups)) is Stepping.WHOLE
    assert (
        stepping._probed(OrthogonalWhereAsked(groups)) is Stepping.WHOLE
    )  # all there is where no copy can be observed


def test_a_learning_rate_of_zero_in_warmup_does_not_blind_the_probe() -> None:
    optimizer = TrustRatio([_parameter()])
    optimizer.param_groups[0]["lr"] = 0.0
    assert stepping_of(optimizer) is Stepping.WHOLE


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, Lamb),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}},
            torch.optim.Muon,
        ),
        ({"hf_dist": {"optimizer_in_backward": True}}, torch.optim.Muon),
    ],
)
def test_what_brings_parts_of_tensors_is_refused_by_key(
    section: dict[str, Any], kind: type[torch.optim.Optimizer]
) -> None:
    optimizer = kind([_parameter()])
    path = "hf_dist.optimizer_in_backward" if "hf_dist" in section else "zero_optimization.offload_optimizer.device"
    with pytest.raises(
        ConfigError, match=rf"{path}.*is not available with {kind.__name__} of \w+, which must see whole"
    ):
        check_whole(stepping_of(optimizer), optimizer, load_config({"train_batch_size": 1, **section}))
    check_whole(Stepping.FRAGMENTS, optimizer, load_config({"train_batch_size": 1, **section}))


@pytest.mark.parametrize("cls", [NeedsTheModel, NeverMoves])
def test_an_optimizer_that_cannot_be_probed_gets_whole_tensors_with_one_warning(
    cls: type[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    stepping._warn_once.cache_clear()
    first = [torch.nn.Linear(1, 1)] if cls is NeedsTheModel else []
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert stepping_of(cls(*first, [_parameter()])) is Stepping.WHOLE
    assert [cls.__name__ in record.getMessage() for record in caplog.records] == [True]


def test_the_check_leaves_optimizer_and_random_state_alone() -> None:
    parameter = _parameter()
    optimizer = Noisy([parameter])
    random_state = torch.get_rng_state()
    stepping_of(optimizer)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(parameter, torch.ones(3, 5))
    assert not optimizer.state


@pytest.mark.parametrize("type", ["Adam", "SGD", "Adagrad", "Lion", "NAdam"])
def test_what_the_configuration_builds_passes(type: str) -> None:
    stepping_of(build_optimizer(type, {}, [_parameter()]))


def test_a_scheduler_on_the_optimizer_does_not_disturb_the_check(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.AdamW([_parameter()])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    stepping_of(optimizer)
    assert not caplog.records
