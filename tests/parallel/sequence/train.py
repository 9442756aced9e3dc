"""Three optimizer steps in one process with plain torch, and on ranks of which some share their sequences."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_dist.parallel.sequence import ring_plan
from hf_dist.tools.check.limits import Limits, limits
from hf_dist.tools.check.limits import relative as relative_numbers
from hf_dist.tools.check.runs import routed_parameters
from tests.attempts import attempts
from tests.parallel.sequence.families import make_batch, make_model
from tests.parallel.sequence.standins import use_kernel
from tests.parity.train import relative
from tests.references import shared

STEPS, LR, EPS, CLIP = 3, 1e-2, 1e-3, 0.5
KINDS = ("plain", "ragged", "masked", "packed")
HALF = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
"""A loss scale that overflows nowhere: every step counts."""


@dataclass(frozen=True)
class Case:
    """One cell."""

    family: str = "llama"
    exchange: str | tuple[int, int] = "auto"
    stage: int = 3
    cp: int = 2
    kinds: tuple[str, ...] = KINDS
    """Of the microbatches, in turn."""
    accumulation: int = 2
    checkpointing: bool = False
    lora: bool = False
    shard: int | None = None
    over: bool = False
    """`hf_dist.optimizer_over` "all"."""
    offload: bool = False
    offload_param: bool = False
    files: bool = False
    """Weights are streamed from a folder of `save_pretrained`; the trained ones come back through `hf-dist export`."""
    tiled: bool | None = None
    length: int | None = None
    pp: int = 1
    tp: int = 1
    ep: int = 1
    tiles: int = 1
    dtype: str = "fp32"
    budget: bool = False
    on_host: bool = False
    joined: int = 1
    """Data ranks whose microbatches each rank takes, one after the other."""
    kernel: str | None = None
    """A kernel of CUDA, by a stand-in, on the ranks only."""

    def __str__(self) -> str:
        exchange = (
            self.exchange if isinstance(self.exchange, str) else f"ulysses{self.exchange[0]}ring{self.exchange[1]}"
        )
        flags = [
            name
            for name in ("checkpointing", "lora", "offload", "offload_param", "files", "tiled", "on_host", "budget")
            if getattr(self, name)
        ]
        more = [f"shard{self.shard}{'-over' if self.over else ''}"] if self.shard else []
        more += [f"length{self.length}"] if self.length else []
        more += [self.dtype] if self.dtype != "fp32" else []
        more += [self.kernel] if self.kernel else []
        more += [f"{name}{getattr(self, name)}" for name in ("pp", "tp", "ep", "tiles") if getattr(self, name) > 1]
        return "-".join([self.family, exchange, f"z{self.stage}", f"cp{self.cp}", *more, *flags])


def build(case: Case, folder: str | None = None) -> nn.Module:
    """The model of a case, trained as it says; streamed from `folder` if there is one."""
    if folder is None:
        model = make_model(case.family)
    else:
        from transformers import AutoModelForCausalLM

        import hf_dist

        model = hf_dist.from_pretrained(AutoModelForCausalLM, folder, dtype=torch.float32)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        model = get_peft_model(
            model,
            LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
        )
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def batches(case: Case, data_ranks: int) -> list[list[dict[str, torch.Tensor]]]:
    """[microbatch][data rank]; each data rank has rows of another kind."""
    found = []
    for micro in range(STEPS * case.accumulation):
        kinds = [case.kinds[(micro + rank) % len(case.kinds)] for rank in range(data_ranks)]
        found.append([make_batch(case.family, kind, 10 * micro + rank, case.length) for rank, kind in enumerate(kinds)])
    return found


def _key(case: Case, data_ranks: int) -> tuple[Any, ...]:
    return case.family, case.kinds, case.accumulation, case.lora, case.length, data_ranks


def reference(case: Case, data_ranks: int) -> dict[str, Any]:
    """Losses, norms and weights of one process in fp32."""
    return shared(("sequence", *_key(case, data_ranks)), lambda: _reference(case, data_ranks))


def _reference(case: Case, data_ranks: int) -> dict[str, Any]:
    model = build(case).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=EPS)
    losses, norms, weights = [], [], []
    todo = batches(case, data_ranks)
    for step in range(STEPS):
        total = 0.0
        for rows in todo[step * case.accumulation :][: case.accumulation]:
            for batch in rows:
                loss = model(**batch, use_cache=False).loss / (data_ranks * case.accumulation)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return {"losses": losses, "norms": norms, "weights": weights[-1], "by_step": weights}


def alone(case: Case, data_ranks: int) -> Case:
    """The case in one process, with the microbatches of all its data ranks one after the other."""
    wanted = {name: getattr(case, name) for name in ("family", "kinds", "lora", "length", "dtype")}
    return Case(**wanted, cp=1, stage=0, accumulation=case.accumulation, joined=data_ranks)


@functools.cache
def ranks_alone(cases: tuple[Case, ...]) -> dict[Case, Any]:
    """One spawn for all cases that need one process of ours: those in half precision."""
    from tests.harness import run_ranks

    return dict(zip(cases, run_ranks(run_cases, 1, args=(list(cases),))[0], strict=True))


def config_of(case: Case) -> dict[str, Any]:
    """The JSON of a case."""
    zero: dict[str, Any] = {"stage": case.stage}
    if case.shard:
        zero["mics_shard_size"] = case.shard
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if case.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    exchange = list(case.exchange) if isinstance(case.exchange, tuple) else case.exchange
    ring_plan.TILE = 4  # rows are short here, and long ones are many tiles
    ours: dict[str, Any] = {"stall_report_seconds": 0, "sequence_parallel": exchange}
    if case.tp > 1:
        ours["sequence_regions"] = "auto"
    if case.over:
        ours["optimizer_over"] = "all"
    if case.budget:
        ours["memory_budget"] = "1GB"
    if case.tiled is not None:
        ours["tiled_loss"] = case.tiled
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation * case.joined,
        "gradient_clipping": CLIP,
        "sequence_parallel_size": case.cp,
        "pipeline": {"stages": case.pp},
        "tensor_parallel": {"autotp_size": case.tp},
        "expert_parallel": {"enabled": case.ep > 1, "autoep_size": case.ep},
        **HALF.get(case.dtype, {}),
        "activation_checkpointing": {"mlp_tiles": case.tiles, "cpu_checkpointing": case.on_host},
        "zero_optimization": zero,
        "hf_dist": ours,
    }


def exported(engine: Any, case: Case, folder: str, rank: int) -> dict[str, torch.Tensor]:
    """On rank 0, weights that stock `from_pretrained` reads from what `hf-dist export` makes of a checkpoint.

    The folder of `model.save_pretrained` has the same ones.
    """
    from hf_dist.checkpoint.export import export

    engine.save_checkpoint(f"{folder}/{case}")
    engine.writer.wait()
    engine.model.save_pretrained(f"{folder}/{case}-saved")
    if rank > 0:
        return {}
    export(f"{folder}/{case}", f"{folder}/{case}-exported", dtype="fp32")
    found, saved = (read(case, f"{folder}/{case}-{how}") for how in ("exported", "saved"))
    if case.dtype == "fp32":  # else masters are exported, and weights saved
        wrong = [name for name, value in found.items() if not torch.equal(value, saved[name])]
        assert not wrong, wrong
    return found


def read(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Weights of a model, or of its base with adapters, that stock code reads."""
    model: Any = make_model(case.family)
    if case.lora:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    else:
        model = type(model).from_pretrained(folder)
    return {n: p.detach() for n, p in model.named_parameters()}


