"""One frozen model per section of the file, with a field, a default and a sentence for each key the engine uses.

If the file may leave a field to TrainingArguments, its type includes "auto" until `hf_dist.config.auto` resolves it.
Keys that are accepted without effect have no field; `support.py` lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator

from hf_dist.config import dtypes, values
from hf_dist.config.roles import plain_roles
from hf_dist.config.values import Auto

Dtype = Annotated[Literal["fp16", "bf16", "fp32"], PlainValidator(dtypes.dtype)]
AutocastDtype = Annotated[Literal["bf16"], PlainValidator(dtypes.autocast_dtype)]
Flag = Annotated[bool, PlainValidator(values.flag)]
FlagOrAuto = Annotated[bool | Auto, PlainValidator(values.or_auto(values.flag))]
Names = Annotated[tuple[str, ...], PlainValidator(values.names)]
Text = Annotated[str, PlainValidator(values.text)]
Label = Annotated[str, PlainValidator(values.label)]
Real = Annotated[float, PlainValidator(values.real())]
RealOrAuto = Annotated[float | Auto, PlainValidator(values.or_auto(values.real()))]
Whole = Annotated[int, PlainValidator(values.whole())]
Count = Annotated[int, PlainValidator(values.whole(1))]
CountOrAuto = Annotated[int | Auto, PlainValidator(values.or_auto(values.whole(1)))]
NumelOrAuto = Annotated[int | Auto, PlainValidator(values.or_auto(values.whole(floor=True)))]
Address = Annotated[str | int, PlainValidator(values.address)]
FileSize = Annotated[str | int, PlainValidator(values.file_size)]
MemoryBudget = Annotated[str | int, PlainValidator(values.memory_budget)]
Device = Annotated[Literal["none", "cpu", "nvme"], PlainValidator(values.device)]
Share = Annotated[float, PlainValidator(values.real(most=1.0))]
Stages = Annotated[int, PlainValidator(values.stages)]
Degree = Annotated[int, PlainValidator(values.degree)]
Partition = Annotated[str | tuple[int, ...], PlainValidator(values.partition)]
SequenceExchange = Annotated[str | tuple[int, int], PlainValidator(values.sequence_exchange)]
Schedule = Annotated[
    Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"],
    PlainValidator(values.choice("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")),
]
Steps = Annotated[tuple[int, int], PlainValidator(values.steps)]
Wholes = Annotated[tuple[int, ...], PlainValidator(values.as_tuple(values.wholes()))]
Stage = Annotated[Literal[0, 1, 2, 3], PlainValidator(values.needed(values.stage))]
OptimizerScope = Annotated[Literal["shard", "all"], PlainValidator(values.choice("shard", "all"))]
RouterLossScope = Annotated[Literal["global", "local"], PlainValidator(values.choice("global", "local"))]
Roles = Annotated[dict[str, Any], PlainValidator(plain_roles)]
WireCodec = Annotated[Literal["int8", "int4", "fp8_e4m3"], PlainValidator(values.choice("int8", "int4", "fp8_e4m3"))]
GradientWire = Annotated[
    Literal["int8", "int4", "fp8_e4m3", "powersgd"],
    PlainValidator(values.choice("int8", "int4", "fp8_e4m3", "powersgd")),
]
SecondCopy = Annotated[Literal["encoded", "whole"], PlainValidator(values.choice("encoded", "whole"))]
Block = Annotated[int, PlainValidator(values.block)]
Fp8Casts = Annotated[Literal["window", "use"], PlainValidator(values.choice("window", "use"))]
Fp8Gathers = Annotated[Literal["float8", "whole"], PlainValidator(values.choice("float8", "whole"))]
Fp8Recipe = Annotated[
    Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"],
    PlainValidator(values.choice("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")),
]
ShardSize = Annotated[int, PlainValidator(values.whole(-1))]


class Frozen(BaseModel):
    """A section. Unknown fields are refused, values never change, and the sentence under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class OptimizerConfig(Frozen):
    """The `optimizer` section; without it the Trainer creates the optimizer."""

    type: str
    """`optimizer.type`: the class, e.g. "AdamW", in its usual letter case."""
    params: dict[str, Any] = {}
    """`optimizer.params`: arguments of the class; `lr`, `betas`, `eps` and `weight_decay` may be "auto"."""


