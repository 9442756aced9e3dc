"""Training on any layout of data ranks, pipeline stages and cut matrices, on the rows of one process; what a rank does."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.attempts import attempts
from tests.covering import FULL_GRID
from tests.parity.families import make_batches, make_model, param_groups

ROWS = 12
BEFORE, AFTER = (2, 2) if FULL_GRID else (1, 1)


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis, and how states rest."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    stage: int = 0
    sequence: bool = False
    family: str = "llama"
    tied: bool = True
    lora: bool = False
    checkpointing: bool = False
    more: str = ""
    """Which entry of `MORE` is added to the JSON."""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        shape = [f"{name}{size}" for name in ("dp", "tp", "pp") if (size := getattr(self, name)) > 1] or ["alone"]
        flags = [name for name in ("sequence", "lora", "checkpointing") if getattr(self, name)]
        family = [] if self.family == "llama" else [self.family]
        return "-".join([*shape, f"z{self.stage}", *family, *flags, *([self.more] if self.more else [])])


CPU = {"device": "cpu"}
LLAMA_BY_NAME = {
    "layer_specs": [
        {"patterns": [r"\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r"\.(o|down)_proj\.weight$"], "partition_type": "row"},
    ]
}
"""What DeepSpeed's users write: the blocks are cut, embedding and head are whole."""
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "offload": {"zero_optimization": {"offload_optimizer": CPU}},
    "offload_all": {"zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}},
    "budget": {"hf_dist": {"memory_budget": "2GB"}},
    "in_backward": {"hf_dist": {"optimizer_in_backward": True}, "gradient_clipping": 0},
    "tiles": {"hf_dist": {"tiled_loss": True}},
    "hsdp": {"zero_optimization": {"mics_shard_size": 1}},
    "whole_logits": {"hf_dist": {"tiled_loss": False}},
    "every_second": {"activation_checkpointing": {"every_n_layers": 2}},
    "overlap": {"tensor_parallel": {"tp_overlap_comm": True}},
    "partition": {"tensor_parallel": {"partition_config": LLAMA_BY_NAME}},
    "dora": {},
    "selective": {"activation_checkpointing": {"selective": True}},
}


def start(layout: Layout, seed: int = 0) -> Any:
    """An engine on a model whose weights depend on `seed`, so that a load that does nothing is seen."""
    import hf_dist

    model: Any = make_model(layout.family, layout.tied, layout.lora, layout.checkpointing)
    if layout.more == "dora":
        model = with_dora(model)
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.1)
    more = MORE[layout.more]
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 1 if layout.dp == 4 else 2,
        "gradient_clipping": 1.0,
        **more,
        "zero_optimization": {"stage": layout.stage, **more.get("zero_optimization", {})},
        "tensor_parallel": {"autotp_size": layout.tp, **more.get("tensor_parallel", {})},
        "pipeline": {"stages": layout.pp},
    }
    if layout.tp > 1:
        config["hf_dist"] = {"sequence_regions": layout.sequence, **more.get("hf_dist", {})}
    optimizer = torch.optim.AdamW(param_groups(model), lr=3e-3, eps=1e-3)
    return hf_dist.initialize(model, config=config, optimizer=optimizer, example_batch=batches(1)[0])


def with_dora(model: Any) -> Any:
    """Adapters that learn norms as well, on matrices that are cut by columns; those of what is cut by rows are refused."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    columns = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=columns, use_dora=True)).train()


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of every step, each with as many labels: a mean of means is then the mean."""
    found = []
    for batch in make_batches("llama", count):
        rows = {key: value[:ROWS] for key, value in batch.items()}
        ids, mask = rows["input_ids"], rows["attention_mask"]
        found.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(ids % 3 == 0, -100, ids)})
        found[-1]["labels"][:, :4] = ids[:, :4]
        found[-1]["labels"][:, 4:] = -100
    return found


def train(engine: Any, first: int, count: int) -> tuple[list[float], list[float]]:
    """Losses and norms of steps [first, first + count) of the common order."""
    data, accumulation = engine.mesh.data, engine.batch.accumulation
    micro = ROWS // (data.size * accumulation)
    losses, norms = [], []
    for batch in batches(first + count)[first:]:
        parts = [
            {key: value[(k * data.size + data.rank) * micro :][:micro] for key, value in batch.items()}
            for k in range(accumulation)
        ]
        losses.append(float(engine.train_batch(iter(parts))))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Whole, of the stages of this rank."""
    import hf_dist

    with hf_dist.gathered(engine.model):
        return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def save_all(rank: int, world: int, root: str, layouts: list[Layout]) -> dict[str, Any]:
    """Save before the first step and after some; losses and norms from there on, and the weights at the end."""
    found = {}
    for layout in layouts:
        engine = start(layout)
        engine.save_checkpoint(Path(root) / f"{layout}-new")
        train(engine, 0, BEFORE)
        engine.save_checkpoint(Path(root) / str(layout))
        found[str(layout)] = (train(engine, BEFORE, AFTER), weights(engine))
    return found


def load_all(rank: int, world: int, root: str, pairs: list[tuple[str, Layout]]) -> dict[tuple[str, str], Any]:
    """For every (saved layout, layout here): losses and norms after the load, and the weights at the end."""
    found = {}
    for saved, layout in pairs:
        engine = start(layout, seed=7)
        engine.load_checkpoint(Path(root) / saved)
        found[saved, str(layout)] = (train(engine, BEFORE, AFTER), weights(engine))
    return found


def run_all(rank: int, world: int, layouts: list[Layout]) -> list[Any]:
    """All steps of each: losses, norms, weights; a traceback where it raised."""

    def run(layout: Layout) -> Any:
        engine = start(layout)
        return train(engine, 0, BEFORE + AFTER), weights(engine)

    return attempts(rank, world, (functools.partial(run, layout) for layout in layouts))


def run_save_load(
    rank: int, world: int, root: str, layouts: list[Layout], saved: list[Layout], pairs: list[tuple[str, Layout]]
) -> tuple[list[Any], dict[str, Any], dict[tuple[str, str], Any]]:
    """`run_all`, `save_all`, `load_all` in one spawn."""
    return run_all(rank, world, layouts), save_all(rank, world, root, saved), load_all(rank, world, root, pairs)
