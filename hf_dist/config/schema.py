"""The typed configuration: frozen pydantic models with DeepSpeed's key names, one field per key the engine uses.

A field that the file may leave to TrainingArguments has "auto" in its type until `hf_dist.config.auto` resolves it.
Keys that are accepted without effect have no field; `support.py` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, PrivateAttr

from hf_dist.config import values
from hf_dist.config.findings import Note, place, respelled
from hf_dist.config.values import Auto

Dtype = Annotated[Literal["fp16", "bf16", "fp32"], PlainValidator(values.dtype)]
Flag = Annotated[bool, PlainValidator(values.flag)]
FlagOrAuto = Annotated[bool | Auto, PlainValidator(values.or_auto(values.flag))]
Names = Annotated[tuple[str, ...], PlainValidator(values.names)]
Real = Annotated[float, PlainValidator(values.real())]
RealOrAuto = Annotated[float | Auto, PlainValidator(values.or_auto(values.real()))]
Whole = Annotated[int, PlainValidator(values.whole())]
Count = Annotated[int, PlainValidator(values.whole(1))]
CountOrAuto = Annotated[int | Auto, PlainValidator(values.or_auto(values.whole(1)))]
NumelOrAuto = Annotated[int | Auto, PlainValidator(values.or_auto(values.whole(floor=True)))]
ShardSize = Annotated[int, PlainValidator(values.whole(-1))]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OptimizerConfig(_Frozen):
    """The `optimizer` section; without it the Trainer makes the optimizer."""

    type: str
    """`optimizer.type`: the class, e.g. "AdamW", in its usual letter case."""
    params: dict[str, Any] = {}
    """`optimizer.params`: arguments of the class; `lr`, `betas`, `eps` and `weight_decay` may be "auto"."""


class SchedulerConfig(_Frozen):
    """The `scheduler` section; without it the Trainer makes the schedule."""

    type: str
    """`scheduler.type`: "WarmupLR", "WarmupDecayLR", "WarmupCosineLR" or a class of torch.optim.lr_scheduler."""
    params: dict[str, Any] = {}
    """`scheduler.params`: arguments of the schedule; warm-up keys and `total_num_steps` (steps) may be "auto"."""


class Fp16Config(_Frozen):
    """The `fp16` section: half precision with a loss scale."""

    enabled: FlagOrAuto = False
    """`fp16.enabled`: whether weights and activations are fp16."""
    auto_cast: Flag = False
    """`fp16.auto_cast`: read, but floating-point inputs always follow the compute dtype."""
    loss_scale: Real = 0.0
    """`fp16.loss_scale`: fixed factor on the loss; 0 adapts it to overflows."""
    initial_scale_power: Whole = 16
    """`fp16.initial_scale_power`: the adaptive scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """`fp16.loss_scale_window`: steps without overflow before the scale doubles."""
    hysteresis: Count = 2
    """`fp16.hysteresis`: overflows before the scale halves."""
    consecutive_hysteresis: Flag = False
    """`fp16.consecutive_hysteresis`: whether a good step refills `hysteresis`."""
    min_loss_scale: Real = 1.0
    """`fp16.min_loss_scale`: factor below which the adaptive scale does not go."""


class Bf16Config(_Frozen):
    """The `bf16` section: bfloat16 weights and activations with fp32 master weights."""

    enabled: FlagOrAuto = False
    """`bf16.enabled`: whether weights and activations are bf16."""
    check_grad_overflow: Flag = True
    """`bf16.check_grad_overflow`: whether a step with inf or nan gradients is skipped."""


class DataTypesConfig(_Frozen):
    """The `data_types` section."""

    grad_accum_dtype: Dtype | None = None
    """`data_types.grad_accum_dtype`: dtype in which gradients add up; None is the dtype of the weights."""
    param_dtype: Dtype | None = None
    """`data_types.param_dtype`: dtype of the weights, which must agree with fp16/bf16; None follows them."""


class LeafModuleConfig(_Frozen):
    """The `zero_optimization.leaf_module` section: modules gathered as one, with all their children."""

    classes: Names = ()
    """`zero_optimization.leaf_module.classes`: class names."""
    names: Names = ()
    """`zero_optimization.leaf_module.names`: full module names."""
    name_suffixes: Names = ()
    """`zero_optimization.leaf_module.name_suffixes`: endings of module names."""


