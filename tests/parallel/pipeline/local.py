"""All ranks of a pipeline in one process: every rank's actions, tensors handed over in memory."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.parallel.pipeline.actions import Action, Kind, Schedule
from hf_dist.parallel.pipeline.communication import Channel, add_communication
from hf_dist.parallel.pipeline.runtime import Hooks, Run, ScheduleRun
from hf_dist.parallel.pipeline.split import StagedModel
from hf_dist.parallel.pipeline.stage_plan import StagePlan


class LocalTransport:
    """Queues; a transfer is a copy, so that nobody reads what another rank overwrites."""

    waits_on_device = False

    def __init__(self) -> None:
        self.queues: dict[Channel, deque[list[torch.Tensor]]] = defaultdict(deque)

    def send(self, channel: Channel, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.queues[channel].append([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])

    def can_post(self, channel: Channel, key: Any) -> bool:
        return True

    def post(self, channel: Channel, key: Any, specs: Any) -> None:
        pass

    def receive(self, channel: Channel, key: Any, specs: Any) -> list[torch.Tensor]:
        return self.queues[channel].popleft()

    def finish(self) -> None:
        pass


def stage_models(model: nn.Module, plan: StagePlan, schedule: Schedule) -> list[StagedModel]:
    """A copy of the model for every rank."""
    return [StagedModel(copy.deepcopy(model), plan, schedule.stages_of(r)) for r in range(schedule.num_ranks)]


def run_local(
    stages: list[StagedModel], schedule: Schedule, microbatches: list[Any], function: Run, hooks: Hooks | None = None
) -> list[Any]:
    """What the last stage returned by microbatch; gradients are left on the copies."""
    schedule = add_communication(schedule)
    transport = LocalTransport()
    runs = [ScheduleRun(staged, schedule, rank, transport, hooks) for rank, staged in enumerate(stages)]
    for run in runs:
        run.begin(copy.deepcopy(microbatches), function)  # some models write into their inputs
    positions, done = [0] * len(runs), set[Action]()
    while any(p < len(run.actions) for p, run in zip(positions, runs, strict=True)):
        for rank, run in enumerate(runs):
            while positions[rank] < len(run.actions) and _can_run(run.actions[positions[rank]], done):
                action = run.actions[positions[rank]]
                run.perform(action)
                done.add(action)
                positions[rank] += 1
    return runs[schedule.rank_of(schedule.num_stages - 1)].results


def _can_run(action: Action, done: set[Action]) -> bool:
    if action.kind is Kind.RECV_FORWARD:
        return Action(action.stage - 1, Kind.SEND_FORWARD, action.microbatch) in done
    if action.kind is Kind.RECV_BACKWARD:
        return Action(action.stage + 1, Kind.SEND_BACKWARD, action.microbatch) in done
    return True


def summed_gradients(stages: list[StagedModel]) -> dict[str, torch.Tensor]:
    """Gradient of each parameter of the whole model: the sum over the stages that hold it."""
    total: dict[str, torch.Tensor] = {}
    for staged in stages:
        for name, param in staged.model.named_parameters():
            if param.grad is not None:
                total[name] = total[name] + param.grad if name in total else param.grad.clone()
    return total
