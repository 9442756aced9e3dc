"""The typed configuration: `DistConfig`, its sections (`sections.py`), and the source of each value."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, PrivateAttr
from pydantic.fields import FieldInfo

from hf_dist.config import values
from hf_dist.config.findings import Note, at_line, respelled
from hf_dist.config.sections import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    CheckpointConfig,
    CommsLoggerConfig,
    CompileConfig,
    Count,
    CountOrAuto,
    CsvMonitorConfig,
    DataTypesConfig,
    Dtype,
    ExpertParallelConfig,
    Flag,
    Fp16Config,
    Frozen,
    HfDistSection,
    OptimizerConfig,
    PipelineConfig,
    RealOrAuto,
    SchedulerConfig,
    TensorboardConfig,
    TensorParallelConfig,
    TorchAutocastConfig,
    WandbConfig,
    ZeroConfig,
)
from hf_dist.config.training_sections import (
    CurriculumConfig,
    ElasticityConfig,
    FlopsProfilerConfig,
    LayerDropConfig,
    LocalSgdConfig,
)


@dataclass(frozen=True)
class Provenance:
    """Where the values of one config come from. Stored with `DistConfig`, but not part of the schema."""

    origin: str = ""
    """Absolute path or other name of the source; empty for a dict."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key, by JSON path as the user spelled it."""
    notes: tuple[Note, ...] = ()
    """Accepted keys that change nothing."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """JSON path -> "file", "launcher <- X", "layout <- X", "auto <- X", "absent <- X"; without a path: its default."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Canonical JSON path of a key or section -> the alias that the user wrote."""


