"""Stages that send hidden states in a codec, and one process that rounds them, and their gradients, at the same places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist.parallel.pipeline import plan_stages
from hf_dist.tensors.codecs import Codec, codec_of
from tests.parallel.pipeline import zoo
from tests.sharding.wires.reference import Batch, Case, Reference
from tests.sharding.wires.training import LENGTH, ROWS, batches_of, config_of, optimizer_of

WIDTH = 32
"""Of the models' hidden states."""


@dataclass(frozen=True)
class Staged(Case):
    """A case with stages; `world` and `shards` count data ranks."""

    family: str = "Llama"
    stage: int = 0
    world: int = 2
    accumulation: int = 3
    steps: int = 3
    pp: int = 2
    tp: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    stages: str | None = "int8"

    @property
    def num_ranks(self) -> int:
        """All ranks of the job."""
        return self.pp * self.world * self.tp


def model_of(case: Staged) -> Any:
    """The model of a case, with equal weights everywhere."""
    return zoo.make_model(case.family, case.tied, case.checkpointing).train()


class _Sent(torch.autograd.Function):
    """A hidden state that arrives rounded, and so does its gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, codec: Codec) -> torch.Tensor:
        ctx.codec = codec
        return _rounded(hidden, codec)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _rounded(gradients[0], ctx.codec), None


def _rounded(hidden: torch.Tensor, codec: Codec) -> torch.Tensor:
    tokens = hidden.reshape(-1, hidden.shape[-1])
    if codec.nbytes(tokens.shape[1]) >= tokens[0].nbytes:
        return hidden
    return torch.stack([codec.rounded(token) for token in tokens.detach()]).view(hidden.shape)


def round_at_cuts(model: nn.Module, case: Staged, batch: Batch) -> None:
    """Round what the last block of each stage but the last one returns."""
    codec = codec_of(case.stages, case.block)
    plan = plan_stages(model_of(case), dict(batch), case.pp * case.virtual, method="uniform").plan

    def round_result(module: nn.Module, args: object, output: Any) -> Any:
        assert codec is not None
        if isinstance(output, tuple):
            return (_Sent.apply(output[0], codec), *output[1:])
        return _Sent.apply(output, codec)

    if codec is not None:
        for bound in plan.bounds[1:-1]:
            model.get_submodule(plan.calls[bound - 1].module).register_forward_hook(round_result)


def held_out(case: Staged) -> Batch:
    """A batch that is not trained."""
    return batches_of(case, 1000)[0][0]


def alone(case: Staged) -> dict[str, Any]:
    """One process."""
    model = model_of(case)
    round_at_cuts(model, case, held_out(case))
    one = Reference(model, case, optimizer_of)
    for step in range(case.steps):
        one.step(batches_of(case, step))
    one.deliver()
    with torch.no_grad():
        evaluated = float(one.model.eval()(**held_out(case)).loss)
    return {"losses": one.losses, "norms": one.norms, "weights": one.masters, "evaluated": evaluated}


def on_stages(rank: int, world: int, cases: Sequence[Staged]) -> list[dict[str, Any]]:
    """By case: losses and weights of the engine; the bytes that the last step sent to other stages."""
    import hf_dist
    from hf_dist.hf.state_dict import full_state_dict

    found = []
    for case in cases:
        config = config_of(case)
        config["pipeline"] = {
            "stages": case.pp,
            "schedule": case.schedule,
            "virtual_stages": case.virtual,
            "partition_method": "uniform",
        }
        config["hf_dist"]["wires"] |= {"stages": case.stages} if case.stages else {}
        if case.tp > 1:
            config["tensor_parallel"] = {"autotp_size": case.tp}
        model = model_of(case)
        engine = hf_dist.initialize(
            model, config=config, optimizer=optimizer_of(list(model.parameters())), example_batch=held_out(case)
        )
        assert engine.pipeline is not None
        losses, norms, sent = [], [], 0
        for step in range(case.steps):
            before = engine.pipeline.transport.sent_nbytes
            batches = batches_of(case, step)[engine.mesh.data.rank]
            losses.append(float(engine.train_batch(iter(batches))))
            norms.append(float(engine.get_global_grad_norm()))
            sent = engine.pipeline.transport.sent_nbytes - before
        evaluated = float(engine.eval_batch(itertools.repeat(held_out(case))))
        state = full_state_dict(engine.sharded)
        found.append({"losses": losses, "norms": norms, "weights": state, "sent": sent, "evaluated": evaluated})
    return found


def bytes_between(case: Staged) -> int:
    """What all ranks together send to other stages in a step."""
    codec = codec_of(case.stages, case.block)
    element = 2 if case.bf16 else 4
    token = WIDTH * element if codec is None else min(codec.nbytes(WIDTH), WIDTH * element)
    cuts = case.pp * case.virtual - 1
    return 2 * cuts * case.accumulation * case.world * case.tp * ROWS * LENGTH * token
