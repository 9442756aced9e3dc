"""What a simulated rank runs: some steps of a small Llama, as a setting says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.gpu_sim.order import faults
from tests.gpu_sim.rank import GPU, simulated_rank
from tests.gpu_sim.trace import Launched, Trace
from tests.scale.engines import Case, config_of

SMALL = Case(width=256, inner=512, layers=4, heads=4, kv_heads=4, vocabulary=8192, rows=1, seq=64, checkpointing=False)
STEPS = 3
"""The ranks agree in the first on what it showed; what is looked at is the last one."""
STEADY = "steady"
"""The mark at the beginning of the last step."""


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    stage: int = 3
    world: int = 4
    accumulation: int = 1
    checkpointing: str = "none"
    """none, blocks, or host (their inputs rest there)."""
    replicas: int = 1
    """Of the shards (HSDP)."""
    over: bool = False
    """Whether the optimizer is sharded over the replicas, too."""
    offload: str = "none"
    """none, optimizer, or both (weights too)."""
    in_backward: bool = False
    budget: bool = False
    lora: bool = False
    dtype: str = "bf16"
    clipping: float = 1.0
    fp8: str = ""
    """A recipe for products in eight bits."""
    between: str = "nothing"
    """Steps: nothing, evaluation, or generation."""
    wires: str = "none"
    """Messages that are encoded: none, all, or hops (all, in two hops, and what is left out is added to the next one)."""
    second: int = 1
    """Ranks of a second copy of the weights."""

    def config(self) -> dict[str, Any]:
        """The JSON."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if self.offload == "both":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        if self.second > 1:
            zero["zero_hpz_partition_size"] = self.second
        if self.replicas > 1:
            zero["mics_shard_size"] = self.world // self.replicas
        own: dict[str, Any] = {"stall_report_seconds": 0, "check_load": False, "tiled_loss": False}
        if self.over:
            own["optimizer_over"] = "all"
        if self.wires != "none":
            own["wires"] = {"weights": "int8", "frozen_weights": "int8", "gradients": "int4", "copies": "int8"}
        if self.wires == "hops":
            own["wires"] |= {"machine": 2, "error_feedback": True}
        if self.in_backward:
            own["optimizer_in_backward"] = True
        if self.budget:
            own["memory_budget"] = "20GB"
        if self.fp8:
            own["fp8"] = {"enabled": True, "recipe": self.fp8}
        more: dict[str, Any] = {"hf_dist": own, "gradient_accumulation_steps": self.accumulation}
        if self.checkpointing == "host":
            more["activation_checkpointing"] = {"cpu_checkpointing": True}
        config = {**config_of(self.stage, **more), "zero_optimization": zero, "gradient_clipping": self.clipping}
        config["bf16"] = {"enabled": self.dtype == "bf16"}
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True}
        return config


@dataclass
class Report:
    """What the trace of a rank shows."""

    faults: list[str]
    """Of the whole run."""
    waits: list[str]
    """Of the last step, for what the step itself has begun: why, and where."""
    late: list[str]
    """Communicators that were first used after the engine was built."""
    kernels: int
    """Launched in the last step."""
    scaled: int = 0
    """Of these, products in eight bits."""
    trace: Trace | None = field(default=None, repr=False)


_HARMLESS = "early free: giving memory of stream compute back at backward"
"""The last blocks' inputs are freed in backward while they are still copied to the host: nobody will read that copy."""


def _told(trace: Trace) -> list[str]:
    texts = map(str, faults(trace))
    return [text for text in texts if not (text.startswith(_HARMLESS) and "host_copies.py:" in text)]


def report(trace: Trace, *, keep: bool = False) -> Report:
    """See `Report`; `keep`: with the trace itself."""
    waits = [f"{wait.why} at {wait.where}" for wait in trace.waits(STEADY)]
    seen: set[str] = set()
    late: list[str] = []
    for number, entry in enumerate(trace.entries):
        if isinstance(entry, Launched) and entry.transfer and entry.transfer.communicator not in seen:
            seen.add(entry.transfer.communicator)
            if number >= trace.marks["built"]:
                late.append(f"{entry.transfer.communicator} at {entry.where}")
    steady = trace.entries[trace.marks[STEADY] :]
    kernels = sum(isinstance(e, Launched) for e in steady)
    scaled = sum(isinstance(e, Launched) and "_scaled_mm" in e.what for e in steady)
    return Report(_told(trace), waits, late, kernels, scaled, trace if keep else None)


def model_of(setting: Setting, case: Case = SMALL) -> Any:
    """On the simulated GPU."""
    with torch.device(GPU):
        model = case.llama()
    if setting.checkpointing == "blocks":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if setting.lora:
        from peft import LoraConfig, get_peft_model

        with torch.device(GPU):
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def train(rank: int, meet: str, setting: Setting, without: str = "") -> Report:
    """A few steps of one rank; `without`: a name of `breakages.py`, of what is taken out first."""
    import hf_dist
    from tests.gpu_sim.breakages import BREAKAGES

    with simulated_rank(setting.world, rank) as (recorder, _), recorder:
        if without:
            BREAKAGES[without]()
        engine = hf_dist.initialize(model_of(setting), config=setting.config(), device=GPU)
        recorder.trace.mark("built")
        ids = torch.zeros(SMALL.rows, SMALL.seq, dtype=torch.long, device=GPU)
        between = _BETWEEN[setting.between]
        for number in range(STEPS):
            if number == STEPS - 1:
                recorder.trace.mark(STEADY)
            for _ in range(setting.accumulation):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
            between(engine, ids)
        return report(recorder.trace)


def _evaluate(engine: Any, ids: torch.Tensor) -> None:
    engine.eval()
    with torch.no_grad():
        engine(input_ids=ids, labels=ids)
    engine.train()


def _generate(engine: Any, ids: torch.Tensor) -> None:
    engine.eval()
    with torch.no_grad():
        engine.model.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
    engine.train()


_BETWEEN: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "nothing": lambda engine, ids: None,
    "evaluation": _evaluate,
    "generation": _generate,
}
