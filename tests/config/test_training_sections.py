"""The batch plan of `elasticity`, the lengths of `curriculum_learning`, and what their sections need."""

from __future__ import annotations

from typing import Any

import pytest

from hf_dist.config import AutoSources, format_table, load_config, resolve, resolve_without_trainer
from hf_dist.config.curriculum import length_at
from hf_dist.config.elastic import elastic_batch, elastic_sizes
from hf_dist.config.training_sections import ElasticityConfig
from hf_dist.errors import ConfigError
from tests.config.test_load import messages

GOLDEN = ElasticityConfig(
    enabled=True, max_train_batch_size=10000, micro_batch_sizes=(8, 12, 16, 17), min_gpus=32, max_gpus=1500
)
COUNTS = [
    *(32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816, 1224),
]
ELASTIC: dict[str, Any] = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}
LINEAR: dict[str, Any] = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}


def test_the_global_batch_is_deepspeeds() -> None:
    """Golden numbers of DeepSpeed's own test of its plan."""
    assert elastic_batch(GOLDEN) == (9792, COUNTS)
    assert elastic_sizes(GOLDEN, 64).micro == 17


def test_no_batch_is_above_the_largest() -> None:
    section = ElasticityConfig(enabled=True, max_train_batch_size=40, micro_batch_sizes=(7, 9))
    assert elastic_batch(section)[0] == 36  # the sizes have 63 in common
    (message,) = messages({"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [4, 16]}})
    assert message.startswith('elasticity.micro_batch_sizes: [4, 16] has sizes above "max_train_batch_size" 8')


def test_of_batches_that_as_many_numbers_of_ranks_divide_the_preferred_one_is_taken() -> None:
    for prefers, batch in ((True, 100), (False, 96)):
        section = ElasticityConfig(
            enabled=True, max_train_batch_size=100, micro_batch_sizes=(2, 50), max_gpus=1, prefer_larger_batch=prefers
        )
        assert elastic_batch(section) == (batch, [1])


@pytest.mark.parametrize("ranks", COUNTS)
def test_the_global_batch_stays_at_every_number_of_ranks(ranks: int) -> None:
    sizes = elastic_sizes(GOLDEN, ranks)
    assert sizes.train == 9792 == (sizes.micro or 0) * sizes.accumulation * ranks
    assert sizes.micro in GOLDEN.micro_batch_sizes


def test_a_number_of_ranks_that_cannot_share_the_batch_is_told_its_neighbours() -> None:
    with pytest.raises(ConfigError) as caught:
        elastic_sizes(GOLDEN, 50)
    assert str(caught.value) == (
        "elasticity.micro_batch_sizes: [8, 12, 16, 17] cannot share 9792 samples among 50 data ranks, 32 to 1500. "
        "Start 36 or 48 or 51 or 64 data ranks, or change the sizes or bounds."
    )


def test_the_plan_decides_the_batch_whatever_the_arguments_say() -> None:
    config = load_config({"elasticity": ELASTIC})
    arguments = AutoSources(data_world_size=4, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    for resolved in (resolve(config, arguments), resolve_without_trainer(config, data_ranks=4)):
        sizes = (resolved.train_batch_size, resolved.train_micro_batch_size_per_gpu)
        assert (*sizes, resolved.gradient_accumulation_steps) == (48, 4, 3)
        assert "train_batch_size                 48      absent <- elasticity" in format_table(resolved)


def test_batch_sizes_beside_elasticity_are_refused_or_passed_over() -> None:
    data = {"elasticity": ELASTIC, "train_batch_size": 32, "gradient_accumulation_steps": "auto"}
    assert messages(data) == [
        'train_batch_size: 32 contradicts "elasticity", which decides the batch sizes. '
        'Remove the key, or set "elasticity.ignore_non_elastic_batch_info" to true.'
    ]
    data["elasticity"] = {**ELASTIC, "ignore_non_elastic_batch_info": True}
    resolved = resolve_without_trainer(load_config(data), data_ranks=2)
    assert resolved.train_batch_size == 48
    assert load_config({"elasticity": {**ELASTIC, "enabled": False}, "train_batch_size": 32}).train_batch_size == 32


def lengths(section: dict[str, Any], steps: int) -> list[int]:
    config = load_config({"curriculum_learning": section}).curriculum_learning
    return [length_at(config, step) for step in range(steps)]


def test_the_length_grows_as_deepspeeds_schedule_says() -> None:
    assert lengths(LINEAR, 12) == [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]
    assert lengths({**LINEAR, "min_difficulty": 20}, 3) == [
        24,
        24,
        32,
    ]  # never below the first multiple that is allowed
    root = {**LINEAR, "schedule_type": "fixed_root"}
    root["schedule_config"] = {**LINEAR["schedule_config"], "root_degree": 2}
    assert lengths(root, 10) == [24, 32, 32, 40, 40, 48, 48, 56, 56, 64]
    discrete = {**LINEAR, "schedule_type": "fixed_discrete"}
    discrete["schedule_config"] = {"difficulty": [8, 32, 64], "max_step": [2, 5]}
    assert lengths(discrete, 7) == [8, 8, 32, 32, 32, 64, 64]


def test_the_same_curriculum_under_data_efficiency() -> None:
    metric = {key: value for key, value in LINEAR.items() if key not in ("enabled", "curriculum_type")}
    metric |= {"index_to_sample_path": "x", "difficulty_type": "value", "clustering_type": "single_cluster"}

    def data(**metrics: Any) -> dict[str, Any]:
        learning = {"enabled": True, "curriculum_metrics": metrics}
        return {
            "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}
        }

    assert (
        load_config(data(seqlen=metric)).curriculum_learning
        == load_config({"curriculum_learning": LINEAR}).curriculum_learning
    )
    (message,) = messages(data(seqlen=metric, vocabularyrarity={"min_difficulty": 1}))
    assert message.startswith("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.vocabularyrarity: ")
    off = data(seqlen=metric)
    off["data_efficiency"]["data_sampling"]["enabled"] = False
    assert not load_config(off).curriculum_learning.enabled


def test_what_a_curriculum_needs_is_asked_for_at_once() -> None:
    found = messages({"curriculum_learning": {"enabled": True, "schedule_type": "fixed_root"}})
    assert [message.split(":")[0].rpartition(".")[2] for message in found] == [
        *("total_curriculum_step", "difficulty_step", "root_degree", "max_difficulty"),
    ]
    (message,) = messages({"curriculum_learning": {**LINEAR, "schedule_type": "custom"}})
    assert "is not one of fixed_linear, fixed_root, fixed_discrete" in message


def test_sections_for_other_commands_and_for_what_works_anyway_are_notes() -> None:
    config = load_config({"autotuning": {"enabled": True, "fast": True}, "hybrid_engine": {"enabled": True}})
    assert [(note.path, note.reason) for note in config.notes] == [
        ("autotuning", "read by `hf-dist tune`; training takes the other values of the file"),
        ("hybrid_engine", "model.generate() works on a sharded model by itself"),
    ]


def test_a_list_of_stages_is_for_tuning_and_training_takes_the_last() -> None:
    data = {"zero_optimization": {"stage": [0, 1, 3]}, "autotuning": {"enabled": True}}
    config = load_config(data)
    assert config.zero_optimization.stage == 3
    assert ("zero_optimization.stage", "[0, 1, 3] is read as 3; `hf-dist tune` tries them all") in [
        (note.path, note.reason) for note in config.notes
    ]
    assert messages({**data, "autotuning": {"enabled": False}})


def test_layer_drop_does_not_go_with_a_pipeline() -> None:
    data = {"progressive_layer_drop": {"enabled": True, "theta": 0.5}, "pipeline": {"stages": 2}}
    assert messages(data) == [
        'progressive_layer_drop.enabled: true is not available together with "pipeline.stages" above 1. Set it to false.'
    ]