class SchedulerConfig(Frozen):
    """The `scheduler` section; without it the Trainer creates the schedule."""

    type: str
    """`scheduler.type`: "WarmupLR", "WarmupDecayLR", "WarmupCosineLR" or a class of torch.optim.lr_scheduler."""
    params: dict[str, Any] = {}
    """`scheduler.params`: arguments of the schedule; warm-up keys and `total_num_steps` (steps) may be "auto"."""


class Fp16Config(Frozen):
    """The `fp16` section: half precision with a loss scale."""

    enabled: FlagOrAuto = False
    """`fp16.enabled`: whether weights and activations are fp16."""
    loss_scale: Real = 0.0
    """`fp16.loss_scale`: fixed factor on the loss; 0 adapts it to overflows."""
    initial_scale_power: Whole = 16
    """`fp16.initial_scale_power`: the adaptive scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """`fp16.loss_scale_window`: steps in a row without an overflow after which the adaptive scale doubles."""
    hysteresis: Count = 2
    """`fp16.hysteresis`: overflows before the scale halves."""
    consecutive_hysteresis: Flag = False
    """`fp16.consecutive_hysteresis`: whether a good step refills `hysteresis`."""
    min_loss_scale: Real = 1.0
    """`fp16.min_loss_scale`: lower limit of the adaptive scale."""


class Bf16Config(Frozen):
    """The `bf16` section: bfloat16 weights and activations with fp32 master weights."""

    enabled: FlagOrAuto = False
    """`bf16.enabled`: whether weights and activations are bf16."""
    check_grad_overflow: Flag = True
    """`bf16.check_grad_overflow`: whether a step with inf or nan gradients is skipped."""
    bf16_optimizer_states: Flag = False
    """`bf16.bf16_optimizer_states`: whether optimizer states are stored in bf16; the step computes in fp32."""
    bf16_master_weights_and_grads: Flag = False
    """`bf16.bf16_master_weights_and_grads`: whether to keep no fp32 master weights and to sum gradients in bf16."""


class TorchAutocastConfig(Frozen):
    """The `torch_autocast` section: `torch.autocast` around forward, like `bf16=True` in the stock Trainer."""

    enabled: Flag = False
    """`torch_autocast.enabled`: whether operators cast inputs by torch's rules; weights stay fp32 unless `bf16` is on."""
    dtype: AutocastDtype = "bf16"
    """`torch_autocast.dtype`: the dtype to cast to; only "bfloat16" is available."""


class DataTypesConfig(Frozen):
    """The `data_types` section."""

    grad_accum_dtype: Dtype | None = None
    """`data_types.grad_accum_dtype`: dtype in which gradients are summed; None is fp32."""
    param_dtype: Dtype | None = None
    """`data_types.param_dtype`: dtype of the weights, which must agree with fp16/bf16; None follows them."""


class LeafModuleConfig(Frozen):
    """The `zero_optimization.leaf_module` section: modules gathered as one unit with all their children."""

    classes: Names = ()
    """`zero_optimization.leaf_module.classes`: class names."""
    names: Names = ()
    """`zero_optimization.leaf_module.names`: full module names."""
    name_suffixes: Names = ()
    """`zero_optimization.leaf_module.name_suffixes`: endings of module names."""


class OffloadOptimizerConfig(Frozen):
    """The `zero_optimization.offload_optimizer` section: where optimizer state and master weights are stored and stepped."""

    device: Device = "none"
    """`zero_optimization.offload_optimizer.device`: "none", "cpu" or "nvme"."""
    nvme_path: Text | None = None
    """`zero_optimization.offload_optimizer.nvme_path`: folder on the disk, for device "nvme"."""
    buffer_count: Count = 4
    """`zero_optimization.offload_optimizer.buffer_count`: most parameter groups whose state is in memory at the same time."""
    pin_memory: Flag = True
    """`zero_optimization.offload_optimizer.pin_memory`: whether host memory is page-locked."""
    ratio: Share = 1.0
    """`zero_optimization.offload_optimizer.ratio`: share of the elements whose state is offloaded, 0 to 1."""
    pipeline_read: Flag = False
    """`zero_optimization.offload_optimizer.pipeline_read`: whether reads overlap the step, for device "nvme"."""
    pipeline_write: Flag = False
    """`zero_optimization.offload_optimizer.pipeline_write`: whether writes overlap the step, for device "nvme"."""


