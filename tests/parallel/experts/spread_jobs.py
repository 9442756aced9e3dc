"""What a rank does in the tests of experts that are spread over ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.attempts import attempts, attempts_by_name
from tests.covering import FULL_GRID
from tests.parity.families import make_batches, make_model, param_groups, summed_loss

ROWS, STEPS, CLIP = 36, 3 if FULL_GRID else 2, 1.0


@dataclass(frozen=True)
class Setting:
    """One training: the model, what is done to it, and the JSON's sections beside the usual ones."""

    name: str
    family: str = "qwen3_moe"
    stage: int = 3
    ep: int = 2
    accumulation: int = 1
    sections: dict[str, Any] = field(default_factory=dict, hash=False)
    starved: bool = False
    """Every token goes to the experts of the first rank."""
    frozen: bool = False
    """The experts are not trained."""
    adapters: bool = False
    """LoRA on experts and attention."""
    checkpointing: bool = False
    experts: str | None = None
    """`experts_implementation`."""
    pp: int = 1
    schedule: str = "1f1b"
    tp: int = 1
    tied: bool = False
    virtual: int = 1
    """Pipeline stages on each rank."""
    short: bool = False
    """The first rank's rows are cut to four tokens."""


def build(setting: Setting) -> nn.Module:
    """The same weights on every call."""
    model: Any = make_model(
        setting.family, setting.tied, checkpointing=setting.checkpointing, layers=max(3, setting.pp * setting.virtual)
    )
    if setting.experts:
        model.set_experts_implementation(setting.experts)
    if setting.starved:
        for module in model.modules():
            if type(module).__name__ == "GptOssTopKRouter":
                with torch.no_grad():
                    module.bias[module.num_experts // 2 :] = -100.0
    if setting.frozen:
        for name, p in model.named_parameters():
            p.requires_grad_(".experts." not in name)
    if setting.adapters:
        model = adapted(model)
        if setting.checkpointing:
            model.enable_input_require_grads()
    return model


def adapted(model: Any, rank: int = 4) -> Any:
    """LoRA on the experts' stacks and on attention; B is not zero, or A would have no gradient."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(
        r=rank, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], target_parameters=stacks
    )
    model = get_peft_model(model, lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    return model


def batches(setting: Setting) -> list[dict[str, torch.Tensor]]:
    """Joined batches; the first half of the rows short if the setting says so."""
    found = make_batches(setting.family, STEPS)
    for batch in found if setting.short else ():
        half = ROWS // 2
        for key, value in batch.items():
            value[:half, 4:] = -100 if key == "labels" else 0
    return found


def one_process(setting: Setting) -> dict[str, Any]:
    """Plain torch on the joined batches."""
    model = build(setting)
    optimizer = torch.optim.AdamW(param_groups(model), lr=3e-3, eps=1e-3)
    losses, norms = [], []
    for batch in batches(setting):
        total, items = summed_loss(model, batch)
        (total / items).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(total.item() / items)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def config_of(setting: Setting, world: int) -> dict[str, Any]:
    """The JSON."""
    sections = dict(setting.sections)
    zero = {"stage": setting.stage, **sections.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": ROWS * setting.pp * setting.tp // (world * setting.accumulation),
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "expert_parallel": {"enabled": True, "autoep_size": setting.ep},
        "pipeline": {"stages": setting.pp, "schedule": setting.schedule, "virtual_stages": setting.virtual},
        "tensor_parallel": {"autotp_size": setting.tp},
        **sections,
    }


def start(setting: Setting, world: int) -> Any:
    """An engine."""
    import hf_dist

    model = build(setting)
    optimizer = torch.optim.AdamW(param_groups(model), lr=3e-3, eps=1e-3, foreach=True)
    return hf_dist.initialize(model, config=config_of(setting, world), optimizer=optimizer, device="cpu")


def train(rank: int, world: int, setting: Setting) -> dict[str, Any]:
    """A few steps; losses, norms, whole weights on rank 0."""
    engine = start(setting, world)
    losses, norms = steps(engine, setting, range(STEPS))
    return {"losses": losses, "norms": norms, "weights": weights(engine, keep=rank == 0)}


def weights(engine: Any, keep: bool) -> dict[str, torch.Tensor]:
    """Whole parameters, on the ranks that keep them. Collective."""
    from hf_dist.hf.state_dict import full_state_dict

    names = {n for n, _ in engine.sharded.whole.named_parameters()}
    return {n: w for n, w in full_state_dict(engine.sharded, keep=keep).items() if n in names}


def steps(engine: Any, setting: Setting, numbers: Sequence[int]) -> tuple[list[float], list[float]]:
    """Losses and norms of these of the steps, over the joined batches."""
    from hf_dist.dist import collectives

    dp, me = engine.mesh.dp.size, engine.mesh.dp.rank
    losses, norms = [], []
    for batch in [batches(setting)[number] for number in numbers]:
        joined = batch["labels"]
        items = int((joined[:, 1:] != -100).sum())
        parts = mine(batch, me, dp, setting)
        if setting.pp > 1:
            count = len(parts)

            def loss(model: Any, part: Any, items: int = items, count: int = count) -> torch.Tensor:
                return summed_loss(model, part)[0] * (dp * count / items)

            losses.append(float(engine.train_batch(iter(parts), loss)))
            norms.append(engine.get_global_grad_norm())
            continue
        window = torch.zeros(())
        for i, part in enumerate(parts):
            engine.set_gradient_accumulation_boundary(i + 1 == len(parts))
            total, _ = summed_loss(engine.model, part)
            engine.backward(total * (dp / items), scale_wrt_gas=False)
            engine.step()
            window += total.detach().float() / items
        collectives.all_reduce(engine.mesh.dp, window, op="sum").wait()
        losses.append(window.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def mine(batch: dict[str, torch.Tensor], rank: int, ranks: int, setting: Setting) -> list[dict[str, torch.Tensor]]:
    """This rank's microbatches of a joined batch; padding at the end is cut off."""
    share = ROWS // ranks
    micro = share // setting.accumulation
    found = []
    for i in range(setting.accumulation):
        begin = rank * share + i * micro
        part = {key: value[begin : begin + micro] for key, value in batch.items()}
        length = 4 if setting.short and rank == 0 else part["input_ids"].shape[1]
        found.append({key: value[:, :length].contiguous() for key, value in part.items()})
    return found


def train_all(rank: int, world: int, settings: list[Setting]) -> list[Any]:
    """Every setting; a traceback where one raised."""
    return attempts(rank, world, (functools.partial(train, rank, world, setting) for setting in settings))


# ---- resume


def stopped(setting: Setting, world: int, folder: str) -> None:
    """One step, then a checkpoint with the name of the setting."""
    engine = start(setting, world)
    steps(engine, setting, (0,))
    engine.save_checkpoint(f"{folder}/{setting.name}")


def resumed(setting: Setting, world: int, folder: str) -> dict[str, Any]:
    """The other steps, from such a checkpoint."""
    engine = start(setting, world)
    engine.load_checkpoint(folder)
    losses, norms = steps(engine, setting, range(1, STEPS))
    return {"losses": losses, "norms": norms, "weights": weights(engine, keep=engine.mesh.world.rank == 0)}


def stop_and_resume(
    rank: int, world: int, folder: str, saved: list[Setting], loaded: list[tuple[str, Setting]]
) -> dict[str, Any]:
    """Checkpoints of `saved`; then runs from those of other jobs. "name to name" -> outcome, or a traceback."""
    for setting in saved:
        stopped(setting, world, folder)
    jobs = {
        f"{source} to {setting.name}": functools.partial(resumed, setting, world, f"{folder}/{source}")
        for source, setting in loaded
    }
    return attempts_by_name(rank, world, jobs)


# ---- bytes


def traffic(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Bytes of one step as they were counted, and by hand from the routing; bytes at rest."""
    from hf_dist.dist import comm_counter
    from hf_dist.memory.offload.resting import Tier
    from hf_dist.parallel.experts.spread import exchanges
    from hf_dist.planning.comm_volume import step_traffic
    from hf_dist.planning.state_bytes import States

    setting = Setting("traffic", stage=stage, ep=world)
    engine = start(setting, world)
    plans = []
    for exchange in exchanges(engine.model).values():
        make = exchange._plan

        def noted(chosen: torch.Tensor, make: Any = make) -> Any:
            plans.append(make(chosen))
            return plans[-1]

        exchange._plan = noted  # type: ignore[method-assign]
    part = mine(batches(setting)[0], rank, world, setting)[0]
    groups = engine.sharded.groups
    spread = [g for g in groups if g.axes.parts is not None]
    places = [g.full.values.data_ptr() for g in spread]  # 0: freed
    with comm_counter.record() as log:
        total, _ = summed_loss(engine.model, part)
        engine.backward(total / 100)
        engine.step()
    width, k, here = engine.model.config.hidden_size, engine.model.config.num_experts_per_tok, rank
    by_hand = 0
    for plan in plans:
        out = sum(plan.sent) - plan.sent[here]
        back = sum(plan.received) - plan.received[here]
        forward = 8 * (world - 1) + out * (4 * k + 4 * k + 4 * width) + back * 4 * width
        backward = out * 4 * width + back * (4 * width + 4 * k)
        by_hand += forward + backward
    states = States.of_model(build(setting), engine.config, num_shards=world, rank=rank, ep=world)
    planned = step_traffic(states)
    return {
        "stays": all(places) and places == [g.full.values.data_ptr() for g in spread],
        "counted": log.nbytes("all_to_all"),
        "by_hand": by_hand,
        "weights_of_experts_sent": sum(
            e.nbytes for e in log.entries if e.op in ("all_gather", "reduce_scatter") and e.axis in ("edp", "ep")
        ),
        "held": sum(g.layout.num_params for g in spread),
        "whole": sum(slot.held.whole_numel for g in spread for slot in g.layout.slots),
        "resident": sum(sum(g.resident_nbytes().values()) for g in spread),
        "engine_resident": engine.resident_nbytes()["device"],
        "planned_resident": states.nbytes.resident(Tier.DEVICE),
        "sent": {op: (log.count(op), log.nbytes(op)) for op in ("all_gather", "reduce_scatter", "all_reduce")},
        "planned_sent": {op: planned.get(op, (0, 0)) for op in ("all_gather", "reduce_scatter", "all_reduce")},
    }


def loads_of_a_step(rank: int, world: int) -> list[torch.Tensor | None]:
    """(layers, experts): rows of a step, plain and with blocks that run again."""
    from hf_dist.parallel.experts.balance import loads

    found = []
    for again in (False, True):
        setting = Setting("loads", stage=0, ep=world, checkpointing=again)
        engine = start(setting, world)
        step(engine, setting, rank, world, 0)
        found.append(loads(engine.model, engine.mesh))
    return found


# ---- life


def lived(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Saved spread and resumed otherwise, and the other way round; copies; evaluation of odd sizes; generation."""
    import copy

    from hf_dist.hf.state_dict import full_state_dict

    found: dict[str, Any] = {}
    root = Path(folder)
    spread, plain = Setting("spread", stage=3), Setting("plain", stage=1, ep=1)
    again = (Setting("again", stage=2),) if FULL_GRID else ()  # `test_resume.py` has other stages
    for saved, others in ((spread, (plain, *again)), (plain, (spread,))):
        engine = start(saved, world)
        step(engine, saved, rank, world, 0)
        engine.save_checkpoint(str(root / saved.name))
        after = step(engine, saved, rank, world, 1)
        for other in others:
            resumed = start(other, world)
            resumed.load_checkpoint(str(root / saved.name))
            found[f"{saved.name} to {other.name}"] = (after, step(resumed, other, rank, world, 1))
        found[f"weights of {saved.name}"] = full_state_dict(engine.sharded, keep=rank == 0)
    engine = start(Setting("replicated", stage=1), world)
    try:
        copy.deepcopy(engine.model)
        found["copy"] = "ran"
    except Exception as error:
        found["copy"] = str(error)
    engine = start(spread, world)
    engine.eval()
    g = torch.Generator().manual_seed(10 + rank)
    prompt = torch.randint(3, 100, (1 + rank, 3 + 2 * rank), generator=g)
    with torch.no_grad():
        tokens = engine.model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=3 + 5 * rank,
            synced_gpus=True, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    found["generated"] = (prompt.tolist(), tokens.tolist())
    return found


def hung(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 is late in the router of the last layer, then in its backward: where rank 0 stands meanwhile."""
    import threading
    import time

    from hf_dist.dist.watchdog.location import find_location

    engine = start(setting := Setting("hung", stage=1, accumulation=2), world)  # no reductions after the first of two
    names = {id(module): name for name, module in engine.model.named_modules()}
    places: dict[str, Any] = {}

    def late(where: str) -> Any:
        def hook(*_: Any) -> None:
            if rank == 1:
                time.sleep(1.5)
                return

            def look() -> None:
                places[where] = find_location(names)

            threading.Timer(0.75, look).start()

        return hook

    layers = engine.model.model.layers
    layers[-1].mlp.gate.register_forward_hook(late("forward"))
    layers[1].mlp.register_full_backward_hook(late("backward"))
    total, _ = summed_loss(engine.model, mine(batches(setting)[0], rank, world, setting)[0])
    engine.backward(total / 100)
    return {where: (place.waits_for, str(place)) for where, place in places.items()}


def step(engine: Any, setting: Setting, rank: int, world: int, index: int) -> list[float]:
    """One optimizer step; loss of this rank's rows and norm."""
    total, _ = summed_loss(engine.model, mine(batches(setting)[index], rank, world, setting)[0])
    engine.backward(total / 100)
    engine.step()
    return [float(total), engine.get_global_grad_norm()]
