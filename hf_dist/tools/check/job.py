"""What a check runs: the user's model (perhaps with fewer layers), their config without "auto", and the microbatches."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_dist.config import DistConfig, axes_of, load_config, read_config
from hf_dist.config.roles import asking_role, roles_of
from hf_dist.config.values import is_auto
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.hf.model_class import (
    architecture_of,
    keep_layers,
    model_class,
    model_config,
    new_model,
    without_dropout,
    without_dropout_modules,
)
from hf_dist.model_config import field, text_config
from hf_dist.parallel.experts.router_loss import has_coefficient
from hf_dist.tools.check.data import microbatches
from hf_dist.tools.check.eights import eights_of
from hf_dist.tools.check.encoded import Encoding, encoding_of

__all__ = ["Asked", "Job", "prepare"]

LEARNING_RATE = 1e-3
EPS = 1e-3
"""Least eps for Adam and similar: where a gradient is zero in theory, a smaller eps turns rounding into full steps."""
_SAME_PRECISION = (
    "bf16",
    "fp16",
    "communication_data_type",
    "data_types",
    "gradient_clipping",
    "activation_checkpointing",
)
"""Sections that do not affect the layout; one process keeps them."""


@dataclass(frozen=True)
class Asked:
    """The options of `hf-dist check`."""

    model: str
    """A folder or a hub ID."""
    config: Path
    world: int
    steps: int = 5
    num_layers: int | None = None
    class_name: str | None = None
    """`module:Class`, or None for the class that config.json names."""
    data: Path | None = None
    seq: int = 64
    """Tokens per row."""


@dataclass(frozen=True)
class Job:
    """What every process of the check receives; plain data."""

    folder: str
    """Holds the model (`model/`), the microbatches (`batches.pt`), and the weights of one process after each step."""
    class_name: str
    layout: dict[str, Any]
    """The user's config with numbers instead of "auto"."""
    alone: dict[str, object]
    """The config for the same precision in one process."""
    optimizer: str
    optimizer_params: dict[str, object]
    steps: int
    data_ranks: int
    accumulation: int
    encoding: Encoding | None = None
    """Which messages are encoded, if some are."""
    said: tuple[str, ...] = ()
    """What was changed in the user's config or model, and why."""

    @property
    def clip(self) -> float:
        """The largest norm of a step's gradient."""
        return float(self.layout["gradient_clipping"])

    @property
    def window(self) -> int:
        """Microbatches per step, over all data ranks; microbatch i of data rank r has index `i * data_ranks + r`."""
        return self.data_ranks * self.accumulation

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16."""
        return next((name for name in ("bf16", "fp16") if self.layout.get(name, {}).get("enabled")), "fp32")

    @property
    def eights(self) -> bool:
        """Whether linear layers multiply in float8."""
        return "hf_dist" in self.alone

    def make_model(self) -> nn.Module:
        """The same model on every call: weights of the folder, in fp32, in training mode, without dropout."""
        cls: Any = model_class(self.class_name)
        model: nn.Module = cls.from_pretrained(f"{self.folder}/model", dtype=torch.float32)
        without_dropout_modules(model)
        for module in _normalisations(model):
            module.eval()
            module.train = types.MethodType(_stay, module)  # type: ignore[method-assign]
        return model.train()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The config's optimizer, or AdamW as the Trainer's default."""
        from hf_dist.optim.build import optimizer_for

        return optimizer_for(model, self.optimizer, self.optimizer_params)

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """All microbatches: those of `steps` + 1 steps."""
        loaded: list[dict[str, torch.Tensor]] = torch.load(f"{self.folder}/batches.pt", weights_only=True)
        return loaded


def prepare(asked: Asked, folder: Path) -> Job:
    """Write the model and the microbatches into `folder`. Call it in one process, before any rank starts."""
    read = load_config(asked.config)
    data_ranks = axes_of(read, asked.world).size("data")
    micro, accumulation = _batch(read, data_ranks)
    model, class_name = _model(asked)
    said = []
    if _normalisations(model):
        said.append(
            "batch normalisations have fixed statistics: those of a batch depend on which rows are in it, so that any number "
            "of data ranks or microbatches trains another model than one batch"
        )
    if accumulation > 1 and _routers_have_a_loss(model):
        said.append(
            f"1 microbatch a step, not {accumulation}: the routers' loss is a product of means over the rows of a microbatch "
            "(of all ranks), so that accumulation trains another model than one batch, in one process as well"
        )
        accumulation = 1
    window = data_ranks * accumulation
    batches = microbatches(
        model,
        rows=micro,
        count=window * (asked.steps + 1),
        seq=asked.seq,
        path=asked.data,
        tokenizer=asked.model,
        ragged=True,
    )
    model.save_pretrained(folder / "model")  # type: ignore[operator]
    torch.save(batches, folder / "batches.pt")
    layout, left_out = _without_roles(_plain(read, read_config(asked.config).data, micro, accumulation), asked.config)
    said += left_out
    layout, eights = eights_of(layout, model)
    encoding, layout, changed = encoding_of(layout, model, asked.world)
    said += [*eights, *changed]
    optimizer, params = _optimizer(read)
    alone = {key: layout[key] for key in _SAME_PRECISION if key in layout}
    alone["zero_optimization"] = {"stage": 0}
    if eights:
        alone["hf_dist"] = {"fp8": layout["hf_dist"]["fp8"]}
    job = Job(
        folder=str(folder),
        class_name=class_name,
        layout=layout,
        alone=alone,
        optimizer=optimizer,
        optimizer_params=params,
        steps=asked.steps,
        data_ranks=data_ranks,
        accumulation=accumulation,
        said=tuple(said),
    )
    return replace(job, encoding=encoding)


