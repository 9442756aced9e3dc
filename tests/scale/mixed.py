"""One rank of a job that mixes axes, on fake tensors: what it sends along each axis, holds and peaks at, beside the plan.

`python -m tests.scale.mixed [--only NAME ...] [--write]` prints a table; `--write` puts it into `hf_dist/planning/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from hf_dist.parallel.pipeline.probe import TensorSpec
from tests.harness import ROOT, run_ranks
from tests.scale.engines import LLAMA_3, chunked_loss, config_of
from tests.scale.world import FakeRank, fake_world, forget_launcher

RESULTS = Path(ROOT, "hf_dist", "planning", "RESULTS.md")
BEGIN, END = "<!-- begin: python -m tests.scale.mixed --write -->", "<!-- end -->"
STEPS = 2
"""The first makes the optimizer's states and agrees on orders, the second is measured."""
FEW = 64
"""Bytes: less is what ranks tell each other (do they read the same rows), not what a step needs."""
Sent = dict[str, dict[str, tuple[int, int]]]
"""Axis -> operation -> (number, bytes)."""
AXES = ("shard", "edp", "dp_replicate", "tp", "cp", "ep")
"""In the order of the table. Of ep the plan says nothing; of tp and cp in a pipeline an equal part for each stage."""


@dataclass(frozen=True)
class Job:
    """A model on so many ranks; the batch of one data rank."""

    model: str
    ranks: int
    sizes: dict[str, int] = field(default_factory=dict)
    """Of tp, cp, pp, ep; of dp_shard where there are copies."""
    stage: int = 3
    seq: int = 8192
    microbatches: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    """More keys of the config, by their paths; None takes one out."""
    place: int = 0
    """Stage of the pipeline whose first rank is measured."""

    @property
    def rank(self) -> int:
        """Its number in the job."""
        return self.place * self.ranks // self.sizes.get("pp", 1)

    @property
    def config(self) -> dict[str, Any]:
        """bf16, AdamW, every block recomputed, the loss in chunks."""
        keys: dict[str, Callable[[int], dict[str, Any]]] = {
            "tp": lambda n: {"tensor_parallel": {"autotp_size": n}},
            "cp": lambda n: {"sequence_parallel_size": n},
            "pp": lambda n: {"pipeline": {"stages": n}},
            "ep": lambda n: {"expert_parallel": {"enabled": True, "autoep_size": n}},
        }
        more: dict[str, Any] = {"activation_checkpointing": {"every_n_layers": 1}}
        for axis, size in self.sizes.items():
            more |= keys[axis](size) if axis in keys else {}
        config = config_of(self.stage, **more)
        config["gradient_accumulation_steps"] = self.microbatches
        config["hf_dist"]["tiled_loss"] = "auto"
        if "tp" in self.sizes:
            config["hf_dist"]["sequence_regions"] = True
        if "dp_shard" in self.sizes:
            config["zero_optimization"]["mics_shard_size"] = self.sizes["dp_shard"]
        for path, value in self.more.items():
            section, _, key = path.partition(".")
            config.setdefault(section, {})[key] = value
        return config


_STAGED = {
    "70b-512": Job("70b", 512, {"tp": 8, "pp": 4}, stage=1, microbatches=8),
    "405b-512": Job("405b", 512, {"tp": 8, "pp": 8}, stage=1, microbatches=16),
    "deepseek-v3-4096": Job("deepseek-v3", 4096, {"ep": 64, "pp": 8}, seq=4096, microbatches=16),
}
_PLACES = {"70b-512": (0, 1, 2, 3), "405b-512": (0, 1, 7), "deepseek-v3-4096": (0, 1, 7)}


def _stages(name: str) -> dict[str, Job]:
    return {f"{name}-{place}": replace(_STAGED[name], place=place) for place in _PLACES[name]}


