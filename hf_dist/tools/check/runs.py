"""The runs: plain torch in one process, one process in the user's precision, and the layout on its ranks."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from hf_dist.engine.engine import Engine
from hf_dist.hf.model_class import model_class
from hf_dist.parallel.experts.spread import find_experts
from hf_dist.sharding.full_params import all_tensors
from hf_dist.tools.check import outputs
from hf_dist.tools.check.itself import itself
from hf_dist.tools.check.job import Job
from hf_dist.tools.check.rounding import DRAWS
from hf_dist.tools.check.training import Look, Training, alone_config, checkpoint_of

__all__ = ["in_one_process", "in_other_draws", "on_ranks", "quiet", "routed_parameters"]

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


def _leave_job() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # or accelerate would wrap the model
        os.environ.pop(name, None)


@quiet()
def in_one_process(rank: int, world: int, job: Job) -> dict[str, object]:
    """Losses and norms of `steps` + 1 steps. Writes the weights after each of `steps` into the job's folder.

    `plain`: the stock Trainer in fp32, all rows of a step in one batch; if messages are encoded, microbatch by microbatch, and
    they are here, too; and so are products in float8. Then `whole`: without these, with its distance from `plain`. If the
    precision is not fp32, `same`: one process in the precision of the config, with its distance from `plain`; and `routed`:
    names of tensors beside routers.
    `itself`: what differs without a layout.
    """
    _leave_job()
    result: dict[str, Any] = {"itself": itself(job.make_model(), job.batches())}
    result["plain"] = Training(job, job.steps + 1, look=_looks_at(job, [], keep="plain"))(_output(job))
    outputs.keep(result["plain"].pop("outputs"), _outputs_file(job, "plain"))
    if job.encoding is not None or job.eights:
        AcceleratorState._reset_state(reset_partial_state=True)  # of the process before
        apart: list[Differences] = []
        look = _looks_at(job, apart, reference="plain")
        result["whole"] = Training(job, job.steps, look=look, evaluates=False, imitates=False)(_output(job))
        result["whole"]["differences"] = apart
    if job.precision != "fp32":
        AcceleratorState._reset_state(reset_partial_state=True)  # of the process before
        differences: list[Differences] = []
        look = _looks_at(job, differences, reference="plain", keep="same")
        names = outputs.names_in(_outputs_file(job, "plain"))
        result["same"] = Training(job, job.steps + 1, alone_config(job), look, names=names)(_output(job))
        result["same"]["differences"] = differences
        given = result["same"].pop("outputs")
        result["same"]["outputs"] = outputs.differences(given, _outputs_file(job, "plain"))
        outputs.keep(given, _outputs_file(job, "same"))
    if job.precision != "fp32":
        result["routed"] = routed_parameters(job.make_model())
    return result


@quiet()
def in_other_draws(rank: int, world: int, job: Job) -> list[dict[str, object]]:
    """One process that the layout is compared with, `DRAWS` times: each draw rounds otherwise.

    Its losses, norms and evaluation, and the `differences` of its tensors and `outputs` from those of `in_one_process`.
    """
    _leave_job()
    reference = "plain" if job.precision == "fp32" else "same"
    config = None if job.precision == "fp32" else alone_config(job)
    expected = _outputs_file(job, reference)
    results: list[dict[str, object]] = []
    for draw in range(1, DRAWS + 1):
        AcceleratorState._reset_state(reset_partial_state=True)  # of the process before
        differences: list[Differences] = []
        look = _looks_at(job, differences, reference=reference)
        names = outputs.names_in(expected)
        found = Training(job, job.steps + 1, config, look, names=names, draw=draw)(_output(job))
        results.append({key: found[key] for key in ("losses", "norms", "evaluation")})
        results[-1] |= {"differences": differences, "outputs": outputs.differences(found["outputs"], expected)}
    return results


@quiet()
def on_ranks(rank: int, world: int, job: Job) -> dict[str, object]:
    """The layout: as `same` above, saved, read back by plain `from_pretrained`, and resumed on the ranks."""
    reference = "plain" if job.precision == "fp32" else "same"
    differences: list[Differences] = []
    look = _looks_at(job, differences, reference=reference)
    expected = _outputs_file(job, reference)
    names = outputs.names_in(expected)
    found = Training(job, job.steps + 1, job.layout, look, save_at=job.steps, names=names)(_output(job))
    saved = checkpoint_of(_output(job), job.steps)
    resumed = Training(job, job.steps + 1, job.layout, save_at=job.steps, evaluates=False)(_output(job), saved)
    result: dict[str, object] = {key: found[key][: job.steps] for key in ("losses", "norms")}
    result |= {"differences": differences} | {key: found[key] for key in ("skipped", "evaluation", "refused")}
    result["outputs"] = outputs.differences(found["outputs"], expected, refused=found["refused"])
    result["next"] = {
        "going on": (found["losses"][-1], found["norms"][-1]),
        "resumed": (resumed["losses"][-1], resumed["norms"][-1]),
    }
    if rank == 0:
        cls: Any = model_class(job.class_name)
        reread = cls.from_pretrained(saved, dtype=torch.float32)  # in half precision the masters
        _keep_emptied_rows(reread, saved)
        result["reloaded"] = _differences(reread.named_parameters(), _weights_file(job, reference, job.steps))
        shutil.rmtree(_output(job), ignore_errors=True)
    return result


@torch.no_grad()
def _keep_emptied_rows(reread: nn.Module, saved: str) -> None:
    """Give embeddings the row of padding that the checkpoint has: transformers empties it on loading some classes (Youtu), also
    where the table is the head's, too, and the row is trained."""
    for path, module in reread.named_modules():
        if (
            not isinstance(module, nn.Embedding)
            or module.padding_idx is None
            or module.weight[module.padding_idx].any()
        ):
            continue
        for file in Path(saved).glob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                if f"{path}.weight" in weights.keys():  # noqa: SIM118
                    module.weight[module.padding_idx] = weights.get_tensor(f"{path}.weight")[module.padding_idx].float()


