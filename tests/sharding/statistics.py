"""Models with BatchNorm on ranks, under DDP and under ours; small shard groups; `gathered` over stages: what a rank does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.covering import FULL_GRID, some_of


class Block(nn.Sequential):
    """Counts what it sees, in place and by another tensor."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        for name in ("running", "running_sum"):
            self.register_buffer(name, torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.running += x.abs().sum()
                self.running_sum = self.running_sum + x.abs().sum()
        return super().forward(x)


class Normed(nn.Module):
    """BatchNorm, in a branch of which from the third forward on only, and buffers of its own: changed in place, replaced by
    another tensor, changed late, constant, and a table for this rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.late_norm = nn.BatchNorm1d(8)
        for name in ("rows", "replaced", "late"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("lookup", torch.zeros(1), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number per row."""
        if self.training:
            self.note(x)
        for block in self.blocks:
            x = block(x)
        if self.calls > 2:
            x = x + self.late_norm(x)
        return self.head(x)

    @torch.no_grad()
    def note(self, x: torch.Tensor) -> None:
        """Change the buffers, as codebooks and counters do."""
        self.calls += 1
        self.rows += x.abs().sum()
        self.replaced = self.replaced + x.square().sum()
        if self.calls > 2:
            self.late.add_(x.abs().sum())
        self.lookup = torch.arange(2.0 + int(x[0, 0] > 0))


def rows(step: int, rank: int) -> torch.Tensor:
    """Other ones, of another size, on every rank."""
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=g) * (1 + 3 * rank) + rank


