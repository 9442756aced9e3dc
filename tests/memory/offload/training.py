"""One small training run under any offload setting, and what must come out the same: losses, norms, weights, states."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

ROWS, DIM, VOCAB = 8, 24, 37
STEPS = 4


class Block(nn.Module):
    """A residual layer; `frozen` leaves only a small adapter to train."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.adapter = nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)
        if frozen:
            for module in (self.up, self.down, self.norm):
                module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pre-norm MLP beside an adapter."""
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h))) + self.adapter(h)


class Net(nn.Module):
    """Embedding, blocks, head, and a layer that is used in no forward."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(frozen) for _ in range(4))
        self.unused = nn.Linear(DIM, 3)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw_loop": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases and norms without decay, at another rate."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def make_engine(
    offload: dict[str, Any],
    *,
    stage: int,
    optimizer: str = "adamw",
    frozen: bool = False,
    seed: int = 0,
    shards: int | None = None,
    **config: Any,
) -> Any:
    """An engine with `offload` (keys of `zero_optimization`) on the small net; `shards`: HSDP."""
    import hf_dist

    torch.manual_seed(seed)
    model = Net(frozen)
    made = OPTIMIZERS[optimizer](param_groups(model))
    schedule = torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.1, 20)
    if shards:
        offload = {**offload, "mics_shard_size": shards}
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 4000, **copy.deepcopy(offload)},
        **config,
    }
    return hf_dist.initialize(model, config=whole, optimizer=made, lr_scheduler=schedule, device="cpu")


def train(
    engine: Any, first: int = 0, count: int = STEPS, clip_value: float | None = None
) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of this rank's steps [first, first + count); elements clipped at `clip_value` if given."""
    losses, norms = [], []
    for step in range(first, first + count):
        for micro in range(engine.batch.accumulation):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + engine.mesh.dp.rank)
            ids = torch.randint(VOCAB, (2, 6), generator=generator)
            loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
            engine.backward(loss)
            if clip_value is not None and engine.is_gradient_accumulation_boundary():
                engine.clip_grad_value(clip_value)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's master weights and optimizer states, and of the full weights. Collective."""
    import hf_dist

    found: dict[str, torch.Tensor] = {}
    for group in engine.sharded.groups:
        for slot in group.layout.slots:
            start, stop = group.fragment(slot)
            found[f"master.{slot.name}"] = group.source[start:stop].detach().clone()
    for name, state in engine.fragments.members[0].state_dict()["state"].items():
        for key, value in state.items():
            found[f"{key}.{name}"] = torch.as_tensor(value).clone()
    with hf_dist.gathered(engine.model):
        found |= {f"weight.{n}": p.detach().clone() for n, p in engine.model.named_parameters()}
    return found


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not bitwise equal."""
    return [n for n in sorted(a.keys() | b.keys()) if n not in a or n not in b or not torch.equal(a[n], b[n])]
