"""The same training by ranks, with the engine; and what both start from."""

from __future__ import annotations

from typing import Any

import torch

from tests.parallel.pipeline.zoo import VOCAB
from tests.parity.families import make_model
from tests.sharding.wires.reference import Batch, Case, Reference

ROWS, LENGTH = 2, 10


def batches_of(case: Case, step: int) -> list[list[Batch]]:
    """`[rank][microbatch]`, rows of equal length without masked labels: all ranks count alike."""
    found = []
    for rank in range(case.world):
        g = torch.Generator().manual_seed(1000 * step + rank)
        parts = [torch.randint(1, VOCAB, (ROWS, LENGTH), generator=g) for _ in range(case.accumulation)]
        found.append([{"input_ids": ids, "labels": ids.clone()} for ids in parts])
    return found


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    """`eps` is large so that a gradient which is zero but for rounding does not become a full step."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1)


def model_of(case: Case) -> Any:
    """The model of a case, with equal weights everywhere."""
    return make_model(case.family, tied=case.tied, lora=case.lora, checkpointing=case.checkpointing)


def config_of(case: Case) -> dict[str, Any]:
    """The file of a case."""
    zero: dict[str, Any] = {"stage": case.stage, "zero_hpz_partition_size": case.second}
    if case.shards:
        zero["mics_shard_size"] = case.shards
    if case.offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        zero |= {} if case.stage == 3 else {"offload_param": {"device": "none"}}
    wires = {"weights": case.weights, "frozen_weights": case.frozen, "gradients": case.gradients, "copies": case.copies}
    wires = {key: name for key, name in wires.items() if name is not None}
    more = {"block": case.block, "error_feedback": case.feedback, "machine": case.machine}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": zero,
        "hf_dist": {
            "wires": {**wires, **more, "second_copy": case.second_copy},
            **({"optimizer_over": "all"} if case.over else {}),
        },
    }


def alone(case: Case) -> dict[str, Any]:
    """One process."""
    one = Reference(model_of(case), case, optimizer_of)
    for step in range(case.steps):
        one.step(batches_of(case, step))
    weights = {n: one.masters[n] for n in one.masters}
    return {"losses": one.losses, "norms": one.norms, "weights": weights}


def on_rank(rank: int, world: int, case: Case) -> dict[str, Any]:
    """Losses and weights of the engine; what the last step sent, by axis and operation."""
    import hf_dist
    from hf_dist.dist import comm_counter
    from hf_dist.hf.state_dict import full_state_dict

    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = hf_dist.initialize(model, config=config_of(case), optimizer=optimizer_of(trained))
    losses, norms = [], []
    with comm_counter.record() as log:
        for step in range(case.steps):
            log.entries.clear()
            mine = []
            for batch in batches_of(case, step)[rank]:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                mine.append(float(loss.detach()))
            losses.append(sum(mine) / len(mine))
            norms.append(float(engine.get_global_grad_norm()))
    sent: dict[tuple[str, str], int] = {}
    for e in log.entries:
        sent[e.axis, e.op] = sent.get((e.axis, e.op), 0) + e.nbytes
    shards = [group.layout.shard_numel for group in engine.sharded.trainable_groups]
    state = full_state_dict(engine.sharded) if rank == 0 else full_state_dict(engine.sharded, keep=False)
    return {"losses": losses, "norms": norms, "weights": state, "sent": sent, "shards": shards}