class OffloadParamConfig(Frozen):
    """The `zero_optimization.offload_param` section: where the weight shards are stored at stage 3."""

    device: Device = "none"
    """`zero_optimization.offload_param.device`: "none", "cpu" or "nvme"."""
    nvme_path: Text | None = None
    """`zero_optimization.offload_param.nvme_path`: folder on the disk, for device "nvme"."""
    buffer_count: Count = 5
    """`zero_optimization.offload_param.buffer_count`: buffers in host memory, for device "nvme"."""
    buffer_size: NumelOrAuto = 100_000_000
    """`zero_optimization.offload_param.buffer_size`: elements of a buffer; with all buffers, the amount that is read ahead."""
    max_in_cpu: NumelOrAuto = 1_000_000_000
    """`zero_optimization.offload_param.max_in_cpu`: elements kept in host memory, for device "nvme"."""
    pin_memory: Flag = True
    """`zero_optimization.offload_param.pin_memory`: whether host memory is page-locked."""


class ZeroConfig(Frozen):
    """The `zero_optimization` section: what is sharded over the data ranks."""

    stage: Stage = 0
    """`zero_optimization.stage`: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    reduce_bucket_size: NumelOrAuto = 500_000_000
    """`zero_optimization.reduce_bucket_size`: elements of gradient reductions that may be in flight."""
    allgather_bucket_size: NumelOrAuto = 500_000_000
    """`zero_optimization.allgather_bucket_size`: elements of all-gathers in flight after a step at stages 1 and 2."""
    overlap_comm: FlagOrAuto | None = None
    """`zero_optimization.overlap_comm`: whether reductions overlap backward; None: true on GPUs, and at stage 3."""
    stage3_prefetch_bucket_size: NumelOrAuto = 50_000_000
    """`zero_optimization.stage3_prefetch_bucket_size`: elements gathered before they are needed at stage 3."""
    ignore_unused_parameters: Flag = True
    """`zero_optimization.ignore_unused_parameters`: false makes a weight without gradient an error."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """`zero_optimization.offload_optimizer`: where optimizer state is stored and stepped."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """`zero_optimization.offload_param`: where weights are stored."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """`zero_optimization.leaf_module`: modules gathered as one unit with all their children."""
    mics_shard_size: ShardSize = -1
    """`zero_optimization.mics_shard_size`: at stage 3 or with `local_sgd`, ranks of one copy of all states; -1: all."""
    zero_hpz_partition_size: Count = 1
    """`zero_optimization.zero_hpz_partition_size`: at stage 3, ranks of a second copy of the weights; 1 is off."""
    zero_quantized_weights: Flag = False
    """`zero_optimization.zero_quantized_weights`: gathers of trained weights in int8; more: `hf_dist.wires.weights`."""
    zero_quantized_nontrainable_weights: Flag = False
    """`zero_optimization.zero_quantized_nontrainable_weights`: those of frozen weights; see `hf_dist.wires.frozen_weights`."""
    zero_quantized_gradients: Flag = False
    """`zero_optimization.zero_quantized_gradients`: reductions in int4; more: `hf_dist.wires.gradients`."""


class AioConfig(Frozen):
    """The `aio` section: how files are read and written for device "nvme"."""

    block_size: Count = 1_048_576
    """`aio.block_size`: bytes of one request."""
    queue_depth: Count = 8
    """`aio.queue_depth`: requests in flight for each of `intra_op_parallelism`."""
    intra_op_parallelism: Count = 1
    """`aio.intra_op_parallelism`: this number times `queue_depth` requests are in flight, at most 32."""


class ActivationCheckpointingConfig(Frozen):
    """The `activation_checkpointing` section: blocks recomputed in backward. Any of its switches turns checkpointing on,
    as `gradient_checkpointing` of TrainingArguments does."""

    cpu_checkpointing: Flag = False
    """`activation_checkpointing.cpu_checkpointing`: whether inputs of checkpointed blocks are stored on the host."""
    every_n_layers: Count | None = None
    """`activation_checkpointing.every_n_layers`: only every n-th block is checkpointed; None leaves it to the model."""
    selective: Flag = False
    """`activation_checkpointing.selective`: whether outputs of matrix products and attention are kept, the rest recomputed."""
    mlp_tiles: Count = 1
    """`activation_checkpointing.mlp_tiles`: number of sequence parts in which each block's MLP runs; 1 runs all at once."""


