"""Figures of `hf_dist/parallel/local_sgd/RESULTS.md`, outside the test run:

python -m tests.parallel.local_sgd.bench convergence FOLDER     four replicas: curves.json and curves.svg; goes on where it
was stopped python -m tests.parallel.local_sgd.bench slow-link              two replicas of two ranks, over a link that is
simulated"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.harness import ROOT, run_ranks

BEGINNING, STEPS, EVERY, ROWS, LENGTH, LR = 200, 500, 10, 4, 64, 3e-3
"""All runs go on from the same beginning, which is synchronous."""
EVALUATED = 20


def outer(rate: float, momentum: float, **more: Any) -> dict[str, Any]:
    """The section."""
    return {"every": EVERY, "outer_lr": rate, "outer_momentum": momentum, "nesterov": momentum > 0, **more}


DILOCO = outer(0.7, 0.9)
STREAMED = {"fragments": 4, "overlap": 2}
DRAWN: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "mean of the weights": {"every": EVERY},
    "rate 1, Nesterov 0.7": outer(1.0, 0.7),
    "rate 0.7, Nesterov 0.9": DILOCO,
}
TRIED = {
    **{f"rate {r:g}, Nesterov {m:g}": outer(r, m) for m in (0.5, 0.7, 0.9) for r in (0.7, 1.0)},
    **{f"rate 1, Nesterov 0.7, 4 fragments, mix {mix:g}": outer(1.0, 0.7, **STREAMED, mix=mix) for mix in (0.0, 0.5)},
}
CODED: dict[str, dict[str, Any]] = {
    "int8": {"meetings": "int8"},
    "int4": {"meetings": "int4"},
    "int4 with feedback": {"meetings": "int4", "error_feedback": True},
    "fp8_e4m3": {"meetings": "fp8_e4m3"},
}
"""`hf_dist.wires`, beside the best of `TRIED`, alone and in fragments with `mix` 0.5."""
RUNS = DRAWN | {name: section for name, section in TRIED.items() if name not in DRAWN}
for _more in (
    {"rank": 1},
    {"rank": 4},
    {"rank": 16},
    {"rank": 4, "error_feedback": False},
    {"rank": 4, "warm_start": False},
):
    RUNS[f"synchronous, powersgd {_more}"] = {
        "wires": {"gradients": "powersgd", "powersgd": {"start_step": 0, **_more}}
    }
for _name in ("rate 1, Nesterov 0.7", "rate 1, Nesterov 0.7, 4 fragments, mix 0.5"):
    RUNS |= {f"{_name}, {codec}": {**RUNS[_name], "wires": wires} for codec, wires in CODED.items()}
COLORS = ("#4477aa", "#ccbb44", "#228833", "#ee6677")
WIDTH = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def write_blocks(folder: Path) -> None:
    """Blocks to train on and blocks of other files: sources of the standard library."""
    sys.path.insert(0, f"{ROOT}/examples")
    from train_clm import ExampleArguments, make_tokenizer, prepare_data, read_texts
    from transformers import AutoTokenizer

    texts = read_texts(ExampleArguments(max_characters=1_500_000), seed=0)
    make_tokenizer(texts, 1024, folder)
    data = prepare_data(texts, AutoTokenizer.from_pretrained(folder), LENGTH)
    train, held_out = (torch.tensor(data[name]["input_ids"]) for name in ("train", "eval"))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
    torch.save((train[order], held_out[:128]), folder / "blocks.pt")


def model_and_blocks(folder: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A Llama of half a million parameters, the same on every rank, and the blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**WIDTH, num_key_value_heads=2, vocab_size=1024, use_cache=False))
    return model, *torch.load(Path(folder) / "blocks.pt")


def curve(rank: int, world: int, section: dict[str, Any], folder: str, begins: bool = False) -> dict[str, Any]:
    """Loss of held-out blocks every `EVALUATED` steps, and what a rank sent to other replicas; or the beginning."""
    import hf_dist
    from hf_dist.dist import collectives, comm_counter

    model, train, held_out = model_and_blocks(folder)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "local_sgd": {key: value for key, value in section.items() if key != "wires"},
        "hf_dist": {"wires": section.get("wires", {})},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    engine = hf_dist.initialize(
        model,
        config=config,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, _rate),
        device="cpu",
    )
    if not begins:
        engine.load_checkpoint(f"{folder}/beginning")
    losses, sent = [], 0
    for step in range(1, BEGINNING + 1) if begins else range(BEGINNING + 1, STEPS + 1):
        first = ((step - 1) * world + rank) * ROWS % (len(train) - ROWS)
        rows = train[first : first + ROWS]
        with comm_counter.record() as log:
            engine.backward(engine(input_ids=rows, labels=rows).loss)
            engine.step()
            if step == STEPS:  # fragments that meet in turn: what is evaluated is all of them
                engine.synchronize_replicas()
        sent += sum(e.nbytes for e in log.entries if e.axis in ("shard", "dp", "dp_replicate"))
        if step % EVALUATED == 0:
            mine = held_out[rank::world]
            engine.eval()
            with torch.no_grad():
                loss = engine(input_ids=mine, labels=mine).loss
            engine.train()
            collectives.all_reduce(engine.mesh.world, loss).wait()
            losses.append((step, float(loss)))
    if begins:
        engine.save_checkpoint(f"{folder}/beginning")
    return {"losses": losses, "sent": sent}


def _rate(step: int) -> float:
    warm = min(1.0, (step + 1) / 40)
    return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def convergence(folder: Path) -> None:
    """Run all, print a table, draw."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "curves.json"
    if not file.exists():
        write_blocks(folder)
        file.write_text(json.dumps({"beginning": run_ranks(curve, 4, ({}, str(folder), True), timeout=1200)[0]}))
    found = json.loads(file.read_text())
    for name, section in RUNS.items():
        if name in found:
            continue
        started = time.time()
        found[name] = run_ranks(curve, 4, (section, str(folder)), timeout=1200)[0]
        found[name]["losses"] = found["beginning"]["losses"][-1:] + found[name]["losses"]
        file.write_text(json.dumps(found))
        print(
            f"{name}: {found[name]['losses'][-1][1]:.4f}, {found[name]['sent']} bytes, {time.time() - started:.0f} s",
            flush=True,
        )
    draw({name: found[name] for name in DRAWN}, folder / "curves.svg")