def ddp(rank: int, world: int, late: bool = True) -> Any:
    """Buffers after three steps of two microbatches, and evaluation of one batch. `late`: whether it changes later."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    normed = Normed()
    normed.table += rank
    normed.calls = 0 if late else -100
    normed._ddp_params_and_buffers_to_ignore = ["lookup"]
    model = DDP(normed, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        with model.no_sync():
            (model(rows(2 * step, rank)).square().mean() / 2).backward()
        (model(rows(2 * step + 1, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    loss = float(model(rows(99, 0)).square().mean().detach())
    return {n: b.clone() for n, b in model.module.named_buffers() if n != "lookup"}, loss


RUNS = {"z0": (0, ""), "z1": (1, ""), "z2": (2, ""), "z3": (3, ""), "bf16": (1, "bf16")}
RUNS = some_of(RUNS, "z0", "z3", "bf16")
"""Stage and dtype: weights that are whole, gathered, and of another dtype than the buffers."""


def ours(rank: int, world: int, root: str) -> dict[str, Any]:
    """The same with the engine, by stage; a checkpoint of it; how many broadcasts a step has."""
    import hf_dist
    from hf_dist.dist import comm_counter

    found: dict[str, Any] = {}
    for name, (stage, dtype) in RUNS.items():
        model = Normed()
        model.table += rank
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            **({dtype: {"enabled": True}} if dtype else {}),
        }  # fmt: skip
        engine = hf_dist.initialize(model, config=config)
        for step in range(6):
            if step == 4:
                engine.save_checkpoint(Path(root) / name)
                written = {n: b.clone() for n, b in model.named_buffers()}
            with comm_counter.record() as log:
                engine.backward(engine(rows(step, rank)).float().square().mean())
                engine.step()
        engine.eval()
        with torch.no_grad():
            loss = float(engine(rows(99, 0)).float().square().mean())
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        again = hf_dist.initialize(Normed(), config=config)
        again.load_checkpoint(Path(root) / name)
        saved = {n: b.clone() for n, b in again.model.named_buffers()}
        engine.train()
        with torch.no_grad():
            engine(rows(100, rank))
        hf_dist.unprepare(model)
        ordinary = {n: b.clone() for n, b in model.named_buffers()}
        found[name] = {"buffers": buffers, "loss": loss, "broadcasts": log.count("broadcast"), "saved": saved}
        found[name] |= {"written": written, "ordinary": ordinary}
    return found


def stages(rank: int, world: int, root: str) -> dict[str, torch.Tensor]:
    """BatchNorm in blocks on two pipeline stages of two data ranks; what a checkpoint of it holds."""
    from safetensors.torch import load_file

    import hf_dist

    class Wrapped(Normed):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:  # type: ignore[override]
            for block in self.blocks:
                x = block(x)
            return {"loss": self.head(x).square().mean()}

    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "pipeline": {"stages": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0,
    }  # fmt: skip
    model = Wrapped()
    engine = hf_dist.initialize(model, config=config, example_batch={"x": rows(0, 0)})
    data = engine.mesh.data.rank
    for step in range(3):
        batches = iter([{"x": rows(2 * step, data)}, {"x": rows(2 * step + 1, data)}])
        engine.train_batch(batches, lambda m, b: m(**b)["loss"])
    engine.save_checkpoint(Path(root) / "stages")
    saved: dict[str, torch.Tensor] = {}
    for file in sorted((Path(root) / "stages").glob("*.safetensors")):
        saved |= load_file(file)
    return {n: t for n, t in saved.items() if "running" in n and "late" not in n}


def small_groups(rank: int, world: int) -> dict[str, Any]:
    """Layout, resident bytes and notes with and without the keys, and the line of the start-up report."""
    import hf_dist

    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("hf_dist").addHandler(Ear())
    logging.getLogger("hf_dist").setLevel(logging.INFO)
    found: dict[str, Any] = {}
    for stage in (1, 2, 3) if FULL_GRID else (2, 3):
        for key in ("", "mics_shard_size", "zero_hpz_partition_size"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            zero = {"stage": stage, **({key: 2} if key else {})}
            config = {
                "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": zero,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }  # fmt: skip
            heard.clear()
            engine = hf_dist.initialize(model, config=config)
            engine.backward(engine(torch.randn(4, 64)).float().square().mean())
            engine.step()
            notes = [note.path for note in engine.config.notes]
            told = [
                line.strip() for text in heard for line in text.splitlines() if "second copy of the weights" in line
            ]
            found[f"z{stage} {key}"] = (engine.mesh.axes.size("dp_replicate"), engine.resident_nbytes(), notes, told)
    return found


def modifiers(rank: int, world: int, tied: bool) -> dict[str, Any]:
    """Two stages of two data ranks: one element of each weight of this rank, after some ranks wrote theirs."""
    import hf_dist
    from hf_dist.errors import ModelError
    from tests.parity.pipelines import PipelineCase, build, optimizer_for, step_batches

    model = build("Llama", tied, False)
    engine = hf_dist.initialize(
        model,
        config=PipelineCase(dp=2, stage=3).config,
        optimizer=optimizer_for(model),
        example_batch=step_batches("Llama", 1, 0)[0],
    )
    assert engine.mesh.dp.size == 2
    found: dict[str, Any] = {}
    for name, modifier, writers in (
        ("all-0", 0, range(4)),
        ("all-3", 3, range(4)),
        ("0-0", 0, [0]),
        ("2-2", 2, [2]),
        ("1-0", 0, [1]),
    ):
        with hf_dist.gathered(model, modifier_rank=0), torch.no_grad():
            for p in model.parameters():
                p.fill_(-1.0)
        with hf_dist.gathered(model, modifier_rank=modifier), torch.no_grad():
            if rank in writers:
                for p in model.parameters():
                    p.fill_(float(rank))
        with hf_dist.gathered(model):
            values = {n: set(p.detach().flatten().tolist()) for n, p in model.named_parameters()}
        embed = values.pop("model.embed_tokens.weight", None)
        found[name] = (set().union(*values.values()), embed)
    for wrong in (4, -1):
        try:
            with hf_dist.gathered(model, modifier_rank=wrong):
                pass
        except ModelError as error:
            found[str(wrong)] = str(error)
    return found
