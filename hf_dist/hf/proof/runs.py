"""The runs: plain torch in one process, one process in the user's precision, and the layout on its ranks."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import BatchEncoding

from hf_dist.build import initialize
from hf_dist.experts.spread import find_experts
from hf_dist.hf.model_class import model_class
from hf_dist.hf.proof.itself import itself
from hf_dist.hf.proof.job import Job
from hf_dist.sharding.full_params import gathered
from hf_dist.sharding.held import held_slice
from hf_dist.sharding.precision import DTYPES

__all__ = ["in_one_process", "on_ranks", "quiet", "routed_parameters"]

Differences = dict[str, float]
"""Parameter, in the model's order -> norm of its difference to one process, relative to the norm in one process."""
_FLOOR = 0.01
"""A tensor's norm counts as at least that of as many elements of this share of the model's rms weight. A key bias, whose
gradient is zero in theory, is rounding and nothing else: relative to itself, it differs by its own size."""


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, only errors are logged, so that the table stays readable."""
    import transformers

    logger, theirs, handler = logging.getLogger("hf_dist"), transformers.utils.logging, logging.StreamHandler()
    level, verbosity, shows_progress = logger.level, theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        theirs.set_verbosity(verbosity)
        if shows_progress:
            theirs.enable_progress_bar()


@quiet()
def in_one_process(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Losses and norms of `steps` + 1 steps. Writes the weights after each of `steps` into the job's folder.

    `plain`: torch without an engine, in fp32. `same`: the precision of the config in one process, with its distance from
    `plain`; only if the precision is not fp32. `routed`: names of tensors beside routers, only if it is fp16. `itself`: what
    differs without a layout.
    """
    result: dict[str, Any] = {"plain": _plain(job), "itself": itself(job.make_model(), job.batches())}
    if job.precision != "fp32":
        result["same"] = _engine_steps(job, job.alone, 0, reference="plain", keep="same")
    if job.precision == "fp16":
        result["routed"] = routed_parameters(job.make_model())
    return result


@quiet()
def on_ranks(rank: int, world: int, job: Job) -> dict[str, Any]:
    """The layout: as `same` above, then saved, read back by plain `from_pretrained`, and resumed on the ranks."""
    reference = "plain" if job.precision == "fp32" else "same"
    result = _engine_steps(job, job.layout, rank, reference, then_save=True)
    engine = result.pop("engine")
    data_rank, before = engine.mesh.data.rank, {}
    for number, model in (("going on", None), ("resumed", job.make_model())):
        if model is not None:
            optimizer = job.make_optimizer(model)
            engine = initialize(model, config=job.layout, optimizer=optimizer)
            engine.load_checkpoint(_checkpoint(job))
        loss = engine.train_batch(_share(job, job.steps, data_rank, engine.mesh.data.size))
        before[number] = (float(loss), float(engine.get_global_grad_norm()))
    result["next"] = before
    if rank == 0:
        cls: Any = model_class(job.class_name)
        # In fp32 the file has the master weights; training computes with their value rounded to its precision.
        reread = cls.from_pretrained(_checkpoint(job), dtype=torch.float32).to(DTYPES[job.precision])
        result["reloaded"] = _differences(_named(reread), _weights_file(job, reference, job.steps))
        shutil.rmtree(_checkpoint(job), ignore_errors=True)
    return result


def _plain(job: Job) -> dict[str, Any]:
    model = job.make_model()
    optimizer, batches = job.make_optimizer(model), job.batches()
    losses, norms = [], []
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(job.steps + 1):
        total = 0.0
        for batch in batches[step * job.window : (step + 1) * job.window]:
            loss = model(**batch).loss / job.window
            loss.backward()
            total += loss.item()
        norms.append(_clip(trained, job.clip))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        if step < job.steps:
            weights = {name: p.detach().contiguous() for name, p in _named(model)}
            save_file(weights, _weights_file(job, "plain", step + 1))
    return {"losses": losses, "norms": norms}


def _clip(trained: list[nn.Parameter], most: float) -> float:
    """Clip gradients as torch does, by their norm in fp64, which it returns. `most`: 0 does not clip.

    torch's own fp32 norm of a large tensor is no reference on CPUs: off by 3e-5 at 2 million elements, by 1e-3 at 20 million.
    """
    norm = torch.stack([p.grad.double().norm() for p in trained if p.grad is not None]).norm()
    if most:
        torch.nn.utils.clip_grads_with_norm_(trained, most, norm)
    return float(norm)


def _engine_steps(
    job: Job, config: dict[str, Any], rank: int, reference: str, *, keep: str = "", then_save: bool = False
) -> dict[str, Any]:
    """`steps` steps of an engine (alone: one more), compared after each. Every rank calls it."""
    model = job.make_model()
    engine = initialize(model, config=config, optimizer=job.make_optimizer(model))
    axis = engine.mesh.data
    losses, norms, differences = [], [], []
    for step in range(job.steps if then_save else job.steps + 1):
        losses.append(float(engine.train_batch(_share(job, step, axis.rank, axis.size))))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if step == job.steps:
            break
        with gathered(model):
            if engine.mesh.dp.rank < engine.mesh.axes.size(
                "ep"
            ):  # rank 0 of each stage; ep neighbours hold other experts
                differences.append(_differences(_named(model), _weights_file(job, reference, step + 1)))
            if keep:
                weights = {name: p.detach().float().contiguous() for name, p in _named(model)}
                save_file(weights, _weights_file(job, keep, step + 1))
    result: dict[str, Any] = {"losses": losses, "norms": norms, "differences": differences}
    result["skipped"] = engine.skipped_steps
    if then_save:
        engine.save_checkpoint(_checkpoint(job))
        engine.writer.wait()
        result["engine"] = engine
    return result


def routed_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters of each mixture of experts: the experts, their router and what else its module has."""
    inside = [f"{path.rpartition('.')[0]}." for path in find_experts(model)]
    names = [name for name, _ in model.named_parameters()]
    return tuple(tuple(name for name in names if name.startswith(prefix)) for prefix in inside)


def _share(job: Job, step: int, data_rank: int, data_ranks: int) -> Iterator[BatchEncoding]:
    """In the class in which a tokenizer pads a batch and the standard collators return it: a mapping, but no dict."""
    window = job.batches()[step * job.window : (step + 1) * job.window]
    return map(BatchEncoding, window[data_rank::data_ranks])


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


def _differences(weights: list[tuple[str, torch.Tensor]], file: str) -> Differences:
    found: Differences = {}
    with safe_open(file, framework="pt") as expected:
        floor = _FLOOR * _rms([expected.get_tensor(name) for name in expected.keys()])  # noqa: SIM118
        for name, weight in weights:
            theirs = expected.get_tensor(name).double()
            own, held = weight.detach().cpu().double(), held_slice(weight)
            if tuple(own.shape) == held.shape and tuple(theirs.shape) == held.whole:
                theirs = held.take(theirs)  # own experts
            if own.shape != theirs.shape:
                found[name] = float("inf")
                continue
            norm = max(float(theirs.norm()), floor * theirs.numel() ** 0.5)
            found[name] = float((own - theirs).norm()) / (norm or 1.0)
    return found


def _rms(tensors: Sequence[torch.Tensor]) -> float:
    """Of all their elements."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors) / max(sum(t.numel() for t in tensors), 1))


def _weights_file(job: Job, run: str, step: int) -> str:
    return str(Path(job.folder) / f"{run}_{step}.safetensors")


def _checkpoint(job: Job) -> str:
    return str(Path(job.folder) / "checkpoint")
