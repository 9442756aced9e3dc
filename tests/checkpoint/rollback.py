"""Loads into engines that have trained, and with other optimizers: what a rank does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_dist.errors import CheckpointError
from tests.covering import FULL_GRID
from tests.memory.offload.training import OPTIMIZERS, Net, differences, make_engine, param_groups, states, train

BEFORE, AFTER = (range(3), (3, 4)) if FULL_GRID else (range(1), (3,))
"""Of pipelines: steps that a load takes back, and those that show the moments it has brought."""
LENGTH: dict[str, Any] = {} if FULL_GRID else {"max_steps": 4, "gradient_accumulation_steps": 1}
"""Of the Trainer's runs."""


class History(torch.optim.SGD):
    """SGD whose state has no element for each of the parameter's: what the last three steps were, and a plain number."""

    def step(self, closure: Any = None) -> Any:
        """Smaller steps as time goes by."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                past = state.setdefault("past", torch.ones(3))
                state["count"] = state.get("count", 0) + 1
                past.copy_(past.roll(1) * 0.5)
                p.grad.mul_(past.sum() / state["count"])
        return super().step(closure)


OPTIMIZERS["history"] = lambda params: History(params, lr=1e-2)


def _window_left_open(engine: Any) -> None:
    if engine.batch.accumulation > 1:
        ids = torch.full((2, 6), 3)
        engine.backward(engine(ids).float().square().mean() * 50)
        engine.step()


def _draws() -> list[float]:
    """The next number of each generator, and the one that the two of normal numbers keep ready."""
    return [float(torch.rand(())), random.gauss(0, 1), random.random(), np.random.normal(), np.random.random()]


def go_back(rank: int, world: int, root: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Save, train on, leave a window open, load; the same load into a new engine: what differs, now and two steps on."""
    results = []
    for index, case in enumerate(cases):
        case = {"offload": {}, "stage": 1, **case}
        steps, where = case.pop("steps", 0), Path(root) / f"{index}"
        engine = make_engine(**case)
        train(engine, 0, steps)
        _draws()
        engine.save_checkpoint(where)
        drawn = _draws()
        train(engine, 20, 3)
        _window_left_open(engine)
        found = []
        for fresh in (False, True):
            engine = make_engine(**case, seed=9) if fresh else engine
            engine.load_checkpoint(where)
            facts = [engine.global_steps, engine.loss_scale, engine.get_lr(), engine.micro_steps, _draws() == drawn]
            loaded = states(engine)
            losses = train(engine, 10, 2)
            found.append((facts, loaded, losses, states(engine)))
        (facts, loaded, losses, after), (own, expected, wanted, then) = found
        results.append(
            (facts == own, differences(loaded, expected), repr(losses) == repr(wanted), differences(after, then), facts)
        )
    return results


def without_state(rank: int, world: int, root: str) -> dict[str, Any]:
    """A checkpoint of another optimizer, or in fp32, leaves no moments, or loss scale, of the engine that loads it."""
    where = Path(root) / "sgd"
    saver = make_engine({}, stage=1, optimizer="plain_sgd")
    train(saver, 0, 2)
    saver.save_checkpoint(where)
    results = {}
    for optimizer in ("adamw", "adagrad"):
        engine = make_engine({}, stage=1, optimizer=optimizer)
        train(engine, 20, 3)
        engine.load_checkpoint(where)
        fresh = make_engine({}, stage=1, optimizer=optimizer, seed=9)
        fresh.load_checkpoint(where)
        results[optimizer] = (differences(states(engine), states(fresh)), train(engine, 10, 2) == train(fresh, 10, 2))
    engine = make_engine({}, stage=1, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
    before = engine.loss_scale
    train(engine, 20, 1)
    lowered = engine.loss_scale < before
    engine.load_checkpoint(where)
    results["scale"] = lowered, engine.loss_scale == before
    return results


def _engine(optimizer: Any, **config: Any) -> Any:
    import hf_dist

    torch.manual_seed(0)
    model = Net()
    made = optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    return hf_dist.initialize(
        model,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, **config},
        optimizer=made,
        lr_scheduler=schedule,
    )


