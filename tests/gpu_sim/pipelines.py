"""What the ranks of a simulated pipeline run: the first rank of every stage; the others of a stage do as it does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hf_dist.parallel.pipeline.standin import StandIn
from tests.gpu_sim.rank import GPU, simulated_rank
from tests.gpu_sim.trace import Trace
from tests.gpu_sim.training import SMALL, STEADY
from tests.scale.engines import config_of

SEQ = 16


@dataclass(frozen=True)
class PipelineSetting:
    """One pipeline."""

    schedule: str = "1f1b"
    stages: int = 2
    data: int = 1
    """Ranks that hold the same stages."""
    stage: int = 0
    """Of ZeRO."""
    microbatches: int = 4
    steps: int = 2
    evaluates: bool = False
    """Also between steps."""
    tensor: int = 1
    """Ranks that share every layer, with parts of the sequence between its products and between the stages."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are simulated."""
        return tuple(range(0, self.stages * self.alike, self.alike))

    @property
    def alike(self) -> int:
        """Ranks of a stage."""
        return self.data * self.tensor

    @property
    def virtual(self) -> int:
        """Stages of a rank."""
        return 2 if self.schedule.startswith("interleaved") else 1

    @property
    def layers(self) -> int:
        """One for each stage."""
        return self.stages * self.virtual

    def config(self) -> dict[str, Any]:
        """The JSON."""
        pipeline = {"stages": self.stages, "schedule": self.schedule, "virtual_stages": self.virtual}
        own: dict[str, Any] = {"stall_report_seconds": 0, "check_load": False, "tiled_loss": False}
        more: dict[str, Any] = {}
        if self.tensor > 1:
            own |= {"sequence_regions": True, "tiled_loss": "auto"}
            more["tensor_parallel"] = {"autotp_size": self.tensor}
        return config_of(
            self.stage, pipeline=pipeline, gradient_accumulation_steps=self.microbatches, hf_dist=own, **more
        )

    def model(self) -> Any:
        """On the device of the context."""
        return replace(SMALL, width=64, inner=128, vocabulary=256, layers=self.layers).llama()


def train(rank: int, meet: str, setting: PipelineSetting, without: str = "") -> Trace:
    """The trace of some windows on one rank; `without`: see `training.train`."""
    import hf_dist
    from hf_dist.parallel.tensor.choose import choose_plan
    from hf_dist.sharding.units import find_unit_modules
    from tests.gpu_sim.breakages import BREAKAGES

    def represented(other: int) -> int:
        return other - other % setting.alike

    world = setting.stages * setting.alike
    if setting.tensor > 1:  # verified with elements, and remembered for when there are none
        with torch.device("meta"):
            model = setting.model()
        choose_plan(model, setting.tensor, find_unit_modules, None, True)
    with simulated_rank(world, rank, meet=meet, represented=represented) as (recorder, _), recorder:
        if without:
            BREAKAGES[without]()
        StandIn.answer = _without_elements  # type: ignore[method-assign]
        with torch.device(GPU):
            model = setting.model()
        engine = hf_dist.initialize(model, config=setting.config(), device=GPU)
        recorder.trace.mark("built")
        for number in range(setting.steps):
            if number == setting.steps - 1:
                recorder.trace.mark(STEADY)
            engine.train_batch(iter([_batch() for _ in range(setting.microbatches)]))
            if setting.evaluates:
                engine.eval_batch(iter([_batch() for _ in range(setting.microbatches)]))
        return replace(recorder.trace, entries=list(recorder.trace.entries))  # without what ends with the job


def _without_elements(self: StandIn, args: Any, kwargs: Any, device: Any, answer: Any = StandIn.answer) -> Any:
    """The engine leaves all modes for it, and there is no GPU without ours."""
    shapes = answer(self, args, kwargs, torch.device("meta"))
    return tree_map_only(torch.Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), shapes)


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(1, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}
