"""Names of other tools that people write into the config, and what to write instead. Kept by hand: reading needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ZERO = "zero_optimization"


def _names(text: str) -> list[str]:
    return text.split()


def _each(names: str, path: str) -> dict[str, str]:
    return dict.fromkeys(_names(names), path)


INSTEAD: Mapping[str, str] = {
    **_each("per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size per_gpu_batch_size", _MICRO),
    **_each("micro_batch_size train_micro_batch_size mbs micro_batch_size_per_device batch_size_per_gpu", _MICRO),
    **_each("batch_size_per_device train_micro_batch_size_per_device train_batch_size_per_gpu micro_batch", _MICRO),
    **_each("batch_size global_batch_size total_batch_size effective_batch_size gbs", "train_batch_size"),
    **_each("gas accumulation_steps accumulate_grad_batches gradient_accumulation grad_accum", _STEPS),
    **_each("max_grad_norm clip_grad_norm gradient_clip_val max_gradient_norm clip_norm max_norm", "gradient_clipping"),
    **_each("learning_rate", "optimizer.params.lr"),
    **_each("adam_betas", "optimizer.params.betas"),
    **_each("adam_epsilon", "optimizer.params.eps"),
    **_each("lr_scheduler lr_schedule learning_rate_scheduler", "scheduler"),
    **_each("zero zero_config zero_optim zero_opt", _ZERO),
    **_each("zero_stage", f"{_ZERO}.stage"),
    **_each("offload_optimizer_device", f"{_ZERO}.offload_optimizer.device"),
    **_each("offload_param_device", f"{_ZERO}.offload_param.device"),
    **_each("offload_optimizer_nvme_path", f"{_ZERO}.offload_optimizer.nvme_path"),
    **_each("offload_param_nvme_path", f"{_ZERO}.offload_param.nvme_path"),
    **_each("zero3_save_16bit_model", f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"),
    **_each("gradient_accumulation_dtype grad_accum_dtype", "data_types.grad_accum_dtype"),
    **_each("checkpoint_activations activation_checkpoint ac", "activation_checkpointing"),
    **_each("pipeline_parallel_size pipe_parallel_size pp_size num_stages", "pipeline.stages"),
    **_each("tensor_parallel_size tp_size model_parallel_size", "tensor_parallel.autotp_size"),
    **_each("context_parallel_size cp_size sp_size", "sequence_parallel_size"),
    **_each("torch_compile", "compile.enabled"),
}
"""Name -> the hf_dist path that takes the same value."""

_HALF = 'Remove it and write "bf16": {"enabled": true} or "fp16": {"enabled": true}.'
_RECOMPUTE = 'Remove it and write "activation_checkpointing": {"every_n_layers": 1}, or pass --gradient_checkpointing.'
_SHARDED = f'Remove it and write "{_ZERO}": {{"stage": 3}} (2 for SHARD_GRAD_OP, 0 for NO_SHARD).'
SENTENCES: Mapping[str, str] = {
    **_each("mixed_precision precision torch_dtype dtype half_precision_backend", _HALF),
    **_each("gradient_checkpointing use_gradient_checkpointing enable_gradient_checkpointing", _RECOMPUTE),
    **_each("sharding_strategy fsdp_sharding_strategy fsdp fsdp_config", _SHARDED),
}
"""Name -> a sentence, where hf_dist needs a different value."""

TRAINING_ARGUMENTS = frozenset(
    _names(
        "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon "
        "optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm "
        "label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing "
        "activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile "
        "torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha "
        "torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step "
        "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica "
        "disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
        "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
        "batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit "
        "enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip "
        "restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config "
        "parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict "
        "resume_from_checkpoint local_rank"
    )
)
"""Every argument of `transformers.TrainingArguments`."""
_EARLIER_ARGUMENTS = _names(
    "evaluation_strategy warmup_ratio group_by_length overwrite_output_dir fp16_opt_level fp16_backend no_cuda "
    "logging_dir save_safetensors per_gpu_eval_batch_size eval_batch_size train_epochs num_epochs max_train_steps "
    "num_train_steps num_warmup_steps max_seq_length gradient_clip_algorithm"
)
_ACCELERATE = _names(
    "compute_environment distributed_type num_processes num_machines machine_rank main_process_ip main_process_port "
    "main_training_function rdzv_backend same_network downcast_bf16 gpu_ids dynamo_config dynamo_backend "
    "enable_cpu_affinity deepspeed_config_file deepspeed_hostfile deepspeed_multinode_launcher "
    "deepspeed_moe_layer_cls_names zero3_init_flag use_deepspeed use_fsdp"
)
_FSDP = _names(
    "fsdp_version fsdp_sharding_strategy fsdp_offload_params fsdp_auto_wrap_policy auto_wrap_policy "
    "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap fsdp_backward_prefetch backward_prefetch "
    "fsdp_forward_prefetch forward_prefetch fsdp_reshard_after_forward reshard_after_forward limit_all_gathers "
    "fsdp_use_orig_params use_orig_params fsdp_sync_module_states sync_module_states "
    "fsdp_cpu_ram_efficient_loading cpu_ram_efficient_loading fsdp_state_dict_type fsdp_activation_checkpointing "
    "fsdp_min_num_params min_num_params offload_params"
)
OWNERS: Mapping[str, str] = {
    **dict.fromkeys(_ACCELERATE, "a setting of accelerate"),
    **dict.fromkeys(_FSDP, "a setting of FSDP"),
    **dict.fromkeys((*TRAINING_ARGUMENTS, *_EARLIER_ARGUMENTS), "an argument of the script"),
}
"""Name -> the tool it belongs to."""

FOREIGN = frozenset({"deepspeed", "project", "debug"})
"""Arguments whose names other programs use for their own sections."""