class ZeroConfig(_Frozen):
    """The `zero_optimization` section: what is sharded over the data ranks."""

    stage: Annotated[int, PlainValidator(lambda value: int(values.choice("0", "1", "2", "3")(_digit(value))))] = 0
    """`zero_optimization.stage`: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights."""
    reduce_bucket_size: NumelOrAuto = 500_000_000
    """`zero_optimization.reduce_bucket_size`: elements of gradient reductions in flight."""
    allgather_bucket_size: NumelOrAuto = 500_000_000
    """`zero_optimization.allgather_bucket_size`: elements of all-gathers in flight after a step at stage 1, 2."""
    overlap_comm: FlagOrAuto | None = None
    """`zero_optimization.overlap_comm`: whether reductions run beside backward; None is true at stage 3 only."""
    stage3_prefetch_bucket_size: NumelOrAuto = 50_000_000
    """`zero_optimization.stage3_prefetch_bucket_size`: elements gathered ahead of their use at stage 3."""
    stage3_param_persistence_threshold: NumelOrAuto = 100_000
    """`zero_optimization.stage3_param_persistence_threshold`: elements; read, small weights travel with their unit."""
    stage3_gather_16bit_weights_on_model_save: FlagOrAuto = False
    """`zero_optimization.stage3_gather_16bit_weights_on_model_save`: read, but full weights are always saved."""
    ignore_unused_parameters: Flag = True
    """`zero_optimization.ignore_unused_parameters`: false makes a weight without gradient an error."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """`zero_optimization.leaf_module`: modules gathered as one, with all their children."""
    mics_shard_size: ShardSize = -1
    """`zero_optimization.mics_shard_size`: ranks that share one copy of the model; -1 is all data ranks."""
    zero_hpz_partition_size: Count = 1
    """`zero_optimization.zero_hpz_partition_size`: ranks that share one copy of the model; 1 is all data ranks."""

    @property
    def shard_group_size(self) -> int | None:
        """Ranks that share one copy of the model, None when all data ranks do."""
        if self.mics_shard_size > 0:
            return self.mics_shard_size
        return self.zero_hpz_partition_size if self.zero_hpz_partition_size > 1 else None


class HfDistSection(_Frozen):
    """The `hf_dist` section: our own keys, ignored by other readers of the file."""

    strict: Flag = False
    """`hf_dist.strict`: whether a key without effect is an error instead of a note."""


@dataclass(frozen=True)
class Provenance:
    """Where the values of one config come from; rides on `DistConfig` without being part of the schema."""

    origin: str = ""
    """Absolute path or other name of the source; empty for a dict."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key by JSON path, as the user spelled it."""
    notes: tuple[Note, ...] = ()
    """Accepted keys that change nothing."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """JSON path -> "file", "auto <- X" or "absent <- X"; a missing path has its default."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Canonical JSON path of a key or section -> the alias the user wrote."""


class DistConfig(_Frozen):
    """The whole configuration; compare, copy and pickle it freely, it never changes."""

    train_batch_size: CountOrAuto | None = None
    """`train_batch_size`: samples per optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: CountOrAuto | None = None
    """`train_micro_batch_size_per_gpu`: samples per rank and forward."""
    gradient_accumulation_steps: CountOrAuto | None = None
    """`gradient_accumulation_steps`: forward and backward passes per optimizer step."""
    gradient_clipping: RealOrAuto | None = None
    """`gradient_clipping`: largest global L2 norm of the gradient, 0 for no limit; None, absent, until resolved."""
    communication_data_type: Dtype | None = None
    """`communication_data_type`: dtype of gradient reductions; None is the dtype of the weights."""
    prescale_gradients: Flag = False
    """`prescale_gradients`: read, but the mean is taken in either order."""
    gradient_predivide_factor: Real = 1.0
    """`gradient_predivide_factor`: read, but the mean is the same for every factor."""
    optimizer: OptimizerConfig | None = None
    """`optimizer`: None when the Trainer or the script makes it."""
    scheduler: SchedulerConfig | None = None
    """`scheduler`: None when the Trainer or the script makes it."""
    fp16: Fp16Config = Fp16Config()
    """`fp16`: half precision."""
    bf16: Bf16Config = Bf16Config()
    """`bf16`: bfloat16."""
    data_types: DataTypesConfig = DataTypesConfig()
    """`data_types`: dtypes of gradients and weights."""
    zero_optimization: ZeroConfig = ZeroConfig()
    """`zero_optimization`: what is sharded."""
    hf_dist: HfDistSection = HfDistSection()
    """`hf_dist`: our own keys."""

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
        """JSON path -> "file", "auto <- X" or "absent <- X" for every value that is not a default."""
        return self._provenance.sources

    @property
    def dtype(self) -> Literal["fp16", "bf16", "fp32"]:
        """Dtype of weights and activations of a resolved config."""
        if values.settled(self.fp16.enabled):
            return "fp16"
        return "bf16" if values.settled(self.bf16.enabled) else "fp32"

    def source_of(self, path: str) -> str:
        """Where the value at `path` comes from; "default" when nobody set it."""
        return self._provenance.sources.get(path, "default")

    def place_of(self, path: str) -> str:
        """`file:line` of the key, empty for a dict."""
        return place(self.origin, self.lines, self.spelled(path))

    def spelled(self, path: str) -> str:
        """The path as the user wrote it, when that is an alias."""
        return respelled(path, self._provenance.spelled)

    def value_at(self, path: str) -> Any:
        """The value of a JSON path, None where a section or a parameter is missing."""
        value: Any = self
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        return value

    def replaced(self, changes: Mapping[str, tuple[Any, str]], notes: tuple[Note, ...] = ()) -> DistConfig:
        """A copy with `changes` (JSON path -> value and its source) and further notes."""
        result: Any = self
        for path, (value, _) in changes.items():
            result = _with_value(result, path.split("."), value)
        sources = {**self.sources, **{path: source for path, (_, source) in changes.items()}}
        fresh = tuple(note for note in notes if note not in self.notes)
        old = self._provenance
        copy: DistConfig = result.model_copy()
        copy._provenance = Provenance(old.origin, old.lines, old.notes + fresh, sources, old.spelled)
        return copy


def _with_value(node: Any, path: list[str], value: Any) -> Any:
    head, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        return {**node, head: _with_value(node[head], rest, value) if rest else value}
    child = _with_value(getattr(node, head), rest, value) if rest else value
    return node.model_copy(update={head: child})


def _digit(value: Any) -> Any:
    """`3`, `3.0` and `"3"` as "3"; anything else unchanged, for the message."""
    return (
        str(int(value))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
        else value
    )
