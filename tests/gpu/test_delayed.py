"""Every wait is there and no memory is given away too early: late collectives change no bit of a training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hf_dist
from tests.covering import FULL_GRID, some_of
from tests.gpu.delayed import Delayed, LateWork, Recorded, delayed_rank
from tests.gpu.place import DEVICE
from tests.parity.families import make_batches, make_model

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
WORLD, RANK = 4, 1
STEPS, ROWS = 4, 6
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
HPZ = "zero_hpz_partition_size"
WEIGHTS = {"offload_param": {"device": "cpu"}}


@dataclass(frozen=True)
class Setting:
    """What is on beside the stage."""

    name: str
    stage: int = 3
    microbatches: int = 1
    zero: tuple[tuple[str, Any], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()
    checkpointing: bool = False
    lora: bool = False
    evaluates: bool = False

    def __str__(self) -> str:
        return f"z{self.stage}-{self.name}"

    @property
    def offloads(self) -> bool:
        """Then another kernel steps the weights, in the reference, too."""
        return any("offload" in key for key, _ in self.zero)

    def config(self, stage: int, alone: bool) -> dict[str, Any]:
        """The JSON; of the reference (`alone`) without what needs several ranks."""
        zero = {key: value for key, value in self.zero if not (alone and key in ("mics_shard_size", HPZ))}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.microbatches,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, **zero},
            **dict(self.more),
        }


def own(name: str) -> tuple[tuple[str, Any], ...]:
    """A key of ours that is true."""
    return (("hf_dist", {name: True}),)


BF16 = (("bf16", {"enabled": True}),)
SETTINGS = [
    *(Setting("plain", stage) for stage in range(4)),
    *(Setting("accumulation", stage, microbatches=3) for stage in range(4)),
    *(Setting("bf16", stage, microbatches=2, more=BF16) for stage in range(4)),
    *(Setting("hsdp", stage, zero=(("mics_shard_size", 2),), microbatches=2) for stage in (1, 2, 3)),
    *(Setting("optimizer-on-host", stage, zero=tuple(OPTIMIZER.items())) for stage in (1, 2, 3)),
    Setting("optimizer-on-host-bf16", zero=tuple(OPTIMIZER.items()), more=BF16, microbatches=2),
    Setting("weights-on-host", zero=(*OPTIMIZER.items(), *WEIGHTS.items()), microbatches=2),
    Setting("checkpointing", checkpointing=True, microbatches=2),
    Setting("second-copy", zero=((HPZ, 2),), microbatches=3, evaluates=True),
    Setting("second-copy-bf16", zero=((HPZ, 2),), microbatches=2, more=BF16),
    Setting("lora", lora=True),
    Setting("evaluation", evaluates=True),
    Setting("evaluation", stage=1, evaluates=True),
    Setting("once-per-window", more=own("reduce_once_per_window"), microbatches=3),
    Setting("kept-gathered", more=(("hf_dist", {"memory_budget": "1TB"}),), microbatches=2),
    Setting("optimizer-in-backward", more=own("optimizer_in_backward")),
]
LEFT_OUT = [("all_reduce", 0), ("all_gather", 1), ("reduce_scatter", 2), ("all_gather", 3), ("reduce_scatter", 3)]
if not FULL_GRID and DEVICE.type == "cpu":  # each way of sharding once, and what has collectives of its own
    NAMES = "z0-bf16 z1-evaluation z2-optimizer-on-host z3-hsdp z3-weights-on-host z3-checkpointing z3-second-copy"
    NAMES += " z3-lora z3-once-per-window z3-kept-gathered z3-optimizer-in-backward"
    SETTINGS = list(some_of({str(setting): setting for setting in SETTINGS}, *NAMES.split()).values())
    LEFT_OUT = [("all_reduce", 0), ("reduce_scatter", 2), ("all_gather", 3)]


@pytest.fixture(autouse=True)
def same_bits_each_time() -> Iterator[None]:
    """Kernels that add in one order; new memory is NaN until it is written."""
    backends = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(backends[0])
    torch.backends.cuda.enable_mem_efficient_sdp(backends[1])


def trained(setting: Setting, stage: int, late: Delayed | None) -> Iterator[tuple[list[torch.Tensor], Any]]:
    """(losses of the microbatches, the engine) before and after each step."""
    model = make_model("llama", lora=setting.lora, checkpointing=setting.checkpointing)
    engine = hf_dist.initialize(model, config=setting.config(stage, late is None), device=DEVICE)
    if late is not None:
        late.engine = engine
    yield [], engine
    for batch in make_batches("llama", STEPS):
        losses = []
        for i in range(setting.microbatches):
            part = {k: v[i * ROWS : (i + 1) * ROWS].to(DEVICE) for k, v in batch.items()}
            if setting.evaluates:
                model.eval()
                with torch.no_grad():
                    losses.append(engine(**part).loss.detach().clone())
                model.train()
            loss = engine(**part).loss
            engine.backward(loss)
            losses.append(loss.detach().clone())
            if late is not None and i == setting.microbatches - 1:
                late.step += 1  # the optimizer comes first in what follows
            engine.step()
        yield losses, engine


def record(setting: Setting) -> tuple[list[list[torch.Tensor]], Recorded]:
    """Losses and weights of one process."""
    losses, weights = [], []
    for found, engine in trained(setting, 1 if setting.offloads else 0, None):
        losses.append(found)
        masters = {}
        for group in engine.sharded.groups:
            values = group.source[:].to("cpu", torch.float32).clone()
            masters.update({slot.name: values[slot.offset : slot.stop] for slot in group.layout.slots})
        weights.append(masters)
    return losses, weights


def differences(setting: Setting) -> list[str]:
    """What is not equal, bit for bit, to one process."""
    losses, recorded = record(setting)
    found = []
    with delayed_rank(WORLD, RANK, DEVICE, recorded) as late:
        engine: Any = None
        for step, (here, made) in enumerate(trained(setting, setting.stage, late)):
            engine = made
            if not all(torch.equal(a, b) for a, b in zip(here, losses[step], strict=True)):
                found.append(f"losses of step {step}: {[*map(float, here)]}, alone {[*map(float, losses[step])]}")
        for group in engine.sharded.groups:
            values = group.source[:].to("cpu", torch.float32)
            for slot in group.layout.slots:
                start, stop = group.fragment(slot)
                first = max(group.resting[0] - slot.offset, 0)
                expected = recorded[-1][slot.name][first : first + stop - start]
                if not torch.equal(values[start:stop], expected):
                    found.append(f"{slot.name} after {STEPS} steps")
        assert late.counts["all_reduce" if setting.stage == 0 else "all_gather"]
        del engine, group
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_late_collectives_change_no_bit(setting: Setting) -> None:
    assert differences(setting) == []


def without_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of that name are not waited for."""
    wait = LateWork.wait

    def forget(work: LateWork, timeout: Any = None) -> bool:
        return True if work.name == name else wait(work, timeout)

    monkeypatch.setattr(LateWork, "wait", forget)


@pytest.mark.parametrize(("name", "stage"), LEFT_OUT)
def test_a_wait_that_is_left_out_is_seen(name: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_waits(name, monkeypatch)
    assert differences(Setting("plain", stage))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there are real ones")
def test_on_a_gpu_a_collective_waits_for_what_was_started_and_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Event) -> None:
            said.append(f"{self.name} waits for the event on {event.where}")

    class Event:
        where = ""

        def record(self, stream: Stream) -> None:
            self.where = stream.name

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("compute"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(said.append(f"on {stream.name}")))
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: said.append(f"NaN until {cycles} cycles are over: {written}")
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    written = torch.zeros(1)
    work = LateWork("all_reduce", Stream("side"), [(written, torch.ones(1))])
    work.wait()
    work.wait()
    assert said == [
        "side waits for compute",
        "on side",
        "NaN until 20000000 cycles are over: tensor([nan])",
        "compute waits for the event on side",
    ]
    assert written.item() == 1