def other_optimizers(rank: int, world: int, root: str) -> dict[str, Any]:
    """Options and rates after a load of what AdamW on two param groups saved at step 3."""

    def options(engine: Any) -> list[dict[str, Any]]:
        keys = ("lr", "initial_lr", "weight_decay", "betas", "momentum")
        return [{k: g[k][0] if k == "betas" else g[k] for k in keys if k in g} for g in engine.optimizer.param_groups]

    def again(optimizer: Any, name: str) -> None:
        engine = _engine(optimizer)
        try:
            engine.load_checkpoint(where)
        except CheckpointError as error:
            found[name] = str(error)
            return
        loaded = options(engine)
        train(engine, 3, 1)
        kept = "weight" if len(engine.optimizer.state) else "none"
        found[name] = (loaded, engine.get_lr(), len(engine.fragments.fragments), kept)

    where, found = Path(root) / "adamw", dict[str, Any]()
    saver = _engine(lambda model: torch.optim.AdamW(param_groups(model), lr=1e-3, weight_decay=0.5))
    train(saver, 0, 3)
    saver.save_checkpoint(where)
    again(lambda model: torch.optim.SGD(param_groups(model), lr=0.5, momentum=0.9), "sgd")
    again(lambda model: torch.optim.AdamW(param_groups(model), lr=1.0, weight_decay=0.1), "same")
    again(lambda model: torch.optim.AdamW(param_groups(model)[::-1], lr=1.0, weight_decay=0.1), "turned")
    again(lambda model: torch.optim.AdamW(model.parameters(), lr=1.0), "one group")

    def divided(model: Any) -> Any:
        params = list(model.parameters())
        return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}], lr=1.0)

    again(divided, "divided")
    return found


def stages(rank: int, world: int, root: str) -> tuple[float, list[float]]:
    """The same rollback over two pipeline stages; the largest difference of a weight after the next steps.

    Also the next random number of two ranks that read different rows and save, and once they share rows and have loaded that.
    """
    import hf_dist
    from tests.parity.pipelines import PipelineCase, build, optimizer_for, step_batches

    where = Path(root) / "stages"

    def engine(pp: int = 2) -> Any:
        model = build("Llama", False, False, *(() if FULL_GRID else (3,)))
        batch = step_batches("Llama", 1, 0)[0]
        config = PipelineCase(pp=pp, stage=1).config
        return hf_dist.initialize(model, config=config, optimizer=optimizer_for(model), example_batch=batch)

    def weights(found: Any) -> torch.Tensor:
        for step in AFTER:
            found.train_batch(iter(step_batches("Llama", 4, step)))
        with hf_dist.gathered(found.model):
            return torch.cat([p.detach().flatten().clone() for p in found.model.parameters()])

    first = engine()
    first.save_checkpoint(where)
    for step in BEFORE:
        first.train_batch(iter(step_batches("Llama", 4, step)))
    first.load_checkpoint(where)
    second = engine()
    second.load_checkpoint(where)
    difference = float((weights(first) - weights(second)).abs().max())
    apart = engine(pp=1)
    torch.manual_seed(rank)
    apart.save_checkpoint(where)
    drawn = [float(torch.rand(()))]
    second.load_checkpoint(where)
    return difference, [*drawn, float(torch.rand(()))]


def with_accelerate(rank: int, world: int, root: str) -> tuple[list[float], list[float]]:
    """`load_state` of the beginning, with one's own loop of accelerate's kind; losses of the first and the second time."""
    import hf_dist

    accelerator = hf_dist.DistAccelerator(dist_config={"zero_optimization": {"stage": 2}})
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    where = f"{root}/state"
    accelerator.save_state(where)

    def losses() -> list[float]:
        found = []
        for step in range(4):
            ids = torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    first = losses()
    loss = model(torch.full((2, 6), 3)).square().mean() * 50
    accelerator.backward(loss)  # of weights that go
    accelerator.load_state(where)
    return first, losses()


def with_trainer(rank: int, world: int, root: str) -> dict[str, Any]:
    """A Trainer that resumes an earlier step after its own run, and one that resumes with another optimizer."""
    from tests.hf.lifecycle import logged
    from tests.hf.on_ranks import dist_trainer

    folder = Path(root)
    trainer = dist_trainer("plain", 2, folder, save_strategy="steps", save_steps=2, **LENGTH)
    trainer.train()
    whole = logged(trainer)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    other = dist_trainer("plain", 2, folder / "sgd", optim="sgd", learning_rate=0.3, **LENGTH)
    other.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    alone = dist_trainer("plain", 2, folder / "alone", optim="sgd", learning_rate=0.3, **LENGTH)
    alone.train()
    rates = [[row[3] for row in logged(run)][2:] for run in (other, alone)]
    return {"whole": whole[2:], "again": logged(trainer)[-len(whole[2:]) :], "rates": rates}