def train_on_rank(rank: int, world: int, case: Case, folder: str = "") -> dict[str, Any]:
    """The same through `hf_dist.initialize`; weights come back on the first data rank of each stage.

    `folder`: has the folders of `save_pretrained`, one per family, for cases with `files`.
    """
    import hf_dist
    from hf_dist.dist import collectives

    model = build(case, f"{folder}/{case.family}" if case.files else None)
    if case.kernel:
        use_kernel(model, case.kernel)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=EPS, foreach=True)
    engine = hf_dist.initialize(model, config=config_of(case), optimizer=optimizer)
    engine.train()
    data = engine.mesh.data
    losses, norms, by_step = [], [], []
    todo = batches(case, data.size * case.joined)
    for step in range(STEPS):
        window = todo[step * case.accumulation :][: case.accumulation]
        own = [batch for rows in window for batch in rows[data.rank * case.joined :][: case.joined]]
        own = [tree_map_only(torch.Tensor, lambda value: value.to(engine.device), batch) for batch in own]
        if case.pp > 1:
            total = engine.train_batch(iter([{**batch, "use_cache": False} for batch in own]))
        else:
            total = torch.zeros((), device=engine.device)
            for batch in own:
                # HF makes no cache by itself where blocks run again, and so keeps packed documents apart.
                loss = engine(**batch, **({} if case.checkpointing else {"use_cache": False})).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(own)
            collectives.all_reduce(engine.mesh.dp, total).wait()
        losses.append(total.item())
        norms.append(engine.get_global_grad_norm())
        if case.stage == 0 and world == 1:
            by_step.append({n: p.detach().clone() for n, p in model.named_parameters()})
    if by_step:
        return {"losses": losses, "norms": norms, "weights": by_step[-1], "by_step": by_step}
    if case.files:
        return {"losses": losses, "norms": norms, "weights": exported(engine, case, folder, rank)}
    if case.ep > 1:  # inside `gathered` a rank has its own experts
        from hf_dist.hf.state_dict import full_state_dict

        return {"losses": losses, "norms": norms, "weights": full_state_dict(engine.sharded, keep=rank == 0)}
    with hf_dist.gathered(model):
        weights = {n: p.detach().cpu().clone() for n, p in model.named_parameters()} if engine.mesh.dp.rank == 0 else {}
    return {"losses": losses, "norms": norms, "weights": weights}