JOBS = {
    "8b-64": Job("8b", 64, {"cp": 4}, seq=16384),
    "8b-512": Job("8b", 512, {"tp": 2}),
    "8b-4096": Job("8b", 4096, {"dp_shard": 64}),
    "70b-64": Job("70b", 64, {"tp": 8}),
    **_stages("70b-512"),
    "70b-4096": Job("70b", 4096, {"tp": 8, "cp": 4, "dp_shard": 64}, seq=16384),
    "405b-64": Job("405b", 64, {"tp": 8}),
    **_stages("405b-512"),
    "405b-4096": Job("405b", 4096, {"tp": 8, "cp": 4}, seq=16384),
    "qwen3-235b-64": Job("qwen3-235b", 64, {"ep": 8}, seq=4096),
    "qwen3-235b-512": Job("qwen3-235b", 512, {"ep": 32}, seq=4096),
    "qwen3-235b-4096": Job("qwen3-235b", 4096, {"ep": 32, "cp": 2}, seq=8192),
    "deepseek-v3-64": Job("deepseek-v3", 64, {"ep": 64}, seq=4096),
    "deepseek-v3-512": Job("deepseek-v3", 512, {"ep": 64}, seq=4096),
    **_stages("deepseek-v3-4096"),
}

QWEN_3: dict[str, dict[str, Any]] = {
    "qwen3-30b": dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4,
    ),
    "qwen3-235b": dict(
        hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4,
    ),
}  # fmt: skip


MIXTRAL: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": dict(),  # the defaults
    "mixtral-8x22b": dict(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
    ),
}  # fmt: skip


def model_of(name: str) -> Any:
    """A stock HF model; make it on meta or on fake tensors."""
    if name in LLAMA_3:
        return replace(LLAMA_3[name], checkpointing=False).llama()
    if name in QWEN_3:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        alike = dict(head_dim=128, vocab_size=151936, num_experts=128, num_experts_per_tok=8)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**alike, **QWEN_3[name], use_cache=False)).train()
    if name in MIXTRAL:
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(MixtralConfig(**MIXTRAL[name], use_cache=False)).train()
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False)).train()  # the defaults are the 671B