def draw(found: dict[str, Any], file: Path) -> None:
    """Loss over steps, and over bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for name, color in zip(found, COLORS, strict=True):
        steps, losses = zip(*found[name]["losses"], strict=True)
        left.plot(steps, losses, label=name, color=color)
        right.plot(
            [found[name]["sent"] * (step - BEGINNING) / (STEPS - BEGINNING) / 1e6 for step in steps],
            losses,
            color=color,
        )
    left.set(xlabel="steps", ylabel="loss of held-out text")
    right.set(xlabel="MB that a rank has sent to other replicas", xscale="log")
    left.legend(frameon=False)
    figure.savefig(file)


# ---- a slow link


@contextmanager
def slow_link(nbytes_per_second: float, latency: float) -> Iterator[None]:
    """Inside, what goes to other replicas takes its time on a link of each rank; one after the other."""
    from hf_dist.dist import collectives

    real, free = collectives.all_reduce, [0.0]

    def all_reduce(axis: Any, tensor: torch.Tensor, op: str = "mean") -> Any:
        handle = real(axis, tensor, op)
        if axis.name not in ("dp_replicate", "dp", "world"):
            return handle
        nbytes = 2 * (axis.size - 1) * tensor.numel() * tensor.element_size() / axis.size
        free[0] = max(free[0], time.monotonic()) + latency + nbytes / nbytes_per_second
        arrives = free[0]
        return collectives.Handle([handle], lambda: time.sleep(max(0.0, arrives - time.monotonic())))

    collectives.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield
    finally:
        collectives.all_reduce = real


LINKS = {"none": (math.inf, 0.0), "1 Gb/s, 1 ms": (125e6, 1e-3), "100 Mb/s, 10 ms": (12.5e6, 10e-3)}
SECTIONS: dict[str, dict[str, Any]] = {
    "HSDP": {},
    "every 10": DILOCO,
    "every 10, 4 fragments, overlap 2": {**DILOCO, **STREAMED},
    "every 50": {**DILOCO, "every": 50},
}
ROUNDS = 5


def timed(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    """Seconds per step by link and interval, a number for each round; all interleaved."""
    import hf_dist

    engines = {}
    for name, section in SECTIONS.items():
        model, train, _ = model_and_blocks(folder)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": 3, "mics_shard_size": 2},
            "local_sgd": section,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        engines[name] = hf_dist.initialize(model, config=config, optimizer=optimizer, device="cpu")
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for link, speed in LINKS.items():
            for name, engine in engines.items():
                steps = SECTIONS[name].get("every", 10)
                with slow_link(*speed):
                    began = time.monotonic()
                    for step in range(steps):
                        rows = train[(step * world + rank) * ROWS :][:ROWS]
                        engine.backward(engine(input_ids=rows, labels=rows).loss)
                        engine.step()
                found.setdefault(f"{link}|{name}", []).append((time.monotonic() - began) / steps)
    return found


def main(words: list[str]) -> None:
    """One of the two."""
    if words[0] == "convergence":
        convergence(Path(words[1]))
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_blocks(Path(folder))
        found = run_ranks(timed, 4, (folder,), timeout=1200)[0]
    for link in LINKS:
        cells = {name: min(found[f"{link}|{name}"]) for name in SECTIONS}
        print(link, {name: f"{1e3 * seconds:.0f} ms" for name, seconds in cells.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