def _looks_at(job: Job, differences: list[Differences], *, reference: str = "", keep: str = "") -> Look:
    """After each of `steps`: compares whole weights with those of another run, if named, and keeps them under a name.

    In half precision these are the masters, which no rounding hides.
    """

    def look(step: int, model: nn.Module, engine: Engine | None) -> None:
        if step > job.steps:
            return
        tensors = model.named_parameters() if engine is None else all_tensors(engine.sharded)
        weights: Iterable[tuple[str, torch.Tensor]] = ((name, tensor.detach().float()) for name, tensor in tensors)
        if keep:
            kept = {name: tensor.contiguous() for name, tensor in weights}
            save_file(kept, _weights_file(job, keep, step))
            weights = kept.items()
        if reference:
            differences.append(_differences(weights, _weights_file(job, reference, step)))

    return look


def routed_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters of each mixture of experts: the experts, their router and what else its module has; and the norms
    of its layer, since a norm's weight multiplies the columns of the router and the experts."""
    found = []
    for path in _experts(model):
        block = path.rpartition(".")[0]
        layer = block.rpartition(".")[0]
        beside = model.get_submodule(layer).named_children() if block else ()
        norms = [f"{layer}.{name}.".lstrip(".") for name, module in beside if _is_norm(module)]
        inside = (f"{block}.", *norms)
        found.append(tuple(name for name, _ in model.named_parameters() if name.startswith(inside)))
    return tuple(found)


def _experts(model: nn.Module) -> list[str]:
    """Paths of stacked experts, and of what a class calls experts (a dictionary of modules in Switch and NLLB)."""
    stacked = find_experts(model)
    return [path for path, _ in model.named_modules() if path in stacked or path.rpartition(".")[2] == "experts"]


def _is_norm(module: nn.Module) -> bool:
    return not any(module.children()) and all(weight.ndim == 1 for weight in module.parameters())


def _differences(weights: Iterable[tuple[str, torch.Tensor]], file: str) -> Differences:
    found: Differences = {}
    with safe_open(file, framework="pt") as expected:
        floor = _FLOOR * _rms([expected.get_tensor(name) for name in expected.keys()])  # noqa: SIM118
        for name, weight in weights:
            own, theirs = weight.detach().cpu().double(), expected.get_tensor(name).double()
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


def _outputs_file(job: Job, run: str) -> str:
    return str(Path(job.folder) / f"{run}_outputs.safetensors")


def _output(job: Job) -> str:
    return str(Path(job.folder) / "output")
