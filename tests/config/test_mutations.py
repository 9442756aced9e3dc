"""500 slips in valid configs: a key misspelled or moved, a value of the wrong type or out of range."""

from __future__ import annotations

import copy
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hf_dist.config import load_config
from hf_dist.config.unknown import known_keys
from hf_dist.errors import ConfigError

NUM_MUTATIONS = 500
MIN_CAUGHT = 0.98

CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": "auto"},
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_param": {"device": "none", "pin_memory": True},
            "offload_optimizer": {"device": "none", "pin_memory": True},
        },
    },
    {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "adam_w_mode": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100, "warmup_type": "linear"},
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_bucket_size": 5e8,
            "reduce_bucket_size": 5e8,
            "reduce_scatter": True,
            "allgather_partitions": True,
            "round_robin_gradients": True,
            "ignore_unused_parameters": True,
        },
        "activation_checkpointing": {"cpu_checkpointing": False, "partition_activations": False},
        "tensorboard": {"enabled": False, "output_path": "runs", "job_name": "test"},
        "checkpoint": {"async_save": True, "max_shard_size": "5GB"},
        "hf_dist": {"save_on_signal": True, "check_load": False},
    },
)

Mutation = tuple[str, str, dict[str, Any], tuple[str, ...]]
"""Kind, what was done, the config, and the words of which the problem must name one."""


def leaves(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value that is not a section."""
    for key, value in node.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]


def section_of(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object that holds the last key of `path`."""
    for part in path[:-1]:
        config = config[part]
    return config


def misspelled(key: str, draw: random.Random) -> str:
    """`key` with one letter left out, doubled, replaced, or swapped with the next."""
    at = draw.randrange(len(key) - 1)
    how = draw.choice(("leave out", "double", "replace", "swap"))
    if how == "leave out":
        return key[:at] + key[at + 1 :]
    if how == "double":
        return key[: at + 1] + key[at:]
    if how == "replace":
        return key[:at] + draw.choice(string.ascii_lowercase) + key[at + 1 :]
    return key[:at] + key[at + 1] + key[at] + key[at + 2 :]


def misspell(config: dict[str, Any], draw: random.Random) -> Mutation | None:
    """A key, of a section or of a value, with one slip."""
    path = draw.choice(list(leaves(config)))
    path = path[: draw.randint(1, len(path))]
    home, key = section_of(config, path), path[-1]
    slip = misspelled(key, draw)
    if slip == key or slip in home or slip in known_keys(".".join(path[:-1])):
        return None
    home[slip] = home.pop(key)
    return "misspelled", f"{'.'.join(path)} -> {slip}", config, (f'"{key}"',)


def move(config: dict[str, Any], draw: random.Random) -> Mutation | None:
    """A key in another section, or at the top."""
    path = draw.choice([path for path in leaves(config) if path[-1] not in ("enabled", "type", "device", "params")])
    sections = [(), *sorted({where[:-1] for where in leaves(config) if len(where) > 1})]
    target = draw.choice([where for where in sections if where != path[:-1]])
    key = path[-1]
    home = section_of(config, (*target, key))
    if key in home or key in known_keys(".".join(target)):
        return None
    home[key] = section_of(config, path).pop(key)
    return "moved", f"{'.'.join(path)} -> {'.'.join(target) or 'top'}", config, (".".join((*target, key)),)


def change(wrong: Callable[[Any, random.Random], Any], kind: str) -> Callable[..., Mutation | None]:
    """The mutation that gives a key a value which `wrong` makes of its own; None where there is no such value."""

    def mutate(config: dict[str, Any], draw: random.Random) -> Mutation | None:
        path = draw.choice(list(leaves(config)))
        home = section_of(config, path)
        value = wrong(home[path[-1]], draw)
        if value is None:
            return None
        home[path[-1]] = value
        return kind, f"{'.'.join(path)} = {value!r}", config, (".".join(path),)

    return mutate


def of_wrong_type(value: Any, draw: random.Random) -> Any:
    """A value of a type that the key cannot have; one that is left to "auto" may be anything but a word or a list."""
    if isinstance(value, str) and value != "auto":
        return draw.choice(({"a": 1}, [1], True))
    return draw.choice(("yes please", {"value": 1}, ["x"]))


def out_of_range(value: Any, draw: random.Random) -> Any:
    """A negative number, a fourth stage, a word that is none of those allowed."""
    if isinstance(value, bool) or value == "auto":
        return None
    if isinstance(value, str):
        return None if value in ("runs", "test", "5GB") else value + "x"
    return [1.5, -1] if isinstance(value, list) else -7


MUTATIONS = (misspell, move, change(of_wrong_type, "wrong type"), change(out_of_range, "out of range"))


def mutations() -> Iterator[Mutation]:
    """The same `NUM_MUTATIONS` mutations in every run."""
    draw, done = random.Random(0), 0
    while done < NUM_MUTATIONS:
        config = copy.deepcopy(draw.choice(CONFIGS))
        mutation = draw.choice(MUTATIONS)(config, draw)
        if mutation is not None:
            done += 1
            yield mutation


def test_the_configs_are_valid_before() -> None:
    for config in CONFIGS:
        load_config(config)


def test_nearly_every_slip_is_caught_with_the_right_key_named() -> None:
    missed: list[str] = []
    counts: Counter[str] = Counter()
    for kind, what, config, words in mutations():
        counts[kind] += 1
        try:
            load_config(config)
        except ConfigError as error:
            if any(word in str(problem) for problem in error.problems for word in words):
                continue
            missed.append(f"{kind}: {what}: named {error}")
        else:
            missed.append(f"{kind}: {what}: accepted")
    print(dict(counts), "missed:", *missed, sep="\n  ")
    assert min(counts.values()) > NUM_MUTATIONS / 8
    assert len(missed) <= (1 - MIN_CAUGHT) * NUM_MUTATIONS, "\n".join(missed)