class PipelineConfig(Frozen):
    """The `pipeline` section: the model's layers divided over groups of ranks."""

    stages: Stages = 1
    """`pipeline.stages`: number of pipeline stages; 1 or "auto" means no pipeline."""
    partition_method: Partition = "cost"
    """`pipeline.partition_method`: "cost", "uniform", "parameters", "type:REGEX", or a list of blocks per stage."""
    schedule: Schedule = "1f1b"
    """`pipeline.schedule`: "gpipe", "1f1b", "interleaved_1f1b" or "zb_h1"."""
    virtual_stages: Count = 1
    """`pipeline.virtual_stages`: parts of the model per rank, for the schedule "interleaved_1f1b"."""
    activation_checkpoint_interval: Whole = 0
    """`pipeline.activation_checkpoint_interval`: checkpoint every n-th block, also without a pipeline; 0 is off."""
    reshard_per_microbatch: Flag = False
    """`pipeline.reshard_per_microbatch`: whether every microbatch frees weights and reduces gradients, as the stage says."""


class TensorParallelConfig(Frozen):
    """The `tensor_parallel` section: the matrices of each layer split over neighbouring ranks."""

    autotp_size: Degree = 1
    """`tensor_parallel.autotp_size`: number of ranks that share each layer; 0, 1 or "auto" means no split."""
    tp_overlap_comm: Flag = False
    """`tensor_parallel.tp_overlap_comm`: whether the sum of an input's gradient starts before weight gradients are computed."""
    partition_config: dict[str, Any] | None = None
    """`tensor_parallel.partition_config`: which weights are split by rows or columns, instead of the model's own plan."""


class ExpertParallelConfig(Frozen):
    """The `expert_parallel` section: the experts of a mixture spread over neighbouring ranks of those that ZeRO shards over."""

    enabled: Flag = False
    """`expert_parallel.enabled`: whether tokens are sent to experts, instead of gathering the experts' weights."""
    autoep_size: CountOrAuto = 1
    """`expert_parallel.autoep_size`: ranks that hold different experts; "auto": as many of a machine as divide the experts."""


class TensorboardConfig(Frozen):
    """The `tensorboard` section: adds "tensorboard" to the Trainer's report_to."""

    enabled: Flag = False
    """`tensorboard.enabled`: whether to write the training log to TensorBoard."""
    output_path: Label = ""
    """`tensorboard.output_path`: folder of the event files; empty for the Trainer's own."""
    job_name: Label = "DeepSpeedJobName"
    """`tensorboard.job_name`: folder below `output_path`."""


class WandbConfig(Frozen):
    """The `wandb` section: adds "wandb" to the Trainer's report_to."""

    enabled: Flag = False
    """`wandb.enabled`: whether to send the training log to Weights & Biases."""
    group: Label | None = None
    """`wandb.group`: group of the run, as WANDB_RUN_GROUP."""
    team: Label | None = None
    """`wandb.team`: owner of the project, as WANDB_ENTITY."""
    project: Label | None = None
    """`wandb.project`: project of the run, as WANDB_PROJECT."""


class CsvMonitorConfig(Frozen):
    """The `csv_monitor` section: the training log as one CSV file per value."""

    enabled: Flag = False
    """`csv_monitor.enabled`: whether the files are written."""
    output_path: Label = ""
    """`csv_monitor.output_path`: folder of the files; empty for the Trainer's output_dir."""
    job_name: Label = "DeepSpeedJobName"
    """`csv_monitor.job_name`: folder below `output_path`."""


class CommsLoggerConfig(Frozen):
    """The `comms_logger` section."""

    enabled: Flag = False
    """`comms_logger.enabled`: whether calls and bytes of every collective are printed when training ends."""


class CompileConfig(Frozen):
    """The `compile` section: torch.compile of the model's blocks."""

    enabled: Flag = False
    """`compile.enabled`: whether blocks are compiled, as with torch_compile of TrainingArguments."""
    backend: Text = "inductor"
    """`compile.backend`: a backend that torch.compile knows, like torch_compile_backend of TrainingArguments."""


