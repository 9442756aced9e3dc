"""The support table against DeepSpeed's schema, the typed fields and torch's names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor as HfAdafactor

from hf_dist.config.arguments import (
    DEEPSPEED_SCHEDULES,
    ONE_BIT_OPTIMIZERS,
    OPTIMIZER_ARGUMENTS,
    REQUIRED,
    TORCH_SCHEDULES,
)
from hf_dist.config.params import REFUSED_OPTIMIZERS, REFUSED_SCHEDULES
from hf_dist.config.rows import Status, is_off
from hf_dist.config.schema import fields
from hf_dist.config.spelling import closest, distance
from hf_dist.config.support import SECTION_ALIASES, STRICT, SUPPORT
from hf_dist.config.unknown import SECTIONS, known_keys
from hf_dist.optim import cycles, schedules
from hf_dist.optim.lamb import Lamb
from hf_dist.optim.lion import Lion
from hf_dist.optim.onebit_adam import OneBitAdam, ZeroOneAdam
from hf_dist.optim.onebit_lamb import OneBitLamb, Ratios
from tests.test_architecture import parse, python_files

SCHEMA = Path(__file__).resolve().parents[3] / "shared" / "reference" / "config" / "schema.json"

ABBREVIATED = {
    "zero_optimization.prefetch_bucket_size": [
        f"zero_optimization.{key}"
        for key in (
            *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
            *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
            *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
        )
    ],
    "curriculum_learning": [
        f"curriculum_learning.{key}"
        for key in ("enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type")
    ],
    "progressive_layer_drop": [f"progressive_layer_drop.{key}" for key in ("enabled", "theta", "gamma")],
    "bf16.loss_scale": [
        f"bf16.{key}"
        for key in (
            *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast"),
        )
    ],
    "tensor_parallel.tensor_parallel.tp_size (alias tp.tp_size)": ["tensor_parallel.tensor_parallel.tp_size"],
    "tensor_parallel.tensor_parallel.mpu / tp_group": [
        "tensor_parallel.tensor_parallel.mpu",
        "tensor_parallel.tensor_parallel.tp_group",
    ],
    "tensor_parallel.replace_with_kernel_inject (alias kernel_inject)": [
        "tensor_parallel.replace_with_kernel_inject",
        "tensor_parallel.kernel_inject",
    ],
}
"""Rows of the schema that stand for several keys."""

OURS = {
    *(
        f"hf_dist.{key}"
        for key in (
            *("strict", "save_on_signal", "check_load", "lazy_load", "sequence_parallel", "sequence_regions"),
            *("router_loss", "optimizer_over"),
            *("memory_budget", "tiled_loss", "stall_report_seconds", "optimizer_in_backward", "reduce_once_per_window"),
            *("stop_if_not_finite", "metrics_port", "data_lanes", "log_rows"),
            *("stochastic_rounding", "log_measurements"),
            "roles",
            *("profile", "profile.steps", "profile.ranks", "profile.output_path"),
            "fp8",
            *(f"fp8.{key}" for key in ("enabled", "recipe", "skip", "gathers", "casts", "emulate")),
            "wires",
            *(f"wires.{key}" for key in ("weights", "frozen_weights", "second_copy", "gradients", "copies")),
            *(f"wires.{key}" for key in ("meetings", "stages", "block", "error_feedback", "machine", "powersgd")),
            *(f"wires.powersgd.{key}" for key in ("rank", "start_step", "error_feedback", "warm_start")),
            "wires.powersgd.min_compression_rate",
        )
    ),
    *(f"pipeline.{key}" for key in ("schedule", "virtual_stages", "reshard_per_microbatch")),
    *(f"activation_checkpointing.{key}" for key in ("every_n_layers", "selective", "mlp_tiles")),
    "strict_config",
    "fp16.fp16",
    *(
        f"local_sgd.{key}"
        for key in (
            "every",
            "outer_lr",
            "outer_momentum",
            "nesterov",
            "fragments",
            "overlap",
            "mix",
            "mode",
            "dynamic_steps",
        )
    ),
    *(
        f"curriculum_learning.schedule_config{key}"
        for key in ("", ".total_curriculum_step", ".difficulty_step", ".root_degree", ".difficulty", ".max_step")
    ),
    *(f"checkpoint.{key}" for key in ("async_save", "max_shard_size", "verify")),
    *(f"zero_optimization.leaf_module.{key}" for key in ("classes", "names", "name_suffixes")),
}
"""Keys of our table that the schema lists only inside another row."""


def schema_rows() -> list[dict[str, Any]]:
    if not SCHEMA.exists():
        pytest.skip("the schema table is not here")
    rows: list[dict[str, Any]] = json.loads(SCHEMA.read_text())["rows"]
    return rows


def test_every_key_of_the_schema_has_a_row_and_no_row_is_invented() -> None:
    keys = {key for row in schema_rows() for key in ABBREVIATED.get(row["key"], [row["key"]])}
    assert keys - set(SUPPORT) == set()
    assert set(SUPPORT) - keys == OURS


def test_rows_agree_with_what_the_schema_recommends() -> None:
    """What the schema rejects is refused or belongs to a section that is; what it only notes is not refused."""
    wrong = []
    for row in schema_rows():
        for key in ABBREVIATED.get(row["key"], [row["key"]]):
            support = SUPPORT[SUPPORT[key].target or key]
            gated = f"{key.split('.')[0]}.enabled" in SUPPORT and key.split(".")[0] == "expert_parallel"
            if row["rec"] == "REJECT" and support.status is not Status.REFUSED and not gated:
                wrong.append((key, "is rejected by the schema"))
            if row["rec"] == "NOTE" and support.status is Status.REFUSED:
                wrong.append((key, "is a note in the schema"))
    one_bit = frozenset().union(*(OPTIMIZER_ARGUMENTS[name] for name in ONE_BIT_OPTIMIZERS))
    served = {"hybrid_engine.enabled", "elasticity.enabled", "autotuning.enabled", "data_efficiency.enabled"}
    served |= {
        "data_efficiency.data_sampling",
        *ABBREVIATED["curriculum_learning"],
        *ABBREVIATED["progressive_layer_drop"],
        "zero_optimization.zero_quantized_nontrainable_weights",
        *(f"optimizer.params.{name}" for name in one_bit - OPTIMIZER_ARGUMENTS["AdamW"]),
    }
    assert [(key, what) for key, what in wrong if key not in served] == [
        ("optimizer.params.amsgrad", "is rejected by the schema"),  # refused unless torch_adam, see params.py
        ("zero_optimization.legacy_stage1", "is a note in the schema"),  # only true is refused
    ]


def test_every_row_says_what_its_status_needs() -> None:
    for key, support in SUPPORT.items():
        if support.status is Status.REFUSED:
            assert support.reason.startswith(("is ", "belongs ", "no longer ")), key
            assert support.fix.endswith("."), key
        if support.status is Status.NO_EFFECT:
            assert support.reason and not support.reason.endswith("."), key
        if support.status is Status.MAPPED:
            assert SUPPORT[support.target].status is not Status.MAPPED, key


def test_a_used_key_is_a_typed_field_and_every_field_is_used() -> None:
    leaves = {path for path in fields() if path not in SECTIONS}
    used = {key for key, support in SUPPORT.items() if support.status is Status.USED and key not in SECTIONS}
    free = {key for key in used if key.startswith(("optimizer.params.", "scheduler.params."))}
    assert used - free == leaves


def test_every_field_is_read_somewhere() -> None:
    """What nothing reads is a key without effect, and has no field."""
    nodes = (node for path in python_files("hf_dist") for node in ast.walk(parse(path)))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {path for path in fields() if path.rpartition(".")[2] not in read} == set()


def test_sections_named_elsewhere_exist() -> None:
    assert set(STRICT) <= SECTIONS
    assert all(target in SECTIONS for target in SECTION_ALIASES.values())
    assert {"stage", "offload_param", "leaf_module"} <= known_keys("zero_optimization")
    assert {"fp16", "train_batch_size", "timers"} <= known_keys("")


DEEPSPEED_SWITCHES = {"torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states"}


def signature(cls: type) -> dict[str, inspect.Parameter]:
    """The constructor's parameters that JSON can give, without the first."""
    found = list(inspect.signature(cls).parameters.items())[1:]
    return {name: parameter for name, parameter in found if name != "scale_fn"}


