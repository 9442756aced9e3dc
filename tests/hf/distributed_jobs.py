"""A script with transformers' `DistributedConfig`, run by `hf_dist.run` on ranks and by the stock Trainer alone."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hf_dist import run
from tests.attempts import attempts
from tests.hf.recipes import make_model

SCRIPT = """
import json, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from transformers.distributed import DistributedConfig

folder, layout, model_first, rows = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[4])
config = sys.argv[5] if len(sys.argv) > 5 else None
ids = [[(i * 7 + j * j) % 64 for j in range(8)] for i in range(32)]
given = {"distributed_config": DistributedConfig(**layout)} if layout else {}
load = lambda: AutoModelForCausalLM.from_pretrained(Path(folder).parent / sys.argv[6], **given)
model = load() if model_first else None
args = TrainingArguments(
    folder, per_device_train_batch_size=rows, max_steps=3, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
    learning_rate=1e-2, disable_tqdm=True, seed=1, adam_epsilon=1e-3, deepspeed=config or None,
)
model = load() if model is None else model
kinds = sorted({type(p).__name__ for p in model.parameters()})
data = [{"input_ids": row, "labels": row} for row in ids]
trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=default_data_collator)
trainer.train()
trainer.save_model(folder)
found = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], "kinds": kinds}
dist = getattr(args, "dist", None)
if dist is not None:
    found["sizes"] = [dist.zero_optimization.stage, dist.tensor_parallel.autotp_size, dist.expert_parallel.autoep_size]
Path(folder, "found.json").write_text(json.dumps(found)) if args.process_index == 0 else None
"""
Case = dict[str, Any]


def save_models(root: Path) -> None:
    """The script and its models, below `root`."""
    (root / "script.py").write_text(SCRIPT)
    for kind in ("llama", "moe"):
        make_model(kind).save_pretrained(root / kind)


def train(rank: int, world: int, root: str, cases: list[Case]) -> list[Any]:
    """Per case the losses, the sizes in use and the weights that were saved, or the error; on the main rank."""
    return attempts(rank, world, (functools.partial(_train, rank, world, root, case) for case in cases))


def _train(rank: int, world: int, root: str, case: Case) -> Any:
    folder = f"{root}/{world}_{case['name']}"
    arguments = [folder, json.dumps(case["layout"] if world > 1 else {}), str(case.get("model_first", False))]
    sys.argv = [
        f"{root}/script.py",
        *arguments,
        str(case["rows"] if world > 1 else 8),
        case.get("config", ""),
        case["model"],
    ]
    if world > 1:
        run.main(sys.argv)
    else:
        exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    if rank:
        return None
    return {**json.loads(Path(folder, "found.json").read_text()), "weights": load_file(f"{folder}/model.safetensors")}


def refusals(rank: int, world: int, root: str) -> dict[str, str]:
    """What is said of models that torch or a loop of the user's own has distributed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from hf_dist.hf.distributed_config import asked_layout, take_always

    os.environ["ACCELERATE_USE_CPU"] = "true"
    mesh = init_device_mesh("cpu", (world,))
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    def prepared(model: nn.Module) -> Any:
        from hf_dist import DistTrainer, DistTrainingArguments

        args = DistTrainingArguments(f"{root}/refused", use_cpu=True, report_to=[], dist_config={})
        return DistTrainer(model, args)

    sharded = fully_shard(make_model("llama"), mesh=mesh)
    note("fully_shard", lambda: prepared(sharded))
    placed = make_model("llama")
    weight = placed.model.layers[0].mlp.up_proj.weight
    placed.model.layers[0].mlp.up_proj.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
    note("distribute_tensor", lambda: prepared(placed))
    take_always()
    ids = torch.arange(8).reshape(1, 8)
    model = AutoModelForCausalLM.from_pretrained(f"{root}/llama", tp_plan="auto")
    model.eval()
    note("evaluated", lambda: model(input_ids=ids, labels=ids))
    model.train()
    note("own loop", lambda: model(input_ids=ids, labels=ids))
    found = asked_layout(model)
    said["layout"] = str(dict(found.sizes)) if found is not None else ""
    note("followed", lambda: model(input_ids=ids, labels=ids))
    assert Trainer and TrainingArguments
    return said