def _without_roles(layout: dict[str, Any], config: Path) -> tuple[dict[str, Any], list[str]]:
    """The trainer's own layout, and what is to be said of it. Raises `ConfigError` for a file in which no role trains."""
    roles = roles_of(layout.get("hf_dist", {}).get("roles", {}))
    if not roles:
        return layout, []
    if not asking_role(roles):
        what = "serve other jobs, and none of them trains"
        raise ConfigError(Problem("hf_dist.roles", ", ".join(roles), what, f"Check the config of a role of {config}."))
    own = {key: value for key, value in layout["hf_dist"].items() if key != "roles"}
    others = ", ".join(name for name, role in roles.items() if not role.asks)
    return {**layout, "hf_dist": own}, [f"the layout of the trainer alone, on all ranks, without {others}"]


def _normalisations(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of a module's `train`."""
    return module


def _routers_have_a_loss(model: nn.Module) -> bool:
    """Whether HF adds one to the loss: a config has a coefficient, and asks for the routers' logits."""
    config: object = model.config
    return has_coefficient(config) and bool(field(text_config(config), "output_router_logits"))


def _batch(read: DistConfig, data_ranks: int) -> tuple[int, int]:
    def number(path: str) -> int | None:
        value = read.value_at(path)
        return value if isinstance(value, int) else None

    total, steps = number("train_batch_size"), number("gradient_accumulation_steps")
    own = number("train_micro_batch_size_per_gpu")
    if own is None and total is not None:
        own = max(1, total // (data_ranks * (steps or 1)))
    own = own or 2
    if steps is None:
        steps = max(1, total // (own * data_ranks)) if total else 2 * read.pipeline.stages
    return own, steps


def _model(asked: Asked) -> tuple[nn.Module, str]:
    config = model_config(asked.model)
    name = asked.class_name or architecture_of(config) or "AutoModelForCausalLM"
    cls: Any = model_class(name)
    shrunk = asked.num_layers is not None and keep_layers(config, asked.num_layers)
    without_dropout(config)
    has_weights = any(Path(asked.model).glob("*.safetensors")) or not Path(asked.model).is_dir()
    torch.manual_seed(0)
    try:
        if has_weights and not shrunk:
            return cls.from_pretrained(asked.model, config=config, dtype=torch.float32), name
        model = new_model(name, config)
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"--model {asked.model}: {name} cannot be created: {error}") from error
    with torch.no_grad():
        for p in model.parameters():  # a relative comparison needs nonzero weights
            if not p.any():
                p.normal_(std=0.02)
    return model.float(), name if not name.startswith("Auto") else type(model).__name__


def _plain(read: DistConfig, data: Mapping[str, object], micro: int, accumulation: int) -> dict[str, object]:
    """The user's file for `initialize`: numbers for the batch, the Trainer's defaults for "auto", no optimizer section."""
    plain: dict[str, Any] = json.loads(json.dumps(data))
    for key in ("train_batch_size", "optimizer", "scheduler", "$schema", "tensorboard", "wandb", "csv_monitor"):
        plain.pop(key, None)
    plain.pop("local_sgd", None)  # replicas that train alone do not equal one process; only their layout is checked
    plain["train_micro_batch_size_per_gpu"], plain["gradient_accumulation_steps"] = micro, accumulation
    clip = read.gradient_clipping
    plain["gradient_clipping"] = 1.0 if clip is None or is_auto(clip) else clip
    for key in ("bf16", "fp16"):
        if key in plain and is_auto(plain[key].get("enabled")):
            plain[key]["enabled"] = key == "bf16" and read.hf_dist.fp8.enabled  # as --fp8 would
    plain["hf_dist"] = {**plain.get("hf_dist", {}), "save_on_signal": False}
    if is_auto(plain["hf_dist"].get("tiled_loss", "auto")):
        plain["hf_dist"]["tiled_loss"] = True  # as in the Trainer
    return plain


def _optimizer(read: DistConfig) -> tuple[str, dict[str, object]]:
    section = read.optimizer
    if section is None:
        return "AdamW", {"lr": LEARNING_RATE, "eps": EPS}
    params = {key: value for key, value in section.params.items() if not is_auto(value)}
    rate = params.get("lr", 0.0)
    params["lr"] = max(rate, LEARNING_RATE) if isinstance(rate, float) and math.isfinite(rate) else LEARNING_RATE
    if section.type == "Adafactor" and params.get("relative_step", True):
        del params["lr"]  # this optimizer has none
    if section.type == "Muon":  # bf16 turns a last-bit difference into a percent, which looks like a fault
        params["ns_dtype"] = "fp32"
    if "adam" in section.type.lower() or section.type in ("Muon", "Lamb"):
        params["eps"] = max(float(params.get("eps", 0.0)), EPS)
    return section.type, params