class DistConfig(Frozen):
    """The whole configuration. It never changes, so compare, copy and pickle it freely."""

    train_batch_size: CountOrAuto | None = None
    """`train_batch_size`: samples per optimizer step over all data ranks."""
    train_micro_batch_size_per_gpu: CountOrAuto | None = None
    """`train_micro_batch_size_per_gpu`: samples per data rank and forward."""
    gradient_accumulation_steps: CountOrAuto | None = None
    """`gradient_accumulation_steps`: forward and backward passes per optimizer step."""
    gradient_clipping: RealOrAuto | None = None
    """`gradient_clipping`: largest global L2 norm of the gradient; 0 for no limit; None until the Trainer's value is known."""
    dump_state: Flag = False
    """`dump_state`: whether the start-up report is printed whole; without it, ten lines for a plain job."""
    communication_data_type: Dtype | None = None
    """`communication_data_type`: dtype of gradient reductions; None is fp32."""
    sequence_parallel_size: Count = 1
    """`sequence_parallel_size`: neighbouring ranks that read the same rows and each compute a part of every sequence."""
    optimizer: OptimizerConfig | None = None
    """`optimizer`: the optimizer; without this section the Trainer or the script creates it."""
    scheduler: SchedulerConfig | None = None
    """`scheduler`: the learning rate's schedule; without this section the Trainer or the script creates it."""
    fp16: Fp16Config = Fp16Config()
    """`fp16`: half precision."""
    bf16: Bf16Config = Bf16Config()
    """`bf16`: bfloat16."""
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    """`torch_autocast`: torch.autocast around forward."""
    data_types: DataTypesConfig = DataTypesConfig()
    """`data_types`: dtypes of gradients and weights."""
    zero_optimization: ZeroConfig = ZeroConfig()
    """`zero_optimization`: what is sharded."""
    aio: AioConfig = AioConfig()
    """`aio`: how files are read and written for device "nvme"."""
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """`activation_checkpointing`: recomputation and offload of activations."""
    pipeline: PipelineConfig = PipelineConfig()
    """`pipeline`: layers divided over groups of ranks."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """`tensor_parallel`: matrices split over neighbouring ranks."""
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    """`expert_parallel`: experts spread over ranks."""
    local_sgd: LocalSgdConfig = LocalSgdConfig()
    """`local_sgd`: replicas that train alone between meetings."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """`tensorboard`: the training log in TensorBoard."""
    wandb: WandbConfig = WandbConfig()
    """`wandb`: the training log in Weights & Biases."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """`csv_monitor`: the training log in CSV files."""
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """`comms_logger`: a table of the communication."""
    compile: CompileConfig = CompileConfig()
    """`compile`: torch.compile of blocks."""
    elasticity: ElasticityConfig = ElasticityConfig()
    """`elasticity`: one global batch for many numbers of ranks."""
    curriculum_learning: CurriculumConfig = CurriculumConfig()
    """`curriculum_learning`: batches whose length grows."""
    progressive_layer_drop: LayerDropConfig = LayerDropConfig()
    """`progressive_layer_drop`: blocks that are skipped in a step."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """`flops_profiler`: a table of one forward, module by module."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """`checkpoint`: how training state and weights are written."""
    hf_dist: HfDistSection = HfDistSection()
    """`hf_dist`: keys of hf_dist itself."""

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @property
    def origin(self) -> str:
        """Absolute path or other name of the source; empty for a dict."""
        return self._provenance.origin

    @property
    def lines(self) -> Mapping[str, int]:
        """Line of each key by JSON path."""
        return self._provenance.lines

    @property
    def notes(self) -> tuple[Note, ...]:
        """Accepted keys that change nothing."""
        return self._provenance.notes

    @property
    def sources(self) -> Mapping[str, str]:
        """JSON path -> "file", "launcher <- X", "layout <- X", "auto <- X", "absent <- X", for values that are no defaults."""
        return self._provenance.sources

    @property
    def dtype(self) -> Literal["fp16", "bf16", "fp32"]:
        """Dtype of weights and activations of a resolved config."""
        if values.settled(self.fp16.enabled):
            return "fp16"
        return "bf16" if values.settled(self.bf16.enabled) else "fp32"

    @property
    def shard_group_size(self) -> int | None:
        """Ranks that share one copy of the sharded states; None if all ranks with the same layers do.

        `mics_shard_size` is read at stage 3 only, as in DeepSpeed, unless the optimizer is sharded over all copies
        (`hf_dist.optimizer_over`) or replicas train alone (`local_sgd`). Then, if nothing is sharded, each rank is one replica.
        """
        zero = self.zero_optimization
        over_all = self.hf_dist.optimizer_over == "all" and zero.stage > 0
        if zero.stage != 3 and not over_all and not self.local_sgd.enabled:
            return None
        if zero.mics_shard_size > 0:
            return zero.mics_shard_size
        return 1 if zero.stage == 0 and self.local_sgd.enabled else None

    def source_of(self, path: str) -> str:
        """The source of the value at `path`; "default" if it was not set."""
        return self._provenance.sources.get(path, "default")

    def at_line(self, path: str) -> str:
        """`file:line` of the key; empty for a dict."""
        return at_line(self.origin, self.lines, self.spelled(path))

    def spelled(self, path: str) -> str:
        """The path as the user wrote it, if that is an alias."""
        return respelled(path, self._provenance.spelled)

    def value_at(self, path: str) -> Any:
        """The value at a JSON path; None if a section or a parameter is missing."""
        value: object = self
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        return value

    def replaced(self, changes: Mapping[str, tuple[object, str]], notes: tuple[Note, ...] = ()) -> DistConfig:
        """A copy with `changes` (JSON path -> value and its source) and additional notes."""
        result: Any = self
        for path, (value, _) in changes.items():
            result = _with_value(result, path.split("."), value)
        sources = {**self.sources, **{path: source for path, (_, source) in changes.items()}}
        fresh = tuple(note for note in notes if note not in self.notes)
        return self._as(result, sources, self.notes + fresh)

    def without(self, *paths: str) -> DistConfig:
        """A copy as if the file did not have these sections or arguments: nothing of them is left to be filled or compared.

        `paths`: `optimizer`, `scheduler`, or one of their arguments, such as `optimizer.params.lr`.
        """

        def is_gone(path: str) -> bool:
            return any(path == gone or path.startswith(f"{gone}.") for gone in paths)

        result: Any = self
        for path in paths:
            result = _without(result, path.split("."))
        sources = {path: source for path, source in self.sources.items() if not is_gone(path)}
        return self._as(result, sources, self.notes)

    def _as(self, result: DistConfig, sources: Mapping[str, str], notes: tuple[Note, ...]) -> DistConfig:
        """A copy of `result` that comes from where `self` does."""
        old = self._provenance
        copy = result.model_copy()
        copy._provenance = Provenance(old.origin, old.lines, notes, sources, old.spelled)
        return copy


def _with_value(node: Any, path: list[str], value: object) -> object:
    head, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        return {**node, head: _with_value(node[head], rest, value) if rest else value}
    child = _with_value(getattr(node, head), rest, value) if rest else value
    return node.model_copy(update={head: child})


def _without(node: Any, path: list[str]) -> object:
    head, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        return {key: value for key, value in node.items() if key != head}
    return node.model_copy(update={head: _without(getattr(node, head), rest) if rest else None})


def fields() -> Mapping[str, FieldInfo]:
    """JSON path -> field, for sections and for their keys."""
    return dict(_fields(DistConfig, ""))


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section; None for a key."""
    kinds = (info.annotation, *typing.get_args(info.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        section = section_of(info)
        if section is not None:
            yield from _fields(section, f"{prefix}{name}.")
