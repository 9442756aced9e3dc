"""Real configs resolve to what DeepSpeed itself makes of them; runs where the deepspeed package and the corpus are."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_dist.config import AutoSources, DistConfig, load_config, read_config, resolve
from hf_dist.config.values import is_auto
from hf_dist.errors import ConfigError

pytest.importorskip("deepspeed")
CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
FILES = sorted(CORPUS.glob("*.json"))
pytestmark = pytest.mark.skipif(not FILES, reason="the corpus is not here")

HIDDEN, NUM_STEPS, WARMUP = 64, 5000, 10
OFFLOADS = ("offload_optimizer", "offload_param")


def value_at(data: Any, path: str) -> Any:
    """The value of a JSON path in plain data, None where it is missing or "auto"."""
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return None if is_auto(data) else data


@dataclass
class Arguments:
    """TrainingArguments that agree with every number of one file."""

    data: dict[str, Any]

    def __post_init__(self) -> None:
        train, micro, steps = (
            value_at(self.data, f"{key}")
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        self.steps = int(steps or 1)
        self.micro = int(micro or max(1, int(train or 8) // self.steps))
        whole = self.micro * self.steps
        self.world = max(1, int(train) // whole) if train else 1

    def sources(self) -> AutoSources:
        """The same for us."""
        get = lambda path, other: other if (value := value_at(self.data, path)) is None else value  # noqa: E731
        beta1, beta2 = get("optimizer.params.betas", (0.9, 0.999))
        clip = get("gradient_clipping", 1.0)
        return AutoSources(
            data_world_size=self.world,
            per_device_train_batch_size=self.micro,
            gradient_accumulation_steps=self.steps,
            max_grad_norm=float(clip),
            learning_rate=float(get("optimizer.params.lr", get("scheduler.params.warmup_max_lr", 5e-5))),
            adam_beta1=float(beta1),
            adam_beta2=float(beta2),
            adam_epsilon=float(get("optimizer.params.eps", 1e-8)),
            weight_decay=float(get("optimizer.params.weight_decay", 0.0)),
            fp16=False,
            bf16=False,
            warmup_steps=max(1, int(get("scheduler.params.warmup_num_steps", WARMUP))),
            num_training_steps=int(get("scheduler.params.total_num_steps", NUM_STEPS)),
            hidden_size=HIDDEN,
        )


def filled(data: dict[str, Any], config: DistConfig, sources: AutoSources) -> dict[str, Any]:
    """The file as Hugging Face hands it to DeepSpeed: "auto" filled by the table of its documentation."""
    known = {
        "train_batch_size": config.train_batch_size,
        "train_micro_batch_size_per_gpu": sources.per_device_train_batch_size,
        "gradient_accumulation_steps": sources.gradient_accumulation_steps,
        "gradient_clipping": sources.max_grad_norm,
        "lr": sources.learning_rate,
        "betas": sources.adam_betas,
        "eps": sources.adam_epsilon,
        "weight_decay": sources.weight_decay,
        "warmup_min_lr": 0,
        "warmup_max_lr": sources.learning_rate,
        "warmup_num_steps": sources.warmup_steps,
        "total_num_steps": sources.num_training_steps,
        "enabled": False,
        "reduce_bucket_size": HIDDEN * HIDDEN,
        "stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
        "stage3_param_persistence_threshold": 10 * HIDDEN,
    }

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: known.get(k, v) if is_auto(v) else fill(v) for k, v in node.items()}
        return node

    result = fill(copy.deepcopy(data))
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(result):
        result["train_micro_batch_size_per_gpu"] = sources.per_device_train_batch_size
    result.setdefault("gradient_accumulation_steps", sources.gradient_accumulation_steps)  # accelerate does
    return dict(result)


def deepspeed_values(data: dict[str, Any], world: int) -> dict[str, Any]:
    """What DeepSpeed reads."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return world

    read = DeepSpeedConfig(copy.deepcopy(data), mpu=Ranks())
    zero = read.zero_config
    return {
        "batch": (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps),
        "stage": int(zero.stage),
        "precision": "fp16" if read.float16_config.enabled else "bf16" if read.bfloat16_config.enabled else "fp32",
        "optimizer": (read.optimizer_name or "").lower(),
        "optimizer params": read.optimizer_params or {},
        "scheduler": read.scheduler_name or "",
        "scheduler params": read.scheduler_params or {},
        **{
            name: str(getattr(section.device, "value", section.device)) if section else "none"
            for name, section in zip(OFFLOADS, (zero.offload_optimizer, zero.offload_param), strict=True)
        },
        "bucket": zero.reduce_bucket_size,
        "overlap": zero.overlap_comm,
        "clip": read.gradient_clipping if "gradient_clipping" in data else None,
        "scale": (read.float16_config.loss_scale, read.float16_config.initial_scale_power)
        if read.float16_config.enabled
        else None,
    }


def our_values(config: DistConfig, data: dict[str, Any]) -> dict[str, Any]:
    """What we read."""
    zero = config.zero_optimization
    return {
        "batch": (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps),
        "stage": zero.stage,
        "precision": config.dtype,
        "optimizer": config.optimizer.type.lower() if config.optimizer else "",
        "optimizer params": config.optimizer.params if config.optimizer else {},
        "scheduler": config.scheduler.type if config.scheduler else "",
        "scheduler params": config.scheduler.params if config.scheduler else {},
        "offload_optimizer": zero.offload_optimizer.device,
        "offload_param": zero.offload_param.device,
        "bucket": zero.reduce_bucket_size,
        "overlap": zero.overlap_comm,
        "clip": config.gradient_clipping if "gradient_clipping" in data else None,
        "scale": (config.fp16.loss_scale, config.fp16.initial_scale_power) if config.dtype == "fp16" else None,
    }


def plain(value: Any) -> Any:
    """Numbers as floats and tuples as lists, so that 0 equals 0.0 and "1e-4" equals 1e-4."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def test_real_configs_resolve_as_in_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import config as theirs_module

    monkeypatch.setattr(theirs_module.dist, "get_rank", lambda: 0)  # without it DeepSpeed takes itself for one process
    compared = 0
    refused_there: list[str] = []
    different: list[str] = []
    for path in FILES:
        data = read_config(path).data
        try:
            loaded = load_config(path)
        except ConfigError:
            continue
        arguments = Arguments(data)
        sources = arguments.sources()
        try:
            config = resolve(loaded, sources, final=True)
        except ConfigError as error:
            different.append(f"{path.name}: {error}")
            continue
        try:
            theirs = deepspeed_values(filled(data, config, sources), arguments.world)
        except Exception as error:
            refused_there.append(f"{path.name}: {str(error).splitlines()[0][:100]}")
            continue
        compared += 1
        ours = our_values(config, data)
        for name, value in theirs.items():
            if name.endswith("params"):
                noted = {note.path.rpartition(".")[2] for note in config.notes if note.kind == "idle"}
                value = {k: v for k, v in value.items() if k in ours[name] or k not in noted}
            if plain(value) != plain(ours[name]):
                different.append(f"{path.name}: {name}: DeepSpeed {json.dumps(value)}, here {json.dumps(ours[name])}")
    print(f"compared {compared}, refused by DeepSpeed and read here {len(refused_there)}", *refused_there, sep="\n  ")
    assert not different, "\n".join(different)
    assert compared >= 180
