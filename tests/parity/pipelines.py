"""A few steps on pipeline stages x data ranks, and the same in one process with plain torch on the same microbatches."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hf_dist.dist.spawn import FOLDER
from tests.attempts import attempts
from tests.parallel.pipeline.zoo import make_microbatches, make_model
from tests.parity.optimizers import EPS, LR, PLAIN, SECTIONS
from tests.parity.train import CLIP
from tests.references import shared

_calls = itertools.count()
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@dataclass(frozen=True)
class PipelineCase:
    """One cell: `microbatches` per data rank and step."""

    family: str = "Llama"
    pp: int = 2
    dp: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int = 4
    tied: bool = False
    checkpointing: bool = False
    reshard: bool = False
    offload: bool = False
    precision: str = "fp32"
    """`bf16` or `fp16`: the model is built in fp32 and run in that."""
    experts: str | None = None
    """How the experts of a mixture run (`eager`: a loop that uses one weight once per expert), None for HF's choice."""
    optimizer: str = "adamw"
    """Or a section of `optimizers.SECTIONS`."""
    tp: int = 1
    """Ranks that share every layer, with parts of the sequence between its products."""
    overlap: bool = False
    """`tensor_parallel.tp_overlap_comm`."""
    evaluates: bool = False
    """Also evaluates other microbatches before each step."""
    outside: bool = False
    """Also calls the model after the last step, outside of the schedule."""
    steps: int = 3
    """The first has no optimizer state, the second has one of the same lengths, the third compares what both did."""

    def __str__(self) -> str:
        switches = ("tied", "checkpointing", "reshard", "offload", "evaluates", "outside")
        flags = [name for name in switches if getattr(self, name)]
        often = f"x{self.virtual}" if self.virtual > 1 else ""
        flags += [self.precision] if self.precision != "fp32" else []
        flags += [self.experts] if self.experts else []
        flags += [self.optimizer] if self.optimizer != "adamw" else []
        flags += [f"tp{self.tp}"] if self.tp > 1 else []
        flags += ["overlap"] if self.overlap else []
        shape = [self.family, f"pp{self.pp}", f"dp{self.dp}", f"z{self.stage}", self.schedule + often]
        return "-".join([*shape, f"m{self.microbatches}", *flags])

    @property
    def world(self) -> int:
        """Ranks."""
        return self.pp * self.dp * self.tp

    @property
    def blocks(self) -> int:
        """Of a Llama: stages are uneven. Slices cost more, and have fewer."""
        return max(3, self.pp * self.virtual + (self.tp == 1))

    @property
    def model(self) -> tuple[str, bool, bool, int]:
        """Arguments of `build`."""
        return self.family, self.tied, self.checkpointing, self.blocks

    @property
    def work(self) -> tuple[tuple[str, bool, bool, int], int, str, bool, int]:
        """What the reference depends on; recomputation gives the same bits."""
        return (
            replace(self, checkpointing=False).model,
            self.microbatches * self.dp,
            self.optimizer,
            self.evaluates,
            self.steps,
        )

    @property
    def config(self) -> dict[str, Any]:
        """The JSON."""
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": self.stage, **(OFFLOAD if self.offload else {})},
            **({"optimizer": SECTIONS[self.optimizer]} if self.optimizer in SECTIONS else {}),
            **({self.precision: {"enabled": True}} if self.precision != "fp32" else {}),
            # The reference takes each microbatch of a rank by itself.
            "hf_dist": {"router_loss": "local", **({"sequence_regions": True} if self.tp > 1 else {})},
            "tensor_parallel": {"autotp_size": self.tp, "tp_overlap_comm": self.overlap},
            "pipeline": {
                "stages": self.pp,
                "schedule": self.schedule,
                "virtual_stages": self.virtual,
                "reshard_per_microbatch": self.reshard,
            },
        }


def build(family: str, tied: bool, checkpointing: bool, blocks: int = 8) -> nn.Module:
    """`blocks`: of Llama; others have what the zoo gives them."""
    if family != "Llama":
        return make_model(family, tied=tied, checkpointing=checkpointing)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=101, hidden_size=32, num_hidden_layers=blocks, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, use_cache=False, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def step_batches(family: str, count: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Ragged microbatches of the whole window, other ones in every step."""
    return _microbatches(family, count * (step + 1))[step * count :]


_microbatches = functools.cache(make_microbatches)


def evaluation_batches(family: str, count: int, step: int) -> list[dict[str, torch.Tensor]]:
    """As many as a window, of lengths in another order."""
    return step_batches(family, count, step + 1)[::-1]


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """Decay for matrices only."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=LR,
        eps=EPS,
        foreach=True,
    )