def test_optimizer_names_and_arguments_are_those_of_torch() -> None:
    existing = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert set(OPTIMIZER_ARGUMENTS) - {"Lion", "Lamb", *ONE_BIT_OPTIMIZERS} <= existing
    assert existing <= {*OPTIMIZER_ARGUMENTS, *REFUSED_OPTIMIZERS}
    own: dict[str, type] = {"Lion": Lion, "Lamb": Lamb, "Adafactor": HfAdafactor}
    own |= {"OneBitAdam": OneBitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OneBitLamb}
    idle = {"cuda_aware", "comm_backend_name", "local_step_scaler", "local_step_clipper"}
    for name, arguments in OPTIMIZER_ARGUMENTS.items():
        if name == "Muon":  # DeepSpeed's
            continue
        ours = set(signature(own.get(name) or getattr(torch.optim, name)))
        ours |= (
            {"max_grad_norm"} if name in ("Lamb", *ONE_BIT_OPTIMIZERS) else set()
        )  # refused with what to set instead
        ours |= idle & arguments  # DeepSpeed's, of no effect
        ours = (
            ours - {"ratios"} | {field.name for field in dataclasses.fields(Ratios)} if name == "OneBitLamb" else ours
        )
        ours -= {"decoupled_weight_decay"} if name == "Adam" else set()  # "adam_w_mode" says it
        assert arguments - DEEPSPEED_SWITCHES == ours - DEEPSPEED_SWITCHES, name


