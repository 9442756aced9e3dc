"""THE table: every key of DeepSpeed's schema, and what happens to it in hf_dist.

USED       the engine honours it: every typed field (`sections.py`, `schema.py`), and the arguments listed here
MAPPED     another spelling of the key named by `target`
NO_EFFECT  accepted and listed once; `accepted` holds the values that need no mention
REFUSED    an error, except for the values in `accepted`
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_dist.config import values
from hf_dist.config.rows import (
    USED,
    Support,
    always,
    at_most_one,
    idle,
    is_any_of,
    is_empty,
    is_null,
    is_off,
    later,
    moved,
    never,
    refused,
    rows,
)
from hf_dist.config.schema import fields, section_of

_REMOVE = "Remove the key."
_SECTION_OFF = idle("its section is off", always)
_COMET = idle('use report_to="comet_ml" of TrainingArguments', is_off)
_COMPILE = idle("a detail of DeepSpeed's compiler; compile.enabled compiles the blocks", is_off)
_PERFORMANCE = idle("a detail of DeepSpeed's implementation")
_RESHARD = idle("every checkpoint can be loaded by any layout")
_OFFLOAD_DETAIL = idle("a detail of DeepSpeed's offload")
_NOT_A_KEY = idle("not a key of this section; left over from elsewhere")

_TOP = {
    **rows("", "prescale_gradients", idle("the mean is the same in either order", is_off)),
    **rows("", "gradient_predivide_factor", idle("the mean is the same for every factor", is_any_of("1", "1.0"))),
    **rows("", "managed_gradient_accumulation", idle("the Trainer owns the accumulation boundary")),
    **rows("", "steps_per_print", idle("use logging_steps of TrainingArguments")),
    **rows("", "wall_clock_breakdown", idle("the log always has the split of the time", is_off)),
    **rows("", "memory_breakdown", idle("the log always has the peak memory", is_off)),
    **rows("", "log_level", idle("use log_level of TrainingArguments")),
    **rows("", "strict_config", moved("hf_dist.strict")),
    **rows(
        "", "seq_parallel_communication_data_type", idle("parts of a sequence are sent in the dtype of the weights")
    ),
    **rows("", "gradient_allreduce_op", later("Remove the key; gradients are averaged.", is_any_of("mean"))),
    **rows("", "sparse_gradients", idle("gradients are reduced dense, with the same result", is_off)),
    **rows("", "disable_allgather vocabulary_size graph_harvesting allgather_size", _PERFORMANCE),
    **rows("", "zero_allow_untested_optimizer", idle("every element-wise torch optimizer is accepted")),
    **rows("", "zero_force_ds_cpu_optimizer", idle("there is no special CPU optimizer")),
    **rows("", "dataloader_drop_last", idle("use dataloader_drop_last of TrainingArguments", is_off)),
    **rows("", "data_parallel_size", idle("follows from the number of processes")),
    **rows("", "use_data_before_expert_parallelism", idle("experts fold into the ranks that ZeRO shards over", is_off)),
    **rows("timers", "throughput.enabled throughput.synchronized", idle("the log always has the throughput")),
    **rows(
        "",
        "msamp",
        refused(
            "is not supported", 'Remove it; "hf_dist": {"fp8": {"enabled": true}} multiplies in float8, beside bf16.'
        ),
    ),
    **rows("", "weight_quantization", refused("is not supported", "Remove the section.", is_empty)),
    **rows("", "inference", idle("used for inference only")),
}

_OPTIMIZER = {
    **rows("optimizer", "legacy_fusion", idle("there is one implementation", is_off)),
    **rows(
        "optimizer.params", "lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad momentum", USED
    ),
    **rows("optimizer.params", "set_grad_none", idle("gradients are always set to None")),
    **rows(
        "optimizer.params",
        "max_grad_norm",
        refused(
            "is not a parameter of the optimizer",
            'Move it to the top level, as "gradient_clipping".',
            never,
        ),
    ),
    **rows("optimizer.params", "freeze_step var_freeze_step var_update_scaler coeff_beta", USED),
    **rows("optimizer.params", "factor_max factor_min factor_threshold", USED),
    **rows(
        "optimizer.params", "cuda_aware comm_backend_name", idle("messages travel in the process groups of the run")
    ),
    **rows(
        "optimizer.params",
        "local_step_scaler local_step_clipper",
        idle("ranks send momentum in every step, so that their weights are always equal"),
    ),
    **rows("optimizer.params", "max_coeff min_coeff eps_inside_sqrt muon_lr adam_lr fp32_optimizer_states", USED),
    **rows(
        "optimizer.params",
        "ns_method",
        idle("Newton-Schulz runs as torch's does, in bf16 (gram is DeepSpeed's default)"),
    ),
}

_SCHEDULER = {
    **rows("scheduler.params", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps", USED),
    **rows("scheduler.params", "warmup_min_ratio cos_min_ratio last_batch_iteration", USED),
    **rows("scheduler.params", "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size", USED),
    **rows("scheduler.params", "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count", USED),
    **rows("scheduler.params", "decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate", USED),
    **rows("scheduler.params", "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate", USED),
    **rows("scheduler.params", "lr_range_test_staircase", USED),
}

_LOSS_SCALE_KEYS = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
_PRECISION = {
    **rows("fp16", "fp16", moved("fp16.enabled")),  # GPT-NeoX writes both
    **rows("fp16", "auto_cast", idle("floating-point inputs always follow the compute dtype")),
    **rows("fp16", "fp16_master_weights_and_grads", later("Remove the key; master weights are fp32.")),
    **rows("fp16", "opt_level", _NOT_A_KEY),
    **rows("bf16", "immediate_grad_update", _PERFORMANCE),
    **rows("bf16", f"auto_cast {_LOSS_SCALE_KEYS}", idle("bf16 has no loss scale")),
    **rows(
        "amp",
        "enabled",
        refused(
            "is not supported (nor does DeepSpeed take it with ZeRO)",
            'Remove the section; use "torch_autocast": {"enabled": true} instead.',
        ),
    ),
    **rows("amp", "opt_level *", _SECTION_OFF),
    **rows(
        "torch_autocast",
        "lower_precision_safe_modules",
        idle("weights and gradients are sent in fp32, unless communication_data_type says otherwise"),
    ),
    **rows("data_types", "buffer_dtype", later("Remove the key; buffers keep their dtype.")),
}

_Z = "zero_optimization"
_ZERO = {
    **rows(_Z, "(bool)", moved("zero_optimization.stage")),
    **rows(_Z, "contiguous_gradients use_multi_rank_bucket_allreduce allgather_partitions", _PERFORMANCE),
    **rows(_Z, "reduce_scatter", idle("gradients are reduced by the stage's own collective")),
    **rows(_Z, "load_from_fp32_weights", idle("a checkpoint holds the fp32 weights")),
    **rows(_Z, "elastic_checkpoint", _RESHARD),
    **rows(
        _Z,
        "zenflow",
        refused("is not supported: it changes the update", "Remove it; the rest stays.", is_null),
    ),
    **rows(_Z, "sub_group_size", idle("the step goes unit by unit")),
    **rows(_Z, "cpu_offload", moved("zero_optimization.offload_optimizer.device")),
    **rows(_Z, "cpu_offload_param cpu_offload_params", moved("zero_optimization.offload_param.device")),
    **rows(_Z, "cpu_offload_use_pin_memory", _OFFLOAD_DETAIL),
    **rows(_Z, "stage3_param_persistence_threshold", idle("small parameters are gathered with their unit")),
    **rows(_Z, "stage3_model_persistence_threshold", idle("small parameters are gathered with their unit")),
    **rows(_Z, "stage3_max_live_parameters stage3_max_reuse_distance", idle("a unit is in memory while it runs")),
    **rows(_Z, "stage3_gather_16bit_weights_on_model_save", idle("full weights are always saved")),
    **rows(_Z, "stage3_gather_fp16_weights_on_model_save", moved(f"{_Z}.stage3_gather_16bit_weights_on_model_save")),
    **rows(_Z, "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params", _PERFORMANCE),
    **rows(_Z, "stage3_allgather_sequential", _PERFORMANCE),
    **{
        f"{_Z}.{key}": moved(f"{_Z}.stage3_{key}")
        for key in (
            *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
            *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
            *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
        )
    },
    **rows(_Z, "legacy_stage1", refused("no longer exists", _REMOVE)),
    **rows(_Z, "round_robin_gradients memory_efficient_linear override_module_apply", _PERFORMANCE),
    **rows(_Z, "pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks", _PERFORMANCE),
    **rows(
        _Z, "zeropp_loco_param", idle("hf_dist.wires.error_feedback adds what a message has left out to the next one")
    ),
    **rows(_Z, "mics_hierarchical_params_gather", _PERFORMANCE),
    **rows(_Z, "save_muon_momentum_buffer_in_memory", _OFFLOAD_DETAIL),
    **rows(_Z, "grad_hooks", _PERFORMANCE),
    **rows(_Z, "find_unused_parameters", idle("unused parameters are allowed")),
    **rows(f"{_Z}.offload_optimizer", "buffer_size fast_init super_offload cpuadam_cores_perc", _OFFLOAD_DETAIL),
    **rows(
        f"{_Z}.zenflow",
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
        refused("is not supported: it changes the update", "Remove the section.", never),
    ),
}

_ONE_RANK_PER_EXPERT = later("Remove the key or set it to 1.", at_most_one)
_ROUTER = refused(
    "is decided by the model's own router", "Remove the key, or change the model's config.", is_any_of("auto", "none")
)
_ROUTER_BIAS = refused(
    "is not supported: it would change the routing",
    "Remove the key or set it to null; output_router_logits of the model turns its auxiliary loss on.",
    is_off,
)
_PARALLEL = {
    **rows("pipeline", "partition", moved("pipeline.partition_method")),
    **rows("pipeline", "seed_layers pipe_partitioned grad_partitioned use_reentrant", _PERFORMANCE),
    **rows("tensor_parallel", "tensor_parallel.tp_size", moved("tensor_parallel.autotp_size")),
    **rows("tensor_parallel", "tensor_parallel.tp_grain_size", idle("matrices are cut in equal parts")),
    **rows("tensor_parallel", "dtype", idle("follows fp16 and bf16")),
    **rows("tensor_parallel", "keep_module_on_host", idle("from_pretrained reads each rank's part only", is_off)),
    **rows("tensor_parallel", "preset_model", idle("the plan is the model's own, and verified")),
    **rows(
        "tensor_parallel",
        "tensor_parallel.mpu tensor_parallel.tp_group",
        refused("is a Python object, which a JSON file cannot hold", _REMOVE),
    ),
    **rows("tensor_parallel", "injection_policy_tuple", refused("is not supported", _REMOVE)),
    **rows("tensor_parallel", "replace_with_kernel_inject", refused("is for inference only", _REMOVE)),
    **rows("tensor_parallel", "kernel_inject", moved("tensor_parallel.replace_with_kernel_inject")),
    **rows("expert_parallel", "expert_tensor_parallel_size", _ONE_RANK_PER_EXPERT),
    **rows("expert_parallel", "load_balance_coeff", _ROUTER_BIAS),
    **rows(
        "expert_parallel",
        "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern",
        idle("experts are found by their structure"),
    ),
    **rows(
        "expert_parallel",
        "route_norm route_scale score_apply score_func top_k num_expert_groups num_limited_groups routed_scaling_factor",
        _ROUTER,
    ),
    **rows(
        "expert_parallel", "use_grouped_mm disable_triton_grouped_mm", idle("use experts_implementation of the model")
    ),
    **rows("expert_parallel", "combine_impl validate_folding_routing", _PERFORMANCE),
}

_SERVICES = {
    **rows("aio", "single_submit overlap_events", _OFFLOAD_DETAIL),
    **rows("aio", "use_gds", _OFFLOAD_DETAIL),
    **rows("aio", "thread_count", moved("aio.intra_op_parallelism")),
    **rows(
        "activation_checkpointing",
        "partition_activations",
        idle("hf_dist.sequence_regions divides activations", is_off),
    ),
    **rows("activation_checkpointing", "number_checkpoints", idle("a buffer's size; see every_n_layers", is_off)),
    **rows("activation_checkpointing", "contiguous_memory_optimization", idle("buffers are reused anyway", is_off)),
    **rows(
        "activation_checkpointing", "synchronize_checkpoint_boundary profile", idle("for debugging DeepSpeed", is_off)
    ),
    **rows("checkpoint", "tag_validation", idle("one checkpoint folder for all ranks", is_off)),
    **rows("checkpoint", "use_node_local_storage", idle("all ranks write to one folder, which must be shared", is_off)),
    **rows("checkpoint", "load_universal", _RESHARD),
    **rows("checkpoint", "parallel_write.pipeline_stage checkpoint_serialization", _PERFORMANCE),
    **rows("checkpoint.writer", "type decoupled io_buffer_size io_buffer_double io_multiplier", _PERFORMANCE),
    **rows("checkpoint.writer", "show_statistics data_parallel", _PERFORMANCE),
    **rows("comet", "enabled samples_log_interval project workspace api_key", _COMET),
    **rows("comet", "experiment_name experiment_key online mode", _COMET),
    **rows("flops_profiler", "recompute_fwd_factor", idle("recomputed operations are not counted", is_off)),
    **rows("comms_logger", "prof_all prof_ops verbose debug", idle("every collective is counted, once at the end")),
    **rows("compile", "disable", moved("compile.enabled")),
    **rows(
        "compile",
        "deepcompile free_activation free_activation_threshold offload_activation offload_activation_pin_memory "
        "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce "
        "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
        "keep_all_input_tensors passes kwargs",
        _COMPILE,
    ),
}


def _instead(advice: str) -> Support:
    """A section that is not supported, with what does work."""
    return refused("is not supported", f'Remove the section or set "enabled" to false; {advice}.')


_TUNED = idle("read by `hf-dist tune`; training takes the other values of the file", never)
_GENERATES = idle("model.generate() works on a sharded model by itself", is_off)
_COMPRESSION = _instead("compress the saved model with a library for that")
_ASYNC = '"checkpoint": {"async_save": true} writes in the background'
_ALWAYS = idle("each part has its own switch", always)
_LTD = refused("is not supported: layers would leave out tokens", 'Remove the section or set "enabled" to false.')
_OUT_OF_SCOPE = {
    **rows("hybrid_engine", "enabled max_out_tokens inference_tp_size release_inference_cache", _GENERATES),
    **rows("hybrid_engine", "pin_parameters tp_gather_partition_size enable_cuda_graph", _GENERATES),
    **rows(
        "elasticity", "version", idle("the plan is that of version 0.1, one global batch for every number of ranks")
    ),
    **rows("elasticity", "min_time", idle("the launcher decides when to start again")),
    **rows("elasticity", "model_parallel_size num_gpus_per_node", idle("follows from the axes of the job")),
    **rows("autotuning", "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step", _TUNED),
    **rows("autotuning", "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings", _TUNED),
    **rows("autotuning", "max_train_batch_size min_train_batch_size mp_size metric model_info", _TUNED),
    **rows("autotuning", "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu", _TUNED),
    **rows("autotuning", "num_tuning_micro_batch_sizes model_info_path", _TUNED),
    **rows("curriculum_learning", "curriculum_type", idle("only lengths grow", always)),
    **rows("data_efficiency", "enabled", _ALWAYS),
    **rows("data_efficiency", "seed", idle("nothing is random: batches are cut")),
    **rows(
        "data_efficiency",
        "data_sampling",
        idle("its curriculum_learning is read; batches are drawn by the Trainer", is_off),
    ),
    **rows("data_efficiency", "data_routing", _LTD),
    **rows("", "compression_training quantize_training eigenvalue", _COMPRESSION),
    **rows("", "nebula", _instead(_ASYNC)),
    **rows(
        "",
        "datastates_ckpt",
        refused("is not supported", f"Remove the section; {_ASYNC}.", is_null),
    ),
    **rows("", "sparse_attention", idle("the attention of the model is used")),
}

_FIELDS = {path: USED for path, info in fields().items() if section_of(info) is None or path.count(".")}
"""The engine honours every typed field. A section has a row if it is part of another section."""
SUPPORT: Mapping[str, Support] = {
    **_FIELDS,
    **_TOP,
    **_OPTIMIZER,
    **_SCHEDULER,
    **_PRECISION,
    **_ZERO,
    **_PARALLEL,
    **_SERVICES,
    **_OUT_OF_SCOPE,
}

SECTION_ALIASES: Mapping[str, str] = {"bfloat16": "bf16", "tensor_parallel.tp": "tensor_parallel.tensor_parallel"}
"""Other names of whole sections."""

_FLAGS = (
    *("contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients", "grad_hooks"),
    *("use_multi_rank_bucket_allreduce", "load_from_fp32_weights", "elastic_checkpoint", "memory_efficient_linear"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params"),
    *("stage3_allgather_sequential", "find_unused_parameters"),
    *("mics_hierarchical_params_gather", "override_module_apply", "pipeline_loading_checkpoint"),
    *("log_trace_cache_warnings", "enable_sanity_checks", "cpu_offload_use_pin_memory"),
)
_SIZES = (
    *("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_model_persistence_threshold", "stage3_param_persistence_threshold"),
    "stage3_module_granularity_threshold",
)
_TOP_FLAGS = (
    *("prescale_gradients", "wall_clock_breakdown", "memory_breakdown", "sparse_gradients"),
    *("disable_allgather", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last"),
    *("graph_harvesting", "managed_gradient_accumulation", "use_data_before_expert_parallelism"),
)
IDLE_VALUES: Mapping[str, values.Coerce] = {
    **{f"{_Z}.{key}": values.or_auto(values.flag) for key in _FLAGS},
    **{f"{_Z}.{key}": values.or_auto(values.whole(floor=True)) for key in _SIZES},
    **dict.fromkeys(_TOP_FLAGS, values.flag),
    "gradient_predivide_factor": values.real(),
    "steps_per_print": values.period,
    "fp16.auto_cast": values.flag,
    "curriculum_learning.curriculum_type": values.needed(values.choice("seqlen")),
    **{f"activation_checkpointing.{key}": values.flag for key in ("partition_activations", "profile")},
    "activation_checkpointing.contiguous_memory_optimization": values.flag,
    "activation_checkpointing.synchronize_checkpoint_boundary": values.flag,
    "activation_checkpointing.number_checkpoints": values.or_auto(values.whole()),
}
"""Valid values of keys without effect, where DeepSpeed checks them: a slip in such a value is still reported."""

FREE_FORM = frozenset({"optimizer.params", "scheduler.params", "zero_optimization.zenflow", "hf_dist.roles"})
"""Rows whose children are not checked as sections."""

STRICT = frozenset(
    {
        *("zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
        *(
            "zero_optimization.leaf_module",
            "tensor_parallel",
            "tensor_parallel.tensor_parallel",
            "pipeline",
            "local_sgd",
        ),
        *("fp16", "bf16", "data_types", "optimizer", "scheduler", "hf_dist"),
        *("tensorboard", "wandb", "csv_monitor", "comms_logger"),
    }
)
"""Sections in which an unknown key is an error instead of a note."""