class CheckpointConfig(Frozen):
    """The `checkpoint` section."""

    async_save: Flag = False
    """`checkpoint.async_save`: whether training continues while a checkpoint is written; it stops only for the copy to host."""
    max_shard_size: FileSize = "50GB"
    """`checkpoint.max_shard_size`: largest safetensors file of the weights, a size such as "5GB" or a number of bytes."""
    verify: Flag = True
    """`checkpoint.verify`: whether all bytes of a checkpoint are compared with their digests before it is loaded."""


class ProfileConfig(Frozen):
    """The `hf_dist.profile` section: a torch profile of some optimizer steps, with the engine's phases as ranges in it."""

    steps: Steps | None = None
    """`hf_dist.profile.steps`: [first, last] optimizer step, counted from 1; None for no profile."""
    ranks: Wholes = (0,)
    """`hf_dist.profile.ranks`: ranks that write one."""
    output_path: Text = "profile"
    """`hf_dist.profile.output_path`: folder of the files, from the working directory."""


class PowerSgdConfig(Frozen):
    """The `hf_dist.wires.powersgd` section, read with `hf_dist.wires.gradients` "powersgd"."""

    rank: Count = 4
    """`hf_dist.wires.powersgd.rank`: columns of the two factors that are sent of a matrix."""
    start_step: Whole = 1000
    """`hf_dist.wires.powersgd.start_step`: steps that send whole gradients first, while these change most."""
    error_feedback: Flag = True
    """`hf_dist.wires.powersgd.error_feedback`: whether what a step left out is added to the next one; 4 bytes an element."""
    warm_start: Flag = True
    """`hf_dist.wires.powersgd.warm_start`: whether a step begins with the directions of the last one."""
    min_compression_rate: Real = 2.0
    """`hf_dist.wires.powersgd.min_compression_rate`: how many times fewer numbers the factors must have than the matrix."""


class WiresConfig(Frozen):
    """The `hf_dist.wires` section: numbers that travel in fewer bits, with a scale for each block of elements."""

    weights: WireCodec | None = None
    """`hf_dist.wires.weights`: gathers of trained weights, "int8", "int4" or "fp8_e4m3"; None: in their dtype of use."""
    frozen_weights: WireCodec | None = None
    """`hf_dist.wires.frozen_weights`: gathers of frozen weights at stage 3, such as the base below adapters."""
    second_copy: SecondCopy = "encoded"
    """`hf_dist.wires.second_copy`: how encoded weights are kept for `zero_hpz_partition_size`: "encoded" or "whole"."""
    gradients: GradientWire | None = None
    """`hf_dist.wires.gradients`: reductions among the ranks of a shard; at stage 0 among all, there also "powersgd"."""
    powersgd: PowerSgdConfig = PowerSgdConfig()
    """`hf_dist.wires.powersgd`: how gradients travel in two thin factors."""
    copies: WireCodec | None = None
    """`hf_dist.wires.copies`: between copies of a shard (`mics_shard_size`): gradients; weights with `optimizer_over` "all"."""
    meetings: WireCodec | None = None
    """`hf_dist.wires.meetings`: movements of replicas that train alone (`local_sgd`)."""
    stages: WireCodec | None = None
    """`hf_dist.wires.stages`: hidden states and their gradients between pipeline stages."""
    block: Block = 256
    """`hf_dist.wires.block`: elements that share a scale, a multiple of 64."""
    error_feedback: Flag = False
    """`hf_dist.wires.error_feedback`: whether a reduction adds what its last message has left out; 4 bytes an element."""
    machine: CountOrAuto = "auto"
    """`hf_dist.wires.machine`: ranks that add gradients up before machines do; "auto": those of a machine; 1: none."""


class Fp8Config(Frozen):
    """The `hf_dist.fp8` section: layers and experts multiply in float8, by torchao; weights and states stay as they are."""

    enabled: Flag = False
    """`hf_dist.fp8.enabled`: whether linear layers multiply in float8; needs bf16, and a GPU of compute capability 8.9."""
    recipe: Fp8Recipe = "rowwise"
    """`hf_dist.fp8.recipe`: "rowwise", "tensorwise", "rowwise_with_gw_hp" (weight gradients in bf16), "mxfp8" (Blackwell)."""
    skip: Names = ()
    """`hf_dist.fp8.skip`: layers left alone, beside those that always are: paths, or ends of paths such as "down_proj"."""
    gathers: Fp8Gathers = "float8"
    """`hf_dist.fp8.gathers`: where weights rest sharded, those of these layers travel in "float8", or "whole"."""
    casts: Fp8Casts = "window"
    """`hf_dist.fp8.casts`: whether weights that stay are cast once per "window" of several microbatches, or for each "use"."""
    emulate: Flag = False
    """`hf_dist.fp8.emulate`: whether products are computed in fp32 on rounded numbers; slow, on any device."""


