"""The arguments of every optimizer and schedule that a config can name. Kept by hand, so that reading needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

_KERNELS = "foreach maximize differentiable"
_DECAY = "lr weight_decay"
_ADAM = f"{_DECAY} betas eps amsgrad capturable fused {_KERNELS}"
_DEEPSPEED_ADAM = "torch_adam adam_w_mode bias_correction set_grad_none fp32_optimizer_states"
_ONE_BIT = f"{_DECAY} betas eps bias_correction eps_inside_sqrt max_grad_norm cuda_aware comm_backend_name"
_LATER_ADAM = f"{_DECAY} betas eps capturable {_KERNELS}"

OPTIMIZER_ARGUMENTS: Mapping[str, frozenset[str]] = {
    name: frozenset(arguments.split())
    for name, arguments in {
        "Adam": f"{_ADAM} {_DEEPSPEED_ADAM}",
        "AdamW": f"{_ADAM} {_DEEPSPEED_ADAM}",
        "Adagrad": f"{_DECAY} lr_decay initial_accumulator_value eps fused fp32_optimizer_states {_KERNELS}",
        "Muon": f"{_DECAY} muon_lr adam_lr momentum betas eps adjust_lr_fn ns_dtype ns_method",
        "Lamb": f"{_DECAY} betas eps bias_correction eps_inside_sqrt max_coeff min_coeff max_grad_norm",
        "Adafactor": f"{_DECAY} eps clip_threshold decay_rate beta1 scale_parameter relative_step warmup_init",
        "OneBitAdam": f"{_ONE_BIT} freeze_step",
        "ZeroOneAdam": f"{_ONE_BIT} var_freeze_step var_update_scaler local_step_scaler local_step_clipper",
        "OneBitLamb": f"{_ONE_BIT} freeze_step max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold",
        "Lion": f"{_DECAY} betas set_grad_none fp32_optimizer_states",
        "SGD": f"{_DECAY} momentum dampening nesterov fused {_KERNELS}",
        "Adadelta": f"{_DECAY} rho eps capturable {_KERNELS}",
        "Adamax": _LATER_ADAM,
        "ASGD": f"{_DECAY} lambd alpha t0 capturable {_KERNELS}",
        "NAdam": f"{_LATER_ADAM} momentum_decay decoupled_weight_decay",
        "RAdam": f"{_LATER_ADAM} decoupled_weight_decay",
        "RMSprop": f"{_DECAY} alpha eps momentum centered capturable {_KERNELS}",
        "Rprop": f"lr etas step_sizes capturable {_KERNELS}",
    }.items()
}
"""Classes of torch.optim with DeepSpeed's switches, Lion, and those that need whole tensors: Muon, Lamb, HF's Adafactor.
1-bit optimizers are written here too."""

ONE_BIT_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""Optimizers whose ranks send momentum in place of gradients, once the variance is settled."""

_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
_ONE_CYCLE = (
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
    "last_batch_iteration"
)
DEEPSPEED_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "WarmupLR": tuple(_WARMUP.split()),
    "WarmupDecayLR": ("total_num_steps", *_WARMUP.split()),
    "WarmupCosineLR": (
        *("total_num_steps", "warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "warmup_type"),
        "last_batch_iteration",
    ),
    "OneCycle": tuple(_ONE_CYCLE.split()),
    "LRRangeTest": (
        *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
        "last_batch_iteration",
    ),
}
"""DeepSpeed's own schedules."""

TORCH_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    name: (*arguments.split(), "last_epoch")
    for name, arguments in {
        "ConstantLR": "factor total_iters",
        "LinearLR": "start_factor end_factor total_iters",
        "ExponentialLR": "gamma",
        "PolynomialLR": "total_iters power",
        "CosineAnnealingLR": "T_max eta_min",
        "CosineAnnealingWarmRestarts": "T_0 T_mult eta_min",
        "StepLR": "step_size gamma",
        "MultiStepLR": "milestones gamma",
        "CyclicLR": (
            "base_lr max_lr step_size_up step_size_down mode gamma scale_mode cycle_momentum base_momentum max_momentum"
        ),
        "OneCycleLR": (
            "max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy cycle_momentum base_momentum "
            "max_momentum div_factor final_div_factor three_phase"
        ),
    }.items()
}
"""Classes of torch.optim.lr_scheduler that a JSON file can describe."""

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "ExponentialLR": ("gamma",),
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "StepLR": ("step_size",),
    "MultiStepLR": ("milestones",),
    "CyclicLR": ("base_lr", "max_lr"),
    "OneCycleLR": ("max_lr",),
}
"""Arguments without a default."""