def reference(*work: Any) -> dict[str, Any]:
    """The mean of the model's own loss over the microbatches of each step, in one process; `work`: of a `PipelineCase`."""
    return shared(("pipelines", work), lambda: _reference(*work))


def _reference(
    built: tuple[str, bool, bool, int], count: int, optimizer_name: str, evaluates: bool, steps: int
) -> dict[str, Any]:
    family, model = built[0], build(*built)
    optimizer = PLAIN[optimizer_name](model) if optimizer_name in SECTIONS else optimizer_for(model)
    losses, norms, evaluated = [], [], []
    for step in range(steps):
        if evaluates:
            with torch.no_grad():
                own = [model.eval()(**batch).loss.item() for batch in evaluation_batches(family, count, step)]
            evaluated.append(sum(own) / count)
            model.train()
        window = 0.0
        for batch in step_batches(family, count, step):
            loss = model(**batch).loss / count
            loss.backward()
            window += loss.item()
        losses.append(window)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    outside = called_outside(model, family, steps)
    return {"losses": losses, "norms": norms, "weights": weights, "evaluated": evaluated, "outside": outside}


@torch.no_grad()
def called_outside(model: nn.Module, family: str, steps: int) -> float:
    """The loss of a batch that no step had."""
    return float(model(**step_batches(family, 1, steps)[0]).loss)


def train_on_rank(rank: int, world: int, case: PipelineCase, device: str = "cpu") -> dict[str, Any]:
    """The same through `engine.train_batch`; this rank's weights under the full model's names."""
    import hf_dist
    from hf_dist.sharding.param_slice import held_slice

    model = build(*case.model)
    if case.experts:
        model.set_experts_implementation(case.experts)
    before = {n: (tuple(p.shape), id(p)) for n, p in model.named_parameters()}
    engine = hf_dist.initialize(
        model,
        config=case.config,
        optimizer=None if case.optimizer in SECTIONS else optimizer_for(model),
        example_batch=step_batches(case.family, 1, 0)[0],
        device=device,
    )
    losses, norms, evaluated = [], [], []
    for step in range(case.steps):
        count = case.microbatches * case.dp
        if case.evaluates:
            other = evaluation_batches(case.family, count, step)
            evaluated.append(float(engine.eval_batch(iter(other[engine.mesh.data.rank :: case.dp]))))
        window = step_batches(case.family, count, step)
        losses.append(float(engine.train_batch(iter(window[engine.mesh.data.rank :: case.dp]))))
        norms.append(engine.get_global_grad_norm())
    outside = called_outside(model, case.family, case.steps) if case.outside else None
    after = {n: (held_slice(p).whole, id(p)) for n, p in model.named_parameters()}
    assert after.items() <= before.items(), "object, name or shape changed"
    with hf_dist.gathered(model):
        weights = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "evaluated": evaluated, "outside": outside}


def run_cases(rank: int, world: int, cases: list[PipelineCase], device: str = "cpu") -> list[Any]:
    """Every case on this rank; a case that raises gives its traceback, so that the others still run."""
    train = with_shared_plans(rank, world)
    return attempts(rank, world, (functools.partial(train, case, device) for case in cases))


def with_shared_plans(rank: int, world: int) -> Callable[..., dict[str, Any]]:
    """`train_on_rank(rank, world, ...)`, where rank 0 plans for all ranks, and cases of the same model and stages share a plan.

    A plan is plain data, "with the same result on every rank", and most of what a case costs.
    """
    from hf_dist.engine import pipeline_runner

    plan, plans = pipeline_runner.plan_stages, dict[Any, Any]()
    store = dist.FileStore(str(Path(os.environ[FOLDER], f"plans-{next(_calls)}")), world)

    def train(case: PipelineCase, device: str = "cpu") -> dict[str, Any]:
        def planned(model: Any, batch: Any, num_stages: int, **more: Any) -> Any:
            key = (case.model, case.precision, case.experts, case.tp, num_stages)
            if key not in plans:
                if rank == 0:
                    store.set(repr(key), _pickled(lambda: plan(model, batch, num_stages, **more)))
                plans[key] = pickle.loads(store.get(repr(key)))
            if isinstance(plans[key], Exception):
                raise plans[key]
            return plans[key]

        with mock.patch.object(pipeline_runner, "plan_stages", planned):
            return train_on_rank(rank, world, case, device)

    return train


def _pickled(make: Callable[[], Any]) -> bytes:
    """What it made, or why it did not: ranks that wait for it fail, too."""
    try:
        return pickle.dumps(make())
    except Exception as error:
        return pickle.dumps(RuntimeError(f"rank 0: {error!r}"))
