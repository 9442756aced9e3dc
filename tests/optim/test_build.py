"""`build_optimizer` follows DeepSpeed's naming rules and defaults, and refuses by path what torch cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.errors import ConfigError
from hf_dist.optim.adafactor import Adafactor
from hf_dist.optim.build import build_optimizer, optimizer_for
from hf_dist.optim.lamb import Lamb
from hf_dist.optim.lion import Lion


def _parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes or ((3,),)]


@pytest.mark.parametrize(
    ("type", "params", "cls", "weight_decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("adam", {"adam_w_mode": True, "torch_adam": False}, torch.optim.AdamW, 0.0),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, 0.1),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("AdamW", {}, torch.optim.AdamW, 0.0),
        ("ADAMW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("adagrad", {}, torch.optim.Adagrad, 0.0),
        ("lion", {}, Lion, 0.0),
        ("Lamb", {"max_coeff": 5, "bias_correction": False}, Lamb, 0.0),
        ("adafactor", {"relative_step": False, "lr": 1e-3, "eps": [1e-30, 1e-3]}, Adafactor, 0.0),
        ("SGD", {"momentum": 0.9}, torch.optim.SGD, 0.0),
        ("sgd", {"momentum": "0.9"}, torch.optim.SGD, 0.0),
        ("RMSprop", {"lr": 0.1}, torch.optim.RMSprop, 0.0),
    ],
)
def test_type_names_the_class_that_deepspeed_would_use(
    type: str, params: dict[str, Any], cls: type[torch.optim.Optimizer], weight_decay: float
) -> None:
    optimizer = build_optimizer(type, params, _parameters())
    assert optimizer.__class__ is cls
    assert optimizer.defaults["weight_decay"] == weight_decay


@pytest.mark.parametrize(
    ("type", "defaults"),
    [
        ("Adam", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}),
        ("Adagrad", {"lr": 1e-2, "eps": 1e-10}),
        ("Lion", {"lr": 1e-3, "betas": (0.9, 0.999)}),
        ("SGD", {"lr": 1e-3, "momentum": 0}),
    ],
)
def test_defaults_are_those_of_deepspeed(type: str, defaults: dict[str, Any]) -> None:
    optimizer = build_optimizer(type, {}, _parameters())
    assert {key: optimizer.defaults[key] for key in defaults} == defaults


def test_the_usual_deepspeed_section_is_taken_whole() -> None:
    params = {
        "lr": 3e-4,
        "betas": [0, 0.99],
        "eps": 1e-7,
        "weight_decay": 0.1,
        "bias_correction": True,
        "torch_adam": True,
        "adam_w_mode": True,
        "fp32_optimizer_states": True,
        "amsgrad": True,
    }
    optimizer = build_optimizer("AdamW", params, _parameters())
    expected = {"lr": 3e-4, "betas": (0.0, 0.99), "eps": 1e-7, "weight_decay": 0.1, "amsgrad": True}
    assert {key: optimizer.defaults[key] for key in expected} == expected


def test_param_groups_keep_their_own_options_and_may_come_from_a_generator() -> None:
    groups = [{"params": (p for p in _parameters((2,), (3,))), "weight_decay": 0.0}, {"params": _parameters((4,))[0]}]
    optimizer = build_optimizer("AdamW", {"weight_decay": 0.1}, iter(groups))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


@pytest.mark.parametrize("type", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_are_used_unless_the_user_chooses(type: str) -> None:
    assert build_optimizer(type, {}, _parameters()).defaults["fused"] is True
    assert build_optimizer(type, {"fused": None}, _parameters()).defaults["fused"] is True
    assert build_optimizer(type, {"fused": False}, _parameters()).defaults["fused"] is False
    assert build_optimizer(type, {"foreach": True}, _parameters()).defaults["fused"] is None
    assert build_optimizer(type, {"differentiable": True}, _parameters()).defaults["fused"] is None


@pytest.mark.parametrize("type", ["Adam", "AdamW", "SGD", "Adagrad", "Lion"])
@pytest.mark.parametrize("params", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "adam_w_mode": False}], ids=str)
def test_the_fused_step_equals_the_plain_one_with_empty_and_gradless_parameters(
    type: str, params: dict[str, Any]
) -> None:
    if type != "Adam":
        params = {key: value for key, value in params.items() if key != "adam_w_mode"}
    plain_choice = {} if type == "Lion" else {"foreach": False}
    fused, plain = (_parameters((5, 3), (0,), (2,)) for _ in range(2))
    optimizers = [build_optimizer(type, params, fused), build_optimizer(type, {**params, **plain_choice}, plain)]
    for step in range(3):
        for a, b in zip(fused[:2], plain[:2], strict=True):
            a.grad = torch.sin(torch.arange(a.numel(), dtype=torch.float32) + step).reshape(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(fused, plain)
    assert torch.equal(fused[2], torch.ones(2))


def test_lion_steps_as_the_paper_writes_it() -> None:
    (p,) = _parameters((4,))
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    expected, momentum = torch.ones(4), torch.zeros(4)
    for gradient in (torch.tensor([1.0, -2.0, 0.5, 0.0]), torch.tensor([-0.1, 30.0, -9.0, 0.0])):
        p.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected = expected - 0.1 * (update + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
        assert torch.equal(p.grad, gradient)
    torch.testing.assert_close(p.detach(), expected)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], momentum)


def test_lion_resumes_from_its_state_dict() -> None:
    (a,), (b,) = _parameters((4,)), _parameters((4,))
    first, second = Lion([a]), Lion([b])
    a.grad = torch.tensor([1.0, -1.0, 2.0, 0.0])
    assert first.step(lambda: 7.0) == 7.0
    b.data.copy_(a.data)
    second.load_state_dict(first.state_dict())
    a.grad = b.grad = torch.tensor([-0.1, 5.0, -9.0, 1.0])
    first.step()
    second.step()
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("type", "params", "path", "words"),
    [
        ("OneBitAdam", {"freeze_step": 0}, "optimizer.params.freeze_step", "not a whole number of at least 1"),
        ("OneBitAdam", {"amsgrad": True}, "optimizer.params.amsgrad", "is not a parameter of OneBitAdam"),
        ("ZeroOneAdam", {"freeze_step": 3}, "optimizer.params.freeze_step", "is not a parameter of ZeroOneAdam"),
        ("OneBitLamb", {"coeff_beta": 1.0}, "optimizer.params.coeff_beta", "below 1"),
        ("MuAdamW", {}, "optimizer.type", "mup package"),
        ("MuSGD", {}, "optimizer.type", "mup package"),
        ("AdamX", {}, "optimizer.type", "Did you mean"),
        ("lr_scheduler", {}, "optimizer.type", "is not a known optimizer"),
        ("Optimizer", {}, "optimizer.type", "is not a known optimizer"),
        ("Adam", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm", "gradient_clipping"),
        ("Adam", {"bias_correction": 2}, "optimizer.params.bias_correction", "not true or false"),
        ("Lion", {"fp32_optimizer_states": 3}, "optimizer.params.fp32_optimizer_states", "not true or false"),
        ("Adam", {"amsgrad": True}, "optimizer.params.amsgrad", '"torch_adam": true'),
        ("Adam", {"torch_adam": "yes please"}, "optimizer.params.torch_adam", "not true or false"),
        ("Adam", {"freeze_step": 3}, "optimizer.params.freeze_step", "is not a parameter of Adam"),
        ("Adam", {"wieght_decay": 0.1}, "optimizer.params.wieght_decay", 'Did you mean "weight_decay"?'),
        ("Adam", {"decoupled_weight_decay": False}, "optimizer.params.decoupled_weight_decay", "adam_w_mode"),
        ("SGD", {"adam_w_mode": True}, "optimizer.params.adam_w_mode", "is not a parameter of SGD"),
        ("Adam", {"lr": "auto"}, "optimizer.params.lr", "has not been filled in"),
        ("Adam", {"lr": -1.0}, "optimizer.params.lr", "at least 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_path(type: str, params: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(type, params, _parameters())
    # Of a refused optimizer its own parameters are named in the same round.
    first, *others = (problem.path for problem in caught.value.problems)
    assert first == path and (not others or path == "optimizer.type")
    assert words in str(caught.value)


def test_all_wrong_params_are_named_at_once() -> None:
    params = {"max_grad_norm": 1, "lr": "fast", "foo": 1, "fp32_optimizer_states": 3}
    with pytest.raises(ConfigError) as caught:
        build_optimizer("AdamW", params, _parameters())
    assert {p.path.rpartition(".")[2] for p in caught.value.problems} == set(params)


class Named(torch.nn.Module):
    """One parameter of each kind, by name and shape."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embed_tokens": (4, 2), "proj": (2, 2), "experts": (3, 2, 2), "norm": (2,), "conv": (2, 3, 2, 2)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape)))
        self.lm_head = torch.nn.Linear(2, 4, bias=False)
        self.frozen = torch.nn.Parameter(torch.randn(2, 2), requires_grad=False)


