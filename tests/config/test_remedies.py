"""Every remedy works: it is carried out as written, and the file is right then. So one round shows all that is wrong."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from hf_dist.config import AutoSources, load_config, read_config, resolve
from hf_dist.config.params import REFUSED_OPTIMIZERS, REFUSED_SCHEDULES
from hf_dist.config.rows import Status
from hf_dist.config.support import SUPPORT
from hf_dist.errors import ConfigError, Problem
from tests.config import test_load, test_mutations, test_slips
from tests.config.remedies import mended, num_ways, put

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
NUM_MUTATIONS = 200


def problems(data: dict[str, Any]) -> list[Problem]:
    """Everything wrong; empty when it loads."""
    try:
        load_config(data)
    except ConfigError as error:
        return error.problems
    return []


def check(data: dict[str, Any]) -> None:
    """Carry out every remedy of `data`, each way it names."""
    found = problems(data)
    assert found, data
    for way in range(num_ways(found)):
        result = mended(data, found, way)
        left = problems(result)
        assert not left, "\n".join(["after", *map(str, found), "there is still", *map(str, left), str(result)])


ASKING = (0.5, True, 2, "sum", {"enabled": True}, [1])
"""Values of which at least one asks a refused key for something."""


def refused() -> dict[str, Any]:
    """Path -> a value that the table refuses there."""
    rows = {path: row for path, row in SUPPORT.items() if row.status is Status.REFUSED and not path.endswith("*")}
    return {path: next(value for value in ASKING if not row.accepted(value)) for path, row in rows.items()}


@pytest.mark.parametrize("path", refused())
def test_of_a_refused_key(path: str) -> None:
    data: dict[str, Any] = {}
    if path.startswith("optimizer.params"):
        data = {"optimizer": {"type": "AdamW"}}
    put(data, path, refused()[path])
    if path.startswith("zero_optimization.zenflow."):
        pytest.skip("a part of a section that is refused as a whole")
    check(data)


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_of_a_refused_optimizer_with_its_own_parameters(name: str) -> None:
    params = {
        "lr": 1e-4,
        "freeze_step": 3,
        "cuda_aware": False,
        "max_coeff": 0.3,
        "coeff_beta": 0.9,
        "ns_method": "gram",
    }
    check({"optimizer": {"type": name, "params": params}})


@pytest.mark.parametrize("name", [*REFUSED_SCHEDULES, "Nonsense"])
def test_of_a_refused_schedule(name: str) -> None:
    check({"scheduler": {"type": name, "params": {"factor": 0.1}}})


WRONG = [source for mark in test_load.test_one_wrong_setting_is_one_sentence.pytestmark for source, _ in mark.args[1]]


@pytest.mark.parametrize("data", WRONG, ids=str)
def test_of_every_wrong_setting_with_a_sentence_of_its_own(data: dict[str, Any]) -> None:
    check(data)


@pytest.mark.parametrize("key", test_slips.TOP_LEVEL)
def test_of_a_slip_at_the_top_level(key: str) -> None:
    check({**test_slips.GOOD, key: test_slips.TOP_LEVEL[key][0]})
    check({key: test_slips.TOP_LEVEL[key][0]})


@pytest.mark.parametrize("path", test_slips.INSIDE)
def test_of_a_slip_in_a_section(path: str) -> None:
    data = copy.deepcopy(test_slips.GOOD)
    put(data, path, test_slips.INSIDE[path][0])
    check(data)


@pytest.mark.parametrize("key", test_slips.VALUES)
def test_of_a_value_where_a_section_belongs(key: str) -> None:
    for value, _ in test_slips.VALUES[key]:
        check({"zero_optimization": {"stage": 3, key: value}} if "offload" in key else {key: value})


@pytest.mark.parametrize(
    "data",
    [
        {"deepspeed": {"zero_optimization": {"stge": 3}, "fp16": {"enabled": "maybe"}}},
        {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 280},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "total_num_steps": 10}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_stps": 1, "total_num_steps": "x"}}},
        {"zero_optimization": {"stage": 7, "offload_optimizer": {"device": "cpu", "pin_memry": True}}, "fp16": True},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        {"quantize_training": {"enabled": True, "quantize_verbose": True}, "eigenvalue": {"enabled": True}},
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}},
    ],
    ids=str,
)
def test_of_several_at_once(data: dict[str, Any]) -> None:
    check(data)


ARGUMENTS = AutoSources(
    data_world_size=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    max_grad_norm=1.0,
    learning_rate=5e-5,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
    weight_decay=0.0,
    fp16=True,
    bf16=False,
    warmup_steps=1,
    num_training_steps=100,
    hidden_size=8,
)


def test_of_every_disagreement_with_the_arguments_at_once(tmp_path: Path) -> None:
    data = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": [0, 0], "eps": 1, "weight_decay": 1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1, "warmup_num_steps": 5, "total_num_steps": 5},
        },
    }
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(data), ARGUMENTS)
    found = caught.value.problems
    assert len(found) == 11 and all('Set it to "auto"' in problem.fix for problem in found), found
    for problem in found:
        put(data, problem.path, "auto")
    put(data, "train_batch_size", "auto")
    resolve(load_config(data), ARGUMENTS, final=True)


def test_of_random_slips() -> None:
    draw, done = random.Random(3), 0
    while done < NUM_MUTATIONS:
        config = copy.deepcopy(draw.choice(test_mutations.CONFIGS))
        for _ in range(draw.randint(1, 3)):
            test_slips.slipped(config, draw)
        if problems(config):
            done += 1
            check(config)


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus is not here")
def test_of_every_refused_file_of_public_projects() -> None:
    for path in sorted(CORPUS.glob("*.json")):
        data = read_config(path).data
        if problems(data):
            check(data)
