"""What makes the host wait for a GPU in every step, counted without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import BatchSampler, SequentialSampler

import hf_dist
from hf_dist.dist.mesh import MeshAxis
from hf_dist.engine.engine import _to_device
from hf_dist.hf.data import make_seekable
from hf_dist.sharding.combining import combine
from hf_dist.sharding.group_axes import Combination
from tests.hf.test_arguments import CONFIG, arguments

GPU = torch.device("cuda", 0)


class Forked(nn.Module):
    """A model of which one layer is left out when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        x = self.always(x)
        return (self.sometimes(x) if whole else x).square().sum()


class Read(TorchFunctionMode):
    """Tensors read into Python: for each the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("whole", [True, False])
def test_who_else_had_a_gradient_of_a_weight_of_two_stages_is_read_only_where_one_had_none(whole: bool) -> None:
    model = Forked()
    config = {"train_batch_size": 1}
    engine = hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    engine.backward(engine(torch.ones(1, 4), whole))
    holders = Combination(MeshAxis("holders", 2, 0, None), "sum", at_end=True, between_stages=True)
    with Read() as read:
        for group in engine.sharded.trainable_groups:
            combine(group, holders).wait()
    assert (read.count > 0) is not whole


class MadeOnHost(TorchFunctionMode):
    """Tensors made from Python numbers: each is a copy that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 2])
def test_who_had_a_gradient_is_sent_to_the_device_when_it_changes_and_not_in_each_step(stage: int) -> None:
    model = Forked()
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    engine = hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []
    for whole in (True, True, True, False, False, True):
        engine.backward(engine(torch.ones(1, 4), whole))
        with MadeOnHost() as made:
            engine.step()
        counts.append(made.count)
    assert counts == [1, 0, 0, 1, 0, 1]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool, bool]]:
    """(device, non_blocking, from page-locked memory) of every move of a tensor."""
    moved: list[tuple[Any, bool, bool]] = []
    locked: set[int] = set()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        locked.add(id(tensor))
        return tensor

    def to(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        moved.append((device, non_blocking, id(tensor) in locked))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return moved


def test_batches_go_to_a_gpu_without_waiting_for_the_step_before(moves: list[Any]) -> None:
    batch = {"ids": torch.ones(3), "more": [torch.zeros(2)], "text": "as it is"}
    assert _to_device(batch, GPU)["text"] == "as it is"
    assert moves == [(GPU, True, True)] * 2


def test_on_a_cpu_nothing_is_page_locked(moves: list[Any]) -> None:
    _to_device({"ids": torch.ones(3)}, torch.device("cpu"))
    assert moves == [(torch.device("cpu"), False, False)]


def test_under_a_config_the_trainer_does_not_look_at_the_loss_of_every_microbatch(tmp_path: Path) -> None:
    assert arguments(tmp_path).logging_nan_inf_filter is True, "without a config it is the stock class"
    assert arguments(tmp_path, dist_config=CONFIG).logging_nan_inf_filter is False
    assert arguments(tmp_path, dist_config=CONFIG, logging_nan_inf_filter=True).logging_nan_inf_filter is True


@pytest.mark.parametrize("device", [None, torch.device("cpu"), GPU])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_page_locked_batch_of_the_trainer_is_copied_beside_the_step_before(pinned: bool, device: Any) -> None:
    loader = DataLoaderShard(
        list(range(4)),
        device=device,
        batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, False),
        pin_memory=pinned,
    )
    made: Any = make_seekable(loader)
    assert made is not loader and made._non_blocking is (pinned and device == GPU)
