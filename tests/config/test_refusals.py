"""What cannot be together: the list in code is the table in the README, each row is refused, and nothing else is."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest

from hf_dist.config import load_config
from hf_dist.config.refusals import ELSEWHERE, REFUSALS, Elsewhere, Refusal, refuse, table
from hf_dist.errors import ConfigError
from tests.config.test_remedies import check, problems

PACKAGE = Path(__file__).resolve().parents[2] / "hf_dist"
BEGIN, END = "<!-- begin: hf_dist.config.refusals -->\n", "\n<!-- end -->"
FEATURES: dict[str, dict[str, Any]] = {
    "stages": {"pipeline": {"stages": 2}},
    "interleaved": {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}},
    "zb_h1": {"pipeline": {"stages": 2, "schedule": "zb_h1"}},
    "slices": {"tensor_parallel": {"autotp_size": 2}},
    "regions": {"tensor_parallel": {"autotp_size": 2}, "hf_dist": {"sequence_regions": True}},
    "sequences": {"sequence_parallel_size": 2},
    "ring": {"sequence_parallel_size": 2, "hf_dist": {"sequence_parallel": "ring"}},
    "experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "copies": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    "second copy": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "optimizer on the host": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "weights on disk": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "disk"}}},
    "budget": {"zero_optimization": {"stage": 3}, "hf_dist": {"memory_budget": "auto"}},
    "once": {"zero_optimization": {"stage": 3}, "hf_dist": {"reduce_once_per_window": True}},
    "step in backward": {"hf_dist": {"optimizer_in_backward": True}},
    "clipping": {"gradient_clipping": 1.0},
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
    "compile": {"compile": {"enabled": True}},
    "checkpointing": {"activation_checkpointing": {"cpu_checkpointing": True, "mlp_tiles": 2}},
    "layer drop": {"progressive_layer_drop": {"enabled": True}},
    "growing lengths": {
        "curriculum_learning": {
            "enabled": True,
            "min_difficulty": 8,
            "max_difficulty": 64,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
        }
    },
    "tiled loss": {"hf_dist": {"tiled_loss": True}},
    "background saves": {"checkpoint": {"async_save": True}},
}
REFUSED_PAIRS = {
    *(
        ("experts", "second copy"),
        ("fp16", "bf16"),
        ("interleaved", "zb_h1"),
    ),
    *((cut, "compile") for cut in ("stages", "interleaved", "zb_h1", "slices", "regions")),
    *((cut, "layer drop") for cut in ("stages", "interleaved", "zb_h1")),
    *(("step in backward", other) for other in ("clipping", "fp16")),
}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Sections of all parts in one file; of a key that several have, the last."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = {**found[key], **value} if isinstance(value, dict) and key in found else value
    return found


def test_the_readme_has_the_table() -> None:
    text = (PACKAGE / "config" / "README.md").read_text(encoding="utf-8")
    start = text.index(BEGIN) + len(BEGIN)
    assert text[start : text.index(END, start)] == "\n".join(table())


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.path}-{row.beside}")
def test_each_alone_is_fine_and_both_are_refused_with_a_remedy_that_works(row: Refusal) -> None:
    assert not problems(dict(row.one)) and not problems(dict(row.two))
    both = merged(row.one, row.two)
    (found,) = problems(both)
    assert found.path == row.path and found.fix.startswith(row.fix)
    check(both)


def test_what_arguments_add_is_refused_too() -> None:
    config = load_config({"pipeline": {"stages": 2}}).replaced({"compile.enabled": (True, "argument")})
    with pytest.raises(
        ConfigError, match=r"compile\.enabled: true is not available together with pipeline\.stages above 1"
    ):
        refuse(config)


@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids="+".join)
def test_a_pair_of_features_loads_unless_it_is_a_row(pair: tuple[str, str]) -> None:
    assert bool(problems(merged(*(FEATURES[name] for name in pair)))) == (pair in REFUSED_PAIRS)


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: f"{row.setting}-{row.beside}")
def test_what_model_or_script_decide_is_raised_where_the_table_says(row: Elsewhere) -> None:
    tree = ast.parse((PACKAGE / row.file).read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert any(row.words in text for text in texts)