class _Taken:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@contextmanager
def without_values(arriving: Sequence[TensorSpec] = ()) -> Iterator[None]:
    """Inside, what looks at elements or asks other ranks does not: it was proven elsewhere, on real tensors and ranks.

    `arriving`: what the stage before sends, if there is one.
    """
    from transformers import masking_utils

    from hf_dist.engine import build, pipeline_runner
    from hf_dist.parallel.experts.exchange import ExpertExchange
    from hf_dist.parallel.experts.routing_plan import even_plan
    from hf_dist.parallel.pipeline import P2PTransport
    from hf_dist.parallel.sequence import outputs
    from hf_dist.parallel.tensor import tp_collectives
    from hf_dist.parallel.tensor_on_shards import plan_of
    from hf_dist.sharding import consistency

    whole_columns = tp_collectives.whole_columns

    def plan_tensors(model: Any, config: Any, mesh: Any, in_place: bool = False) -> Any:
        """What rank 0 plans for all ranks, on any of them."""
        with _disable_current_modes():
            return plan_of(model, config, mesh.tp.size, spread=mesh.axes.size("ep") > 1, in_place=in_place)

    def own_columns(columns: torch.Tensor, *args: Any) -> torch.Tensor:
        """Of the logits; the tiny copy that plans are verified with has them whole."""
        return columns if isinstance(columns, FakeTensor) else whole_columns(columns, *args)

    attention = functional.scaled_dot_product_attention

    def fused(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Values as wide as queries: else the CPU has no fused kernel, and all scores are there (GPUs have one)."""
        width = value.shape[-1]
        return attention(query, key, functional.pad(value, (0, query.shape[-1] - width)), *args, **kwargs)[..., :width]

    def asks(tensor: Any = None) -> bool:
        """HF makes masks for what it takes to be traced; here no row is padded, and it may ask."""
        return False

    start = P2PTransport._start

    def sent(*args: Any, **kwargs: Any) -> list[Any]:
        """As of a peer that takes at once what it is sent."""
        start(*args, **kwargs)
        return [_Taken()]

    changes: list[tuple[Any, str, Any]] = [
        (build, "plan_tensors", plan_tensors),
        (pipeline_runner, "_shared", lambda mesh, make: make()),
        (outputs.WholeTensor, "of", staticmethod(lambda part, shape, gather: part)),
        (tp_collectives, "whole_columns", own_columns),
        (functional, "scaled_dot_product_attention", fused),
        (ExpertExchange, "_plan", lambda exchange, chosen: even_plan(chosen, exchange.axis.size)),
        (masking_utils, "is_tracing", asks),
        (P2PTransport, "_start", sent),
        (P2PTransport, "_receive_specs", lambda *args: list(arriving)),
        (consistency, "checksum", lambda tensor: 0),
    ]
    with ExitStack() as stack:
        stack.enter_context(mock.patch("hf_dist.parallel.sequence.verify.verify", lambda *args, **kwargs: None))
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def measure(job: Job, model: Any = None) -> dict[str, Any]:
    """One rank of `job`. sent: by axis, in a step; resident, peak: bytes; set_up: host seconds, operators not counted.

    `model`: makes it, by default the one that the job names.
    """
    import hf_dist
    from hf_dist.dist import comm_counter

    make = model or (lambda: model_of(job.model))
    with fake_world(job.ranks, job.rank), FakeRank() as tensors, tensors.live:
        start, inside = time.thread_time(), tensors.operator_seconds
        built = make()
        batch = {name: torch.zeros(1, job.seq, dtype=torch.long) for name in ("input_ids", "labels")}
        with without_values(arriving(job, built)):
            engine = hf_dist.initialize(built, config=job.config, device="cpu", example_batch=batch)
            set_up = time.thread_time() - start - (tensors.operator_seconds - inside)
            split = None if engine.tiled_loss is None else engine.tiled_loss._split
            for _ in range(STEPS):
                tensors.live.peak = tensors.live.nbytes
                window = iter([batch] * job.microbatches)
                with comm_counter.record() as log:
                    engine.train_batch(window, lambda m, rows: chunked_loss(m, **rows, split=split))
        sent: Sent = {}
        for entry in log.entries:
            if entry.nbytes <= FEW:
                continue
            own = sent.setdefault("tp" if entry.axis.endswith(" on tp") else entry.axis, {})
            count, nbytes = own.get(entry.op, (0, 0))
            own[entry.op] = count + 1, nbytes + entry.nbytes
        resident = engine.resident_nbytes()["device"]
    return {"sent": sent, "resident": resident, "peak": tensors.live.peak, "set_up": set_up}


def arriving(job: Job, model: Any) -> list[TensorSpec]:
    """Hidden states of a rank's part of a sequence."""
    tokens = job.seq // (job.sizes.get("cp", 1) * job.sizes.get("tp", 1))
    return [TensorSpec((1, tokens, model.config.hidden_size), torch.bfloat16, True)]


def planned(job: Job, model: Any = None) -> dict[str, Any]:
    """The same of the plan, of the rank's stage: nothing is run."""
    from hf_dist.config import axes_of, load_config, resolve_without_trainer
    from hf_dist.memory.offload.resting import Tier
    from hf_dist.planning.planner import Planner, Workload

    with torch.device("meta"):
        made = (model or (lambda: model_of(job.model)))()
    config = load_config(job.config)
    data = axes_of(config, job.ranks).size("data")
    config = resolve_without_trainer(config, data_ranks=data, hidden_size=made.config.hidden_size)
    planner = Planner(made, job.ranks, Workload(1, job.seq))
    plan = planner.plan_rank(config, job.place)
    return {
        "resident": plan.states.nbytes.resident(Tier.DEVICE),
        "peak": plan.device_peak,
        "sent": planner.traffic(config, plan),
    }


def differences(job: Job, got: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """What of the exact figures differs, in words."""
    exact = AXES[:3] if "pp" in job.sizes else AXES[:-1]
    found = [] if got["resident"] == plan["resident"] else [f"at rest {got['resident']}, planned {plan['resident']}"]
    for axis in exact:
        ran, said = got["sent"].get(axis, {}), plan["sent"].get(axis, {})
        if ran != said:
            found.append(f"{axis}: {ran}, planned {said}")
    return found


def measure_job(rank: int, world: int, name: str) -> list[dict[str, Any]]:
    """Run and plan, in a process of its own."""
    forget_launcher()
    return [measure(JOBS[name]), planned(JOBS[name])]


def line(name: str) -> str:
    """A row of the table. Raises `AssertionError` where an exact figure differs from the plan."""
    job = JOBS[name]
    got, plan = run_ranks(measure_job, 1, (name,), timeout=3000)[0]
    assert not (wrong := differences(job, got, plan)), wrong

    def sent(axis: str) -> str:
        own = got["sent"].get(axis, {}).values()
        return f"{sum(n for n, _ in own)}, {sum(nbytes for _, nbytes in own) / 1e9:.2f}" if own else ""

    sizes = " ".join(f"{axis} {size}" for axis, size in job.sizes.items())
    stages = job.sizes.get("pp", 1)
    place = f", {_STAGE}{job.place} of {stages}" if stages > 1 else ""
    cells = [job.model, str(job.ranks), f"{sizes}, ZeRO {job.stage}{place}", f"{job.microbatches} x {job.seq}"]
    cells += [sent(axis) for axis in AXES]
    cells += [f"{got[key] / 1e9:.2f}" for key in ("resident", "peak")]
    cells += [f"{plan['peak'] / 1e9:.2f}", f"{got['set_up']:.1f}"]
    cells += [f"{_fully_sharded(job) / 1e9:.0f}"]
    return f"| {' | '.join(cells)} |"


def _fully_sharded(job: Job) -> int:
    """Bytes that a rank of FSDP2 sends for one microbatch on as many ranks: bf16 gathered twice, fp32 reduced once."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in model_of(job.model).parameters())
    return 8 * numel * (job.ranks - 1) // job.ranks


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    head = ["model", "ranks", "layout", "rows", *AXES]
    head += ["at rest GB", "peak GB", "planned", "set-up s", "FSDP2 GB"]
    top = [f"| {' | '.join(head)} |", f"|{'---|' * 4}{'--:|' * (len(head) - 4)}"]
    made: dict[str, str] = {}
    for name in arguments.only:
        made[name] = line(name)
        print("\n".join([*(top if len(made) == 1 else ()), made[name]]), flush=True)
    if arguments.write:
        write(top, made)


def write(top: list[str], made: dict[str, str]) -> None:
    """Put the rows of these jobs into the table; other rows stay."""
    text = RESULTS.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    old = text[start:stop].splitlines()
    kept = {_name_of(row): row for row in old if _cell(row, 1) in _MODELS}
    rows = {name: made.get(name) or kept[name] for name in JOBS if name in made or name in kept}
    dated = f"{datetime.date.today()}, torch {torch.__version__}"
    notes = [row for row in old if row and not row.startswith("|")] if len(made) < len(JOBS) else []
    notes.append(f"{dated}: {', '.join(made)}." if notes else f"{dated}.")
    lines = [*top, *rows.values(), "", *notes]
    RESULTS.write_text(text[:start] + "\n\n" + "\n".join(lines) + "\n\n" + text[stop:], encoding="utf-8")


def _name_of(row: str) -> str:
    _, _, place = _cell(row, 3).partition(_STAGE)
    return "-".join([_cell(row, 1), _cell(row, 2), *place.split()[:1]])


_STAGE = "stage "
_MODELS = {job.model for job in JOBS.values()}


def _cell(row: str, number: int) -> str:
    return row.split("|")[number].strip() if row.startswith("|") else ""


if __name__ == "__main__":
    main()