def run_cases(rank: int, world: int, cases: list[Case], folder: str = "") -> list[Any]:
    """Every case; one that raises gives its traceback."""
    return attempts(rank, world, (functools.partial(train_on_rank, rank, world, case, folder) for case in cases))


@functools.cache
def ranks_of(cases: tuple[Case, ...], world: int) -> Any:
    """One spawn for all cases."""
    from tests.harness import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        for family in {case.family for case in cases if case.files}:
            make_model(family).save_pretrained(f"{folder}/{family}")
        try:
            return run_ranks(run_cases, world, args=(list(cases), folder), timeout=max(240, 15 * len(cases)))
        except RuntimeError as error:
            return str(error)


def check(cases: tuple[Case, ...], index: int, world: int) -> None:
    """Losses and norms of every rank, and every weight, are those of one process in the same precision.

    In half precision, how near they have to be is the rule of `hf-dist check`.
    """
    everyone = ranks_of(cases, world)
    assert not isinstance(everyone, str), everyone
    for ranks in everyone:
        assert not isinstance(ranks[index], str), ranks[index]
    case = cases[index]
    expected, allowed = expected_of(cases, case, world)
    found = [ranks[index] for ranks in everyone]
    assert not wrong(found, expected, allowed)
    assert {name for ranks in found for name in ranks["weights"]} == expected["weights"].keys()


def wrong(found: list[dict[str, Any]], expected: dict[str, Any], allowed: Limits) -> list[str]:
    """What is farther from one process than allowed, on any rank."""
    assert all(len(ranks[name]) == STEPS for ranks in found for name in ("losses", "norms"))
    numbers = [(name, getattr(allowed, name)) for name in ("losses", "norms")]
    far = [
        name for name, limit in numbers for ranks in found if not relative_numbers(expected[name], ranks[name]) <= limit
    ]
    for name, weight in ((name, weight) for ranks in found for name, weight in ranks["weights"].items()):
        theirs = expected["weights"][name]
        if not relative(weight.to(theirs.dtype), theirs) <= allowed.of(name):  # exported ones are fp32 masters
            far.append(name)
    return far


def expected_of(cases: tuple[Case, ...], case: Case, world: int) -> tuple[dict[str, Any], Limits]:
    """What one process gives, and how near to it the ranks have to be."""

    def data_ranks(case: Case) -> int:
        return world // case.cp // case.pp // case.tp

    plain = reference(case, data_ranks(case))
    if case.dtype == "fp32":
        return plain, limits(plain, None, STEPS, cut=False)
    half = tuple(dict.fromkeys(alone(each, data_ranks(each)) for each in cases if each.dtype != "fp32"))
    same = ranks_alone(half)[alone(case, data_ranks(case))]
    assert not isinstance(same, str), same
    steps = zip(same["by_step"], plain["by_step"], strict=True)
    differences = [{n: relative(weight, theirs[n]) for n, weight in own.items()} for own, theirs in steps]
    routed = routed_parameters(build(case)) if case.dtype == "fp16" else ()
    return same, limits(plain, {**same, "differences": differences}, STEPS, cut=case.tp > 1, routed=routed)
