"""A model with a tower that trains, inside of it or in another role: gradients flow through the tower in both directions."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from hf_dist import DistAccelerator, remote_call, remote_model
from hf_dist.hf.serving_training import Training
from tests.parity.families import make_model
from tests.remote.jobs import rows

STEPS = 5
ROWS = 4
"""Of a microbatch, over all ranks."""
RATE: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
"""Rounding decides no sign."""


def save_tower(folder: str, dropout: float = 0.0) -> None:
    """`tower`: a decoder without a head."""
    model: Any = make_model("llama", layers=2)
    model.model.config.attention_dropout = dropout
    model.model.save_pretrained(f"{folder}/tower")


class WithTower(nn.Module):
    """Embedding, tower, head. The tower's input needs a gradient, and its last two hidden states are used."""

    def __init__(self, tower: nn.Module, *, checkpointed: bool, twice: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        size = tower.config.hidden_size  # type: ignore[union-attr]
        self.embedding, self.tower, self.head = nn.Embedding(64, size), tower, nn.Linear(size, 64)
        self.checkpointed, self.twice = checkpointed, twice

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Mean loss of the next token."""
        embedded = self.embedding(input_ids)
        run = self._features
        hidden = (
            checkpoint(run, embedded, attention_mask, use_reentrant=False)
            if self.checkpointed
            else run(embedded, attention_mask)
        )
        if self.twice:
            hidden = hidden + self._features(embedded.flip(1), attention_mask.flip(1))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())

    def _features(self, embedded: Tensor, mask: Tensor) -> Tensor:
        found = self.tower(inputs_embeds=embedded, attention_mask=mask, output_hidden_states=True, use_cache=False)
        both: Tensor = found.last_hidden_state + found.hidden_states[1]
        return both


def with_tower(folder: str, ranks: int, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The section: a tower on `ranks` ranks in that layout, the trainer on the rest."""
    config = {**layout, "optimizer": {"type": "AdamW", "params": RATE}}
    tower = {"ranks": ranks, "model": f"{folder}/tower", "config": config, **more}
    return {"hf_dist": {"roles": {"trainer": {"ranks": "rest"}, "tower": tower}}}


def train(rank: int, world: int, folder: str, config: dict[str, Any], how: dict[str, Any]) -> dict[str, Any] | None:
    """Losses, norms, weights and the tower's weights after five steps; None on the tower's ranks."""
    torch.manual_seed(0)
    steps, accumulation = how.get("accumulation", 1), {"gradient_accumulation_steps": how.get("accumulation", 1)}
    try:
        accelerator = DistAccelerator(dist_config={"train_micro_batch_size_per_gpu": "auto", **accumulation, **config})
    except SystemExit as end:
        assert not end.code, end
        return None
    remote = "hf_dist" in config
    tower: Any = (
        remote_model("tower", trains=True)
        if remote
        else transformers.AutoModel.from_pretrained(f"{folder}/tower", dtype=torch.float32)
    )
    model: Any = WithTower(tower, checkpointed=how.get("checkpointed", False), twice=how.get("twice", False))
    optimizer: Any = torch.optim.AdamW(model.parameters(), **RATE)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    made: Any = rows(STEPS * ROWS * steps)
    loader: Any = DataLoader(made, batch_size=ROWS // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    model.train()
    found: dict[str, Any] = {"losses": [], "norms": []}
    if how.get("resumes"):
        accelerator.load_state(how["resumes"])
    for number, batch in enumerate(loader):
        if (how.get("resumes") and number < 2 * steps) or (how.get("saves") and number >= 2 * steps):
            continue
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), how.get("clip", 0.5))))
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
    saved = how.get("saves") or f"{folder}/state-{os.path.basename(os.getcwd())}-{world}-{accelerator.num_processes}"
    state = accelerator.get_state_dict(model)
    accelerator.save_state(saved)
    accelerator.wait_for_everyone()
    found["weights"] = (
        {n: t.float().clone() for n, t in state.items() if not n.startswith("tower.")} if rank == 0 else {}
    )
    found["tower"] = _tower_of(Path(saved), state, remote) if rank == 0 else {}
    if remote and how.get("odd"):
        found["odd"] = _odd_orders(model, tower, batch)
    found["held"] = sum(p.numel() for p in tower.parameters())
    if remote:
        tower._asker.close()
    return found


def held_forwards() -> int:
    """In the role: how many forwards a backward may follow."""
    return sum(len(each._kept) for each in gc.get_objects() if isinstance(each, Training))


def _odd_orders(model: Any, tower: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Slopes along a direction, by backward and by difference, of a tower with dropout, and what other orders of calls give."""
    embedded = model.embedding(batch["input_ids"]).detach().double()
    along, weight = torch.randn_like(embedded), torch.randn_like(embedded)

    def loss(distance: float, seed: int = 5) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        moved = (embedded + distance * along).float().requires_grad_()
        return tower(inputs_embeds=moved, use_cache=False).last_hidden_state.double().mul(weight).sum(), moved

    value, moved = loss(0.0)
    unused, _ = loss(0.0)  # a forward without a backward
    other, _ = loss(0.0, seed=6)
    (slope,) = torch.autograd.grad(value, moved, retain_graph=True)
    (again,) = torch.autograd.grad(value, moved)
    with torch.no_grad():
        ahead, behind = loss(3e-3)[0], loss(-3e-3)[0]
    apart = float(other.detach() - ahead)
    kept = float(unused.detach() - value.detach())
    difference = float((ahead - behind) / 6e-3)
    gc.collect()  # what earlier graphs have left in circles
    held = remote_call("tower", f"{__name__}:held_forwards").get()
    del unused, value, other, ahead, behind
    gc.collect()
    left = remote_call(
        "tower", f"{__name__}:held_forwards"
    ).get()  # not a call of the model: it carries what was dropped
    optimized = tower.eval()(inputs_embeds=embedded.float(), use_cache=False).last_hidden_state
    return {
        "same seed": kept,
        "other seed": apart,
        "held": held,
        "left": left,
        "slope": float((slope.double() * along).sum()),
        "again": float((again - slope).abs().max()),
        "difference": difference,
        "evaluation has a graph": optimized.requires_grad,
    }


def _tower_of(saved: Path, state: dict[str, Tensor], remote: bool) -> dict[str, Tensor]:
    if not remote:
        return {n.removeprefix("tower."): t.float().clone() for n, t in state.items() if n.startswith("tower.")}
    found: dict[str, Tensor] = {}
    for file in (saved / "roles" / "tower").glob("*.safetensors"):
        found |= {name: t.float() for name, t in load_file(file).items()}
    return found
