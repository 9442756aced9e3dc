"""THE table: every key of DeepSpeed's schema and what becomes of it here.

USED       the engine honours it (a typed field in `schema.py`, or a known optimizer/scheduler parameter)
MAPPED     another spelling of the key named by `target`
NO_EFFECT  accepted and listed once; `accepted` holds the values that need no mention
REFUSED    an error, except for the values in `accepted`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Status(Enum):
    """What becomes of a key."""

    USED = "used"
    MAPPED = "mapped"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Support:
    """One row of the table."""

    status: Status
    reason: str = ""
    """NO_EFFECT: a few words for the log; REFUSED: a clause that follows the value."""
    fix: str = ""
    """REFUSED: what to do instead, as a sentence."""
    target: str = ""
    """MAPPED: the canonical JSON path."""
    accepted: Callable[[Any], bool] = lambda value: False
    """Values that ask for what happens anyway: no error, no note."""


def is_off(value: Any) -> bool:
    """Nothing is asked for: null, false, 0, "none", empty, or an object in which no `enabled` is true."""
    if isinstance(value, Mapping):
        return not any(
            _truthy(v) if k == "enabled" else isinstance(v, Mapping) and not is_off(v) for k, v in value.items()
        )
    return not _truthy(value) or str(value).strip().lower() == "none"


def _truthy(value: Any) -> bool:
    return bool(value) and str(value).strip().lower() not in ("false", "0")


def _is_true(value: Any) -> bool:
    return _truthy(value) and str(value).lower() in ("true", "1")


def _at_most_one(value: Any) -> bool:
    try:
        return str(value).strip().lower() in ("auto", "none") or float(value) <= 1
    except (TypeError, ValueError):
        return False


def _is(*accepted: str) -> Callable[[Any], bool]:
    return lambda value: str(value).strip().lower() in accepted


def _rows(section: str, keys: str, support: Support) -> dict[str, Support]:
    prefix = f"{section}." if section else ""
    return {prefix + key: support for key in keys.split()}


def _idle(reason: str, accepted: Callable[[Any], bool] = lambda value: False) -> Support:
    return Support(Status.NO_EFFECT, reason, accepted=accepted)


def _refused(reason: str, fix: str, accepted: Callable[[Any], bool] = is_off) -> Support:
    return Support(Status.REFUSED, reason, fix, accepted=accepted)


def _later(fix: str, accepted: Callable[[Any], bool] = is_off) -> Support:
    return _refused("is not available yet in this version of hf_dist", fix, accepted)


def _to(target: str) -> Support:
    return Support(Status.MAPPED, target=target)


_USED = Support(Status.USED)
_REMOVE = "Remove the key."
_SECTION_OFF = _idle("its section is off", lambda value: True)
_LOGGING = _idle("use the Trainer's logging and callbacks", is_off)
_COMPILE = _idle("use torch_compile of TrainingArguments", is_off)
_PERFORMANCE = _idle("a detail of DeepSpeed's implementation")
_RESHARD = _idle("every checkpoint can be loaded by any layout")
_OFFLOAD_DETAIL = _idle("nothing is offloaded")
_CHECKPOINTING = _idle("use gradient_checkpointing of TrainingArguments", is_off)
_NOT_A_KEY = _idle("not a key of this section; left over from elsewhere")
_OFFLOAD = _later('Remove the key or set device to "none".', lambda value: str(value).lower() in ("none", ""))
_ONE_BIT = _refused("belongs to the 1-bit optimizers, which are not supported", _REMOVE, lambda value: False)
_LAMB = _later("Remove the key; it belongs to LAMB.", lambda value: False)
_MUON = _later("Remove the key; it belongs to Muon.", lambda value: False)

_TOP = {
    **_rows("", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping", _USED),
    **_rows("", "communication_data_type", _USED),
    **_rows("", "prescale_gradients", _idle("the mean is the same in either order", is_off)),
    **_rows("", "gradient_predivide_factor", _idle("the mean is the same for every factor", _is("1", "1.0"))),
    **_rows("", "managed_gradient_accumulation", _idle("the Trainer owns the accumulation boundary")),
    **_rows("", "steps_per_print wall_clock_breakdown memory_breakdown log_level", _LOGGING),
    **_rows("", "dump_state", _idle("the resolved config is logged at the start", is_off)),
    **_rows("", "seq_parallel_communication_data_type", _idle("there is no sequence parallelism")),
    **_rows("", "gradient_allreduce_op", _later("Remove the key; gradients are averaged.", _is("mean"))),
    **_rows("", "sparse_gradients", _idle("gradients are reduced dense, with the same result", is_off)),
    **_rows("", "disable_allgather vocabulary_size graph_harvesting allgather_size", _PERFORMANCE),
    **_rows("", "zero_allow_untested_optimizer", _idle("every element-wise torch optimizer is accepted")),
    **_rows("", "zero_force_ds_cpu_optimizer", _idle("there is no special CPU optimizer")),
    **_rows("", "dataloader_drop_last", _idle("use dataloader_drop_last of TrainingArguments", is_off)),
    **_rows("", "sequence_parallel_size", _later("Remove the key or set it to 1.", _at_most_one)),
    **_rows("", "data_parallel_size", _idle("follows from the number of processes")),
    **_rows("", "use_data_before_expert_parallelism", _idle("there is no expert parallelism", is_off)),
    **_rows("timers", "throughput.enabled throughput.synchronized", _LOGGING),
    **_rows("", "msamp", _refused("is not supported", "Remove the section.")),
    **_rows("", "weight_quantization", _refused("is not supported", "Remove the section.", lambda value: not value)),
    **_rows("", "inference", _idle("read by inference only")),
}

_OPTIMIZER = {
    **_rows("optimizer", "type params", _USED),
    **_rows("optimizer", "legacy_fusion", _idle("there is one implementation", is_off)),
    **_rows("optimizer.params", "lr betas eps weight_decay torch_adam adam_w_mode amsgrad momentum", _USED),
    **_rows("optimizer.params", "bias_correction", _later("Remove the key or set it to true.", _is_true)),
    **_rows("optimizer.params", "set_grad_none", _idle("gradients are always set to None")),
    **_rows("optimizer.params", "fp32_optimizer_states", _later("Remove the key or set it to true.", _is_true)),
    **_rows(
        "optimizer.params",
        "max_grad_norm",
        _refused(
            "is not a parameter of the optimizer", 'Use the top-level key "gradient_clipping".', lambda value: False
        ),
    ),
    **_rows("optimizer.params", "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler", _ONE_BIT),
    **_rows("optimizer.params", "local_step_scaler local_step_clipper coeff_beta", _ONE_BIT),
    **_rows("optimizer.params", "factor_max factor_min factor_threshold", _ONE_BIT),
    **_rows("optimizer.params", "max_coeff min_coeff eps_inside_sqrt", _LAMB),
    **_rows("optimizer.params", "muon_lr adam_lr ns_method", _MUON),
}

_CYCLE = _later('Use "WarmupLR", "WarmupDecayLR", "WarmupCosineLR" or a torch schedule.', lambda value: False)
_SCHEDULER = {
    **_rows("scheduler", "type params", _USED),
    **_rows("scheduler.params", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps", _USED),
    **_rows("scheduler.params", "warmup_min_ratio cos_min_ratio last_batch_iteration", _USED),
    **_rows("scheduler.params", "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size", _CYCLE),
    **_rows("scheduler.params", "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count", _CYCLE),
    **_rows("scheduler.params", "decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate", _CYCLE),
    **_rows("scheduler.params", "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate", _CYCLE),
    **_rows("scheduler.params", "lr_range_test_staircase", _CYCLE),
}

_LOSS_SCALE_KEYS = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
_PRECISION = {
    **_rows("fp16", f"enabled consecutive_hysteresis {_LOSS_SCALE_KEYS}", _USED),
    **_rows("fp16", "auto_cast", _idle("floating-point inputs always follow the compute dtype")),
    **_rows("fp16", "fp16_master_weights_and_grads", _later("Remove the key; master weights are fp32.")),
    **_rows("fp16", "opt_level", _NOT_A_KEY),
    **_rows("bf16", "enabled check_grad_overflow", _USED),
    **_rows("bf16", "immediate_grad_update", _PERFORMANCE),
    **_rows("bf16", "bf16_master_weights_and_grads", _later("Remove the key; master weights are fp32.")),
    **_rows("bf16", "bf16_optimizer_states", _later("Remove the key; optimizer states are fp32.")),
    **_rows("bf16", f"auto_cast {_LOSS_SCALE_KEYS}", _idle("bf16 has no loss scale")),
    **_rows("amp", "enabled", _refused("is not supported", 'Use "bf16": {"enabled": true} or "fp16".')),
    **_rows("amp", "opt_level *", _SECTION_OFF),
    **_rows("torch_autocast", "enabled", _later('Use "bf16": {"enabled": true}.')),
    **_rows("torch_autocast", "dtype lower_precision_safe_modules", _SECTION_OFF),
    **_rows("data_types", "grad_accum_dtype param_dtype", _USED),
    **_rows("data_types", "buffer_dtype", _later("Remove the key; buffers keep their dtype.")),
}

_Z = "zero_optimization"
_ZERO = {
    **_rows(_Z, "(bool)", _to("zero_optimization.stage")),
    **_rows(_Z, "stage reduce_bucket_size allgather_bucket_size overlap_comm stage3_prefetch_bucket_size", _USED),
    **_rows(_Z, "ignore_unused_parameters leaf_module mics_shard_size zero_hpz_partition_size", _USED),
    **_rows(_Z, "leaf_module.classes leaf_module.names leaf_module.name_suffixes", _USED),
    **_rows(_Z, "contiguous_gradients use_multi_rank_bucket_allreduce allgather_partitions", _PERFORMANCE),
    **_rows(_Z, "reduce_scatter", _idle("gradients are reduced by the stage's own collective")),
    **_rows(_Z, "load_from_fp32_weights", _idle("a checkpoint holds the fp32 weights")),
    **_rows(_Z, "elastic_checkpoint", _RESHARD),
    **_rows(_Z, "offload_param offload_optimizer", _OFFLOAD),
    **_rows(
        _Z, "zenflow", _refused("is not supported: it changes the update", "Remove the section.", lambda v: v is None)
    ),
    **_rows(_Z, "sub_group_size", _idle("the step goes unit by unit")),
    **_rows(_Z, "cpu_offload", _to("zero_optimization.offload_optimizer.device")),
    **_rows(_Z, "cpu_offload_param cpu_offload_params", _to("zero_optimization.offload_param.device")),
    **_rows(_Z, "cpu_offload_use_pin_memory", _OFFLOAD_DETAIL),
    **_rows(_Z, "stage3_param_persistence_threshold", _idle("small parameters travel with their unit")),
    **_rows(_Z, "stage3_model_persistence_threshold", _idle("small parameters travel with their unit")),
    **_rows(_Z, "stage3_max_live_parameters stage3_max_reuse_distance", _idle("a unit is in memory while it runs")),
    **_rows(_Z, "stage3_gather_16bit_weights_on_model_save", _idle("full weights are always saved")),
    **_rows(_Z, "stage3_gather_fp16_weights_on_model_save", _to(f"{_Z}.stage3_gather_16bit_weights_on_model_save")),
    **_rows(_Z, "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params", _PERFORMANCE),
    **_rows(_Z, "stage3_allgather_sequential", _PERFORMANCE),
    **{
        f"{_Z}.{key}": _to(f"{_Z}.stage3_{key}")
        for key in (
            *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
            *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
            *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
        )
    },
    **_rows(_Z, "legacy_stage1", _refused("no longer exists", _REMOVE)),
    **_rows(_Z, "round_robin_gradients memory_efficient_linear override_module_apply", _PERFORMANCE),
    **_rows(_Z, "pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks", _PERFORMANCE),
    **_rows(_Z, "zero_quantized_weights", _idle("weights travel unquantized", is_off)),
    **_rows(_Z, "zero_quantized_gradients", _idle("gradients travel unquantized", is_off)),
    **_rows(_Z, "zero_quantized_nontrainable_weights", _later(_REMOVE)),
    **_rows(_Z, "zeropp_loco_param", _idle("gradients travel unquantized")),
    **_rows(_Z, "mics_hierarchical_params_gather", _PERFORMANCE),
    **_rows(_Z, "save_muon_momentum_buffer_in_memory", _OFFLOAD_DETAIL),
    **_rows(_Z, "grad_hooks", _PERFORMANCE),
    **_rows(_Z, "find_unused_parameters", _idle("unused parameters are allowed")),
    **_rows(f"{_Z}.offload_param", "device", _OFFLOAD),
    **_rows(f"{_Z}.offload_param", "nvme_path buffer_count buffer_size max_in_cpu pin_memory", _OFFLOAD_DETAIL),
    **_rows(f"{_Z}.offload_optimizer", "device", _OFFLOAD),
    **_rows(f"{_Z}.offload_optimizer", "nvme_path buffer_count buffer_size pin_memory", _OFFLOAD_DETAIL),
    **_rows(f"{_Z}.offload_optimizer", "pipeline_read pipeline_write fast_init ratio", _OFFLOAD_DETAIL),
    **_rows(f"{_Z}.offload_optimizer", "super_offload cpuadam_cores_perc", _OFFLOAD_DETAIL),
    **_rows(
        f"{_Z}.zenflow",
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
        _refused("is not supported: it changes the update", "Remove the section.", lambda value: False),
    ),
}

_ONE_STAGE = _idle("the model is one pipeline stage")
_TP_SIZE = _later("Remove the key or set it to 1.", _at_most_one)
_NO_TP = _idle("there is no tensor parallelism")
_PARALLEL = {
    **_rows("pipeline", "stages", _TP_SIZE),
    **_rows("pipeline", "partition seed_layers pipe_partitioned grad_partitioned use_reentrant", _ONE_STAGE),
    **_rows("pipeline", "partition_method", _to("pipeline.partition")),
    **_rows("pipeline", "activation_checkpoint_interval", _CHECKPOINTING),
    **_rows("tensor_parallel", "autotp_size tensor_parallel.tp_size", _TP_SIZE),
    **_rows("tensor_parallel", "tensor_parallel.tp_grain_size dtype tp_overlap_comm keep_module_on_host", _NO_TP),
    **_rows("tensor_parallel", "preset_model partition_config", _NO_TP),
    **_rows("tensor_parallel", "tensor_parallel.mpu tensor_parallel.tp_group", _refused("is not JSON", _REMOVE)),
    **_rows("tensor_parallel", "injection_policy_tuple", _refused("is not supported", _REMOVE)),
    **_rows("tensor_parallel", "replace_with_kernel_inject", _refused("is for inference only", _REMOVE)),
    **_rows("tensor_parallel", "kernel_inject", _to("tensor_parallel.replace_with_kernel_inject")),
    **_rows("expert_parallel", "enabled", _later('Remove the section or set "enabled" to false.')),
    **_rows(
        "expert_parallel",
        "autoep_size expert_tensor_parallel_size validate_folding_routing preset_model moe_layer_pattern "
        "expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm route_scale score_apply "
        "combine_impl num_expert_groups num_limited_groups score_func top_k load_balance_coeff "
        "routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts "
        "shared_experts_pattern shared_experts_gate_pattern",
        _SECTION_OFF,
    ),
}

_SERVICES = {
    **_rows("aio", "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds", _OFFLOAD_DETAIL),
    **_rows("aio", "thread_count", _to("aio.intra_op_parallelism")),
    **_rows("activation_checkpointing", "partition_activations number_checkpoints profile", _CHECKPOINTING),
    **_rows("activation_checkpointing", "contiguous_memory_optimization", _CHECKPOINTING),
    **_rows("activation_checkpointing", "synchronize_checkpoint_boundary", _CHECKPOINTING),
    **_rows("activation_checkpointing", "cpu_checkpointing", _later("Remove the key or set it to false.")),
    **_rows(
        "checkpoint", "tag_validation use_node_local_storage", _idle("one checkpoint folder for all ranks", is_off)
    ),
    **_rows("checkpoint", "load_universal", _RESHARD),
    **_rows("checkpoint", "parallel_write.pipeline_stage checkpoint_serialization", _PERFORMANCE),
    **_rows("checkpoint.writer", "type decoupled io_buffer_size io_buffer_double io_multiplier", _PERFORMANCE),
    **_rows("checkpoint.writer", "show_statistics data_parallel", _PERFORMANCE),
    **_rows("tensorboard", "enabled output_path job_name", _LOGGING),
    **_rows("wandb", "enabled group team project", _LOGGING),
    **_rows("csv_monitor", "enabled output_path job_name", _LOGGING),
    **_rows("comet", "enabled samples_log_interval project workspace api_key", _LOGGING),
    **_rows("comet", "experiment_name experiment_key online mode", _LOGGING),
    **_rows("flops_profiler", "enabled recompute_fwd_factor profile_step module_depth top_modules", _LOGGING),
    **_rows("flops_profiler", "detailed output_file", _LOGGING),
    **_rows("comms_logger", "enabled prof_all prof_ops verbose debug", _LOGGING),
    **_rows(
        "compile",
        "deepcompile free_activation free_activation_threshold offload_activation offload_activation_pin_memory "
        "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce "
        "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
        "keep_all_input_tensors passes disable backend enabled kwargs",
        _COMPILE,
    ),
}

_ELSEWHERE = _refused("is not supported", 'Remove the section or set "enabled" to false.')
_OUT_OF_SCOPE = {
    **_rows("hybrid_engine", "enabled", _ELSEWHERE),
    **_rows(
        "elasticity", "enabled", replace(_ELSEWHERE, fix="Write the batch sizes; checkpoints load at any rank count.")
    ),
    **_rows("autotuning", "enabled", _ELSEWHERE),
    **_rows("data_efficiency", "enabled data_sampling data_routing", _ELSEWHERE),
    **_rows("data_efficiency", "seed", _SECTION_OFF),
    **_rows("hybrid_engine", "max_out_tokens inference_tp_size release_inference_cache pin_parameters", _SECTION_OFF),
    **_rows("hybrid_engine", "tp_gather_partition_size enable_cuda_graph", _SECTION_OFF),
    **_rows("elasticity", "max_train_batch_size micro_batch_sizes min_gpus max_gpus num_gpus_per_node", _SECTION_OFF),
    **_rows("elasticity", "model_parallel_size min_time prefer_larger_batch", _SECTION_OFF),
    **_rows("elasticity", "ignore_non_elastic_batch_info version", _SECTION_OFF),
    **_rows("autotuning", "fast results_dir exps_dir overwrite start_profile_step end_profile_step", _SECTION_OFF),
    **_rows("autotuning", "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings", _SECTION_OFF),
    **_rows("autotuning", "max_train_batch_size min_train_batch_size mp_size metric model_info", _SECTION_OFF),
    **_rows("autotuning", "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu", _SECTION_OFF),
    **_rows("autotuning", "num_tuning_micro_batch_sizes model_info_path", _SECTION_OFF),
    **_rows("", "curriculum_learning progressive_layer_drop compression_training quantize_training", _ELSEWHERE),
    **_rows("", "eigenvalue nebula", _ELSEWHERE),
    **_rows("", "datastates_ckpt", _refused("is not supported", "Remove the section.", lambda value: value is None)),
    **_rows("", "sparse_attention", _idle("the attention of the model is used")),
}

SUPPORT: Mapping[str, Support] = {
    **_TOP,
    **_OPTIMIZER,
    **_SCHEDULER,
    **_PRECISION,
    **_ZERO,
    **_PARALLEL,
    **_SERVICES,
    **_OUT_OF_SCOPE,
    **_rows("hf_dist", "strict", _USED),
}

SECTION_ALIASES: Mapping[str, str] = {"bfloat16": "bf16", "tensor_parallel.tp": "tensor_parallel.tensor_parallel"}
"""Other names of whole sections."""

FREE_FORM = frozenset({"optimizer.params", "scheduler.params", "zero_optimization.zenflow"})
"""Rows with children that are not walked as sections."""

STRICT = frozenset(
    {
        *("zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
        *("zero_optimization.leaf_module", "tensor_parallel", "tensor_parallel.tensor_parallel", "pipeline"),
        *("fp16", "bf16", "data_types", "optimizer", "scheduler", "hf_dist"),
    }
)
"""Sections in which an unknown key is an error rather than a note."""