def test_muon_sorts_parameters_and_takes_rates_as_deepspeed_does() -> None:
    model = Named()
    params = {"lr": 0.1, "adam_lr": 0.2, "weight_decay": 0.3, "momentum": 0.5}
    matrices, rest = optimizer_for(model, "Muon", params).param_groups
    assert [id(p) for p in matrices["params"]] == [id(p) for p in (model.proj, model.experts, model.conv)]
    assert [id(p) for p in rest["params"]] == [id(p) for p in (model.embed_tokens, model.norm, model.lm_head.weight)]
    assert (matrices["lr"], matrices["momentum"], matrices["weight_decay"], matrices["use_muon"]) == (
        0.1,
        0.5,
        0.3,
        True,
    )
    assert (rest["lr"], rest["betas"], rest["eps"], rest["weight_decay"]) == (0.2, (0.9, 0.95), 1e-10, 0.3)
    assert [g["lr"] for g in optimizer_for(model, "Muon", {"muon_lr": 0.1, "lr": 0.4}).param_groups] == [0.1, 0.4]
    assert [g["lr"] for g in optimizer_for(model, "Muon", {}).param_groups] == [0.02, 3e-4]


def test_without_an_engine_muon_steps_matrices_as_torch_does() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(12, 20, bias=False), torch.nn.Linear(12, 20, bias=False)
    theirs.load_state_dict(ours.state_dict())
    optimizer = optimizer_for(ours, "Muon", {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"})
    reference = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.weight.grad = torch.randn(20, 12)
        theirs.weight.grad = ours.weight.grad.clone()
        optimizer.step()
        reference.step()
        assert torch.equal(ours.weight, theirs.weight)


def test_adafactor_has_the_bits_of_the_class_of_transformers() -> None:
    from transformers.optimization import Adafactor as Theirs

    for options in (
        {},
        {"lr": 1e-2, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1, "scale_parameter": False},
    ):
        torch.manual_seed(0)
        ours, theirs = (_parameters((5, 7), (6,), (3, 5, 7)) for _ in range(2))
        optimizers = build_optimizer("Adafactor", options, ours), Theirs(theirs, **options)
        for _ in range(4):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn(p.shape)
                q.grad = p.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True)), options
