"""`hf-dist check` alarms for no right layout: families x layouts x precisions, each found equal to one process.

HF_DIST_FULL_GRID=1 python -m pytest tests/tools/test_checked_layouts.py                   # all cells
HF_DIST_FULL_GRID=1 python -m tests.mutants --tests tests/tools/test_checked_layouts.py    # which planted faults it finds
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dist.tools.check import prepare, prove
from tests.covering import FULL_GRID
from tests.tools.proofs import asked_for, start_fork_server

FAMILIES = ("llama", "bert", "t5", "gpt2", "qwen3_moe", "qwen3_moe, routers")
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "stages": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 0}},
    "matrices": {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}},
    "sequences": {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}},
    "encoded": {
        "zero_optimization": {"stage": 2},
        "hf_dist": {"wires": {"weights": "int8", "gradients": "int4", "block": 64}},
    },
    "float8": {"zero_optimization": {"stage": 3}, "hf_dist": {"fp8": {"enabled": True, "recipe": "tensorwise"}}},
    "float8, experts": {
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "hf_dist": {"fp8": {"enabled": True}},
        "zero_optimization": {"stage": 1},
    },
    "experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}, "zero_optimization": {"stage": 1}},
}
CASES = [
    (family, layout, half)
    for family in FAMILIES
    for layout in LAYOUTS
    for half in (False, True)
    # A tiny expert's width does not divide; only a mixture has experts; float8 is beside bf16.
    if layout not in (("matrices",) if "moe" in family else ("experts", "float8, experts"))
    and (half or "float8" not in layout)
]
FEW = [("bert", "matrices", True), ("gpt2", "encoded", True)]
"""What `test_check.py` lacks: half precision with cut matrices, of a class other than decoders; encoded messages."""


@pytest.mark.parametrize(("family", "layout", "half"), CASES if FULL_GRID else FEW)
def test_a_right_layout_is_equal(family: str, layout: str, half: bool, tmp_path: Path) -> None:
    start_fork_server()
    config = {**LAYOUTS[layout], "gradient_accumulation_steps": 2, "bf16": {"enabled": half}}
    asked = asked_for(tmp_path, family, config, steps=5 if half else 3)
    proof = prove(prepare(asked, tmp_path), asked.world)
    if layout == "encoded":
        assert any("in fp32, without bf16" in note for note in proof.notes) == half
        assert any("Against one that sends numbers as they are: loss" in note for note in proof.notes)
    assert proof.equal, [(row.what, row.difference, row.allowed) for row in proof.rows if not row.equal]
