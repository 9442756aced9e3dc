"""The fused kernel in pieces leaves the same bits as the optimizer's own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.optim import fused_kernel
from tests.memory.offload import training
from tests.memory.offload.training import differences, make_engine, states, train

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True, maximize=True, fused=True),
    "rate in a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), fused=True),
}


class Projected(torch.optim.AdamW):
    """Somebody's class that goes on after the kernel."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Clip the weights as well."""
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.01, 0.01)


def run(numel: int | None, monkeypatch: pytest.MonkeyPatch, make: Any) -> tuple[Any, dict[str, torch.Tensor], int]:
    """(losses and norms, states, kernel calls); in pieces of `numel`, or not at all."""
    calls = 0

    class Counted(fused_kernel._InPieces):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal calls
            calls += func in fused_kernel._KERNELS
            return super().__torch_dispatch__(func, types, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setitem(training.OPTIMIZERS, "adamw", make)
        patch.setattr(fused_kernel, "_InPieces", Counted)
        if numel is None:
            patch.setattr(fused_kernel, "_applies", lambda batch, optimizer: False)
        else:
            patch.setattr(fused_kernel, "_PIECE", numel)
        engine = make_engine({"offload_optimizer": {"device": "cpu"}}, stage=2, bf16={"enabled": True})
        return train(engine), states(engine), calls


@pytest.mark.parametrize("numel", [64, 192, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_do_not_depend_on_the_pieces(name: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (run(n, monkeypatch, OPTIMIZERS[name]) for n in (None, numel))
    assert cut[0] == whole[0]
    assert differences(cut[1], whole[1]) == []
    assert cut[2] > 0 and whole[2] == 0


def test_what_a_class_does_after_the_kernel_reaches_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, held, calls = run(64, monkeypatch, lambda ps: Projected(ps, lr=1e-2, fused=True))
    assert calls == 0
    weights = [v for k, v in held.items() if k.startswith("weight.") and "unused" not in k]
    assert max(float(w.abs().max()) for w in weights) <= 0.0101


def test_a_hook_after_the_step_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    assert run(64, monkeypatch, make)[2] == 0
