"""accelerate's YAML and environment, and the Trainer's fsdp arguments: one source of truth, or a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dist.config import AutoSources, LauncherSettings, load_config, resolve
from hf_dist.config.convert import from_accelerate, from_fsdp_arguments
from hf_dist.errors import ConfigError

ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "MoeBlock, Other",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
}


def launcher(**changes: str) -> LauncherSettings:
    found = LauncherSettings.from_environment({**ENVIRONMENT, **changes})
    assert found is not None
    return found


def problems(source: Any, **changes: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, launcher=launcher(**changes))
    return [str(problem) for problem in caught.value.problems]


def test_without_deepspeed_the_launcher_decides_nothing() -> None:
    assert LauncherSettings.from_environment({**ENVIRONMENT, "ACCELERATE_USE_DEEPSPEED": "false"}) is None
    assert LauncherSettings.from_environment({}) is None


def test_the_environment_alone_is_a_config() -> None:
    config = load_config(launcher().base_config(), launcher=launcher())
    assert (config.zero_optimization.stage, config.gradient_accumulation_steps) == (3, 4)
    assert config.zero_optimization.leaf_module.classes == ("MoeBlock", "Other")
    plain = LauncherSettings.from_environment({"ACCELERATE_USE_DEEPSPEED": "1"})
    assert plain is not None and load_config(plain.base_config(), launcher=plain).zero_optimization.stage == 2


def test_the_config_file_that_the_launcher_names_is_known() -> None:
    assert launcher(ACCELERATE_DEEPSPEED_CONFIG_FILE="ds.json").config_file == "ds.json"
    assert launcher().config_file is None


def test_the_launcher_fills_auto_and_missing_keys_and_the_source_says_so() -> None:
    config = load_config({"zero_optimization": {"stage": "auto"}}, launcher=launcher())
    assert config.zero_optimization.stage == 3
    assert config.source_of("zero_optimization.stage") == "launcher <- ACCELERATE_DEEPSPEED_ZERO_STAGE"
    assert config.source_of("gradient_accumulation_steps") == "launcher <- ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def test_auto_for_the_stage_without_a_launcher_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r'zero_optimization.stage: "auto" has no source to be filled from'):
        load_config({"zero_optimization": {"stage": "auto"}})


def test_file_and_launcher_that_disagree_are_both_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n "gradient_accumulation_steps": "4",\n "zero_optimization": {\n  "stage": 2}}')
    assert problems(path) == [
        f"{path}:4: zero_optimization.stage: 2 differs from ACCELERATE_DEEPSPEED_ZERO_STAGE=3, which accelerate's "
        'configuration set. Set it to "auto" on line 4, or delete "zero_stage" from the configuration of accelerate.'
    ]


def test_launcher_and_training_arguments_that_disagree_are_both_named() -> None:
    config = load_config({}, launcher=launcher())
    sources = AutoSources(per_device_train_batch_size=1, gradient_accumulation_steps=2, data_world_size=4)
    with pytest.raises(ConfigError) as caught:
        resolve(config, sources)
    assert str(caught.value) == (
        "gradient_accumulation_steps: 4 differs from TrainingArguments.gradient_accumulation_steps = 2. Delete "
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS (the configuration of accelerate), or pass "
        "--gradient_accumulation_steps 4."
    )


@pytest.mark.parametrize("broken", [{"zero_optimization": 3}, {"zero_optimization": {"leaf_module": "x"}}])
def test_a_section_that_is_no_object_is_still_one_config_error(broken: dict[str, Any]) -> None:
    assert any("is not an object" in problem for problem in problems(broken))


def test_the_deepspeed_section_of_a_yaml_becomes_a_config() -> None:
    made = from_accelerate(
        {
            "mixed_precision": "bf16",
            "deepspeed_config": {
                "zero_stage": 3,
                "gradient_accumulation_steps": 8,
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
                "deepspeed_multinode_launcher": "standard",
                "zero_optimization": {"reduce_bucket_size": "5e7"},
                "something_else": 1,
            },
        }
    )
    config = load_config(made.config)
    assert (config.zero_optimization.stage, config.zero_optimization.reduce_bucket_size) == (3, 50_000_000)
    assert (config.gradient_accumulation_steps, config.bf16.enabled) == (8, True)
    assert set(made.notes) == {
        *("zero3_init_flag", "deepspeed_multinode_launcher", "zero_optimization", "something_else"),
    }


@pytest.mark.parametrize(
    ("strategy", "stage", "shard_size"),
    [
        ("FULL_SHARD", 3, -1),
        (1, 3, -1),
        ("SHARD_GRAD_OP", 2, -1),
        ("NO_SHARD", 0, -1),
        ("HYBRID_SHARD", 3, 8),
        (True, 3, -1),
        (False, 2, -1),
    ],
)
def test_fsdp_strategies_are_stages(strategy: Any, stage: int, shard_size: int) -> None:
    key = "fsdp_reshard_after_forward" if isinstance(strategy, bool) else "fsdp_sharding_strategy"
    yaml = {"num_processes": 16, "num_machines": 2, "fsdp_config": {key: strategy, "fsdp_use_orig_params": True}}
    made = from_accelerate(yaml)
    zero = load_config(made.config).zero_optimization
    assert (zero.stage, zero.mics_shard_size) == (stage, shard_size)
    assert made.notes == {"fsdp_config.fsdp_use_orig_params": "parameters always stay the model's own"}


def test_the_fsdp_arguments_of_the_trainer_become_a_config() -> None:
    made = from_fsdp_arguments(
        "full_shard auto_wrap offload",
        {"transformer_layer_cls_to_wrap": ["Block"], "activation_checkpointing": True, "cpu_ram_efficient_loading": 0},
    )
    zero = made.config["zero_optimization"]
    assert zero == {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    assert made.config["hf_dist"] == {"lazy_load": False}
    assert made.config["activation_checkpointing"] == {"every_n_layers": 1}
    assert "offload_param" not in from_fsdp_arguments("shard_grad_op offload", {}).config["zero_optimization"]


def test_offload_without_sharding_is_left_out_with_a_reason() -> None:
    made = from_fsdp_arguments("no_shard offload", {})
    assert made.config["zero_optimization"] == {"stage": 0}
    assert "use stage 1, 2 or 3" in made.notes["fsdp_config.offload_params"]
    load_config(made.config)


def test_sizes_of_axes_are_carried_over() -> None:
    axes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    fsdp = {"fsdp_reshard_after_forward": True}
    made = from_accelerate({"fsdp_config": fsdp, "use_parallelism_config": True, "parallelism_config": axes})
    assert load_config(made.config).zero_optimization.mics_shard_size == 4 and not made.notes
    axes |= {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": "2", "parallelism_config_cp_backend": "x"}
    made = from_accelerate({"fsdp_config": fsdp, "parallelism_config": axes})
    assert made.config["tensor_parallel"] == {"autotp_size": 2} and made.config["sequence_parallel_size"] == 2
    assert made.config["zero_optimization"] == {"stage": 3, "mics_shard_size": 8}
    assert set(made.notes) == {"parallelism_config.parallelism_config_cp_backend"}
    made = from_accelerate({"deepspeed_config": {"zero_stage": 2}, "parallelism_config": {"dp_replicate_size": 2}})
    assert "stage 3" in made.notes["parallelism_config.dp_replicate_size"]


def test_templates_are_left_out_and_listed() -> None:
    fsdp = {"fsdp_sharding_strategy": "${STRATEGY}", "fsdp_offload_params": "{{ offload }}"}
    made = from_accelerate({"num_machines": "${N}", "num_processes": "<number>", "fsdp_config": fsdp})
    assert load_config(made.config).zero_optimization.stage == 3
    assert set(made.notes) == {
        *("num_machines", "num_processes", "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_offload_params"),
    }
    assert made.notes["num_machines"] == "${N} is a template: fill it in, and convert again"


def test_what_is_dropped_is_listed_and_compile_is_not() -> None:
    made = from_accelerate(
        {
            **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "megatron_lm_config": {}},
            "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
            "fsdp_config": {"fsdp_version": 2},
        }
    )
    assert load_config(made.config).compile.enabled
    assert made.notes == {
        "fsdp_config.fsdp_version": "there is one engine",
        "dynamo_config.dynamo_mode": "blocks are compiled in torch's default mode",
        "compute_environment": "stays with the launcher",
        "megatron_lm_config": "not a key that is known here",
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_accelerate({}), 'deepspeed_config: is missing, and so is "fsdp_config"'),
        (
            lambda: from_accelerate({"deepspeed_config": {"deepspeed_config_file": "ds.json"}}),
            "deepspeed_config.deepspeed_config_file: ds.json is the config already",
        ),
        (lambda: from_accelerate({"fsdp_config": "${X}"}), "fsdp_config: is a template. Fill it in first."),
        (lambda: from_accelerate({"fsdp_config": "x"}), "fsdp_config: x is not a section"),
        (lambda: from_fsdp_arguments("ful_shard", {}), 'Did you mean "full_shard"?'),
        (lambda: from_fsdp_arguments("", {"sharding_strategy": "SOME"}), "SOME has no counterpart"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