class HfDistSection(Frozen):
    """The `hf_dist` section: keys of hf_dist itself, ignored by other readers of the file."""

    strict: Flag | None = None
    """`hf_dist.strict`: true makes keys without effect errors, false makes unknown keys warnings; None does neither."""
    save_on_signal: Flag = True
    """`hf_dist.save_on_signal`: whether SIGTERM or SIGUSR1 on any rank makes all ranks save a checkpoint and exit."""
    check_load: Flag = True
    """`hf_dist.check_load`: whether weights are compared with their files before the first step."""
    tiled_loss: FlagOrAuto | None = None
    """`hf_dist.tiled_loss`: whether head and loss run in tiles; None: true in the Trainer, else only the loss is chunked."""
    sequence_parallel: SequenceExchange = "auto"
    """`hf_dist.sequence_parallel`: "auto", "ulysses", "gather", "ring", or two numbers of ranks: [Ulysses, ring]."""
    sequence_regions: FlagOrAuto | None = None
    """`hf_dist.sequence_regions`: whether ranks that split layers divide the sequence between layers; None: true on GPUs."""
    memory_budget: MemoryBudget | None = None
    """`hf_dist.memory_budget`: "auto", "20GB" or bytes per device; at stage 3, what is left of it saves all-gathers."""
    lazy_load: Flag = True
    """`hf_dist.lazy_load`: whether `from_pretrained` streams each rank's part of the weights into its shard."""
    reduce_once_per_window: Flag = False
    """`hf_dist.reduce_once_per_window`: at stages 2 and 3, whether gradients are reduced in the last microbatch only."""
    optimizer_over: OptimizerScope = "shard"
    """`hf_dist.optimizer_over`: "all" cuts optimizer state among copies of a shard (`mics_shard_size`), too; "shard": not."""
    fp8: Fp8Config = Fp8Config()
    """`hf_dist.fp8`: linear layers that multiply in float8."""
    wires: WiresConfig = WiresConfig()
    """`hf_dist.wires`: weights, gradients and hidden states that travel in fewer bits."""
    optimizer_in_backward: Flag = False
    """`hf_dist.optimizer_in_backward`: whether a unit is stepped as soon as its gradient is complete; excludes clipping."""
    stochastic_rounding: Flag = False
    """`hf_dist.stochastic_rounding`: whether bf16 optimizer states are rounded up or down at random, unbiased on average."""
    router_loss: RouterLossScope = "global"
    """`hf_dist.router_loss`: "global" computes a mixture's auxiliary router loss over all ranks, "local" on each rank."""
    log_measurements: Flag = True
    """`hf_dist.log_measurements`: whether speed, time, memory and expert load are added to the Trainer's log records."""
    data_lanes: Count | None = None
    """`hf_dist.data_lanes`: lanes of a streamed dataset, which data ranks share; None: one per worker of each rank."""
    log_rows: Flag = False
    """`hf_dist.log_rows`: whether the rows that each step has of a streamed dataset are logged, in `hf_dist_rows.jsonl`."""
    stop_if_not_finite: Flag = False
    """`hf_dist.stop_if_not_finite`: whether the Trainer ends once weights are inf or nan; otherwise the log says so."""
    roles: Roles = {}
    """`hf_dist.roles`: name -> ranks, model and config of a role; the one without a model runs the script. {}: one role."""
    profile: ProfileConfig = ProfileConfig()
    """`hf_dist.profile`: steps and ranks of which a torch profile is written."""
    stall_report_seconds: Real = 60.0
    """`hf_dist.stall_report_seconds`: how long a rank waits for the others before a report on all ranks; 0 for never."""
    metrics_port: Address | None = None
    """`hf_dist.metrics_port`: 9400 serves /metrics and /health to this machine on rank 0, "0.0.0.0:9400" to others, too."""