def test_schedule_names_and_arguments_are_those_of_torch() -> None:
    module = torch.optim.lr_scheduler
    existing = {
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, module.LRScheduler) and not name.startswith(("_", "LRScheduler"))
    }
    assert existing == {*TORCH_SCHEDULES, *REFUSED_SCHEDULES}
    for name, arguments in (*TORCH_SCHEDULES.items(), *DEEPSPEED_SCHEDULES.items()):
        parameters = signature(getattr(module, name, None) or getattr(schedules, name, None) or getattr(cycles, name))
        assert set(arguments) == set(parameters), name
        required = {key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
        assert required == set(REQUIRED.get(name, ())), name


@pytest.mark.parametrize("value", [None, False, 0, "", "none", "false", {}, {"enabled": False}, {"a": {"enabled": 0}}])
def test_a_value_that_asks_for_nothing_is_off(value: Any) -> None:
    assert is_off(value)


@pytest.mark.parametrize("value", [True, 1, "true", {"enabled": True}, {"a": {"b": {"enabled": "true"}}}])
def test_a_value_that_asks_for_something_is_not_off(value: Any) -> None:
    assert not is_off(value)


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [("stage", "stge", 1), ("stage", "satge", 1), ("abc", "abc", 0), ("", "ab", 2), ("fp16", "bf16", 2)],
)
def test_distance_counts_edits_and_swaps(a: str, b: str, edits: int) -> None:
    assert distance(a, b) == distance(b, a) == edits


def test_a_near_miss_is_at_most_two_edits_away_and_one_for_short_names() -> None:
    assert closest("Gradient-Cliping", ["gradient_clipping", "fp16"]) == "gradient_clipping"
    assert closest("fp61", ["fp16", "bf16"]) == "fp16"
    assert closest("norm", ["amp", "aio"]) is None
    assert closest("4", ["1"]) is None
