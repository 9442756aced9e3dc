"""`hf-dist check` of products in float8: one process multiplies so, too; what the job would refuse is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.float8.linear import is_float8
from hf_dist.tools.check import Asked, prepare, prove
from hf_dist.tools.check.eights import eights_of, multiply_in_float8
from tests import needs
from tests.float8.training import Case, model_of
from tests.tools.proofs import start_fork_server

needs.package("torchao", "it multiplies in float8")

BF16 = {"bf16": {"enabled": True}}


def asked_for(folder: Path, fp8: dict[str, Any], **config: Any) -> Asked:
    """A tiny Llama whose slices have sizes that cuBLAS takes."""
    model_of(Case(bf16=False)).save_pretrained(folder / "tiny")
    (folder / "ds.json").write_text(json.dumps({"hf_dist": {"fp8": fp8}, **config}))
    return Asked(str(folder / "tiny"), folder / "ds.json", world=2, steps=2, seq=12)


@pytest.mark.parametrize("half", [{"enabled": True}, {"enabled": "auto"}])
def test_one_process_gets_the_same_section_emulated(half: dict[str, Any], tmp_path: Path) -> None:
    job = prepare(asked_for(tmp_path, {"enabled": True, "skip": ["layers.1"]}, bf16=half), tmp_path)
    assert job.eights and job.precision == "fp32"
    wanted = {"enabled": True, "skip": ["layers.1"], "emulate": True}
    assert job.layout["hf_dist"]["fp8"] == job.alone["hf_dist"]["fp8"] == wanted  # type: ignore[index]
    what, why = job.said
    assert "emulated, as on every CPU: 13 linear layers multiply in float8; left alone: 2 first and last" in what
    assert "7 named in skip" in what and why.startswith("in fp32, without bf16: the last bit")
    model = job.make_model()
    multiply_in_float8(model, job.alone)
    found = {path for path, module in model.named_modules() if is_float8(module)}
    assert len(found) == 13 and not any(".layers.1." in path for path in found)
    plain = prepare(asked_for(tmp_path, {"enabled": False}), tmp_path)
    assert not plain.eights and "hf_dist" not in plain.alone and plain.said == ()
    multiply_in_float8(model := plain.make_model(), plain.alone)
    assert not any(is_float8(module) for module in model.modules())


@pytest.mark.parametrize(
    ("fp8", "more", "words"),
    [
        ({"enabled": True, "recipe": "rowise"}, BF16, r'hf_dist.fp8.recipe: "rowise" is not one of.*"rowwise"'),
        ({"enabled": True, "recipes": "rowwise"}, BF16, r"hf_dist.fp8.recipes.*Did you mean"),
        ({"enabled": True, "skip": ["down"]}, BF16, r"hf_dist.fp8.skip: down names no module of the model"),
        ({"enabled": True}, {}, r'hf_dist.fp8.enabled: true needs bf16.*Set "bf16": {"enabled": true}'),
        ({"enabled": True}, {"fp16": {"enabled": True}}, r"hf_dist.fp8.enabled.*fp16"),
    ],
)
def test_what_the_job_would_refuse_is_refused(fp8: Any, more: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(asked_for(tmp_path, fp8, **more), tmp_path)


def test_emulation_that_is_asked_for_needs_no_bf16() -> None:
    layout, said = eights_of({"hf_dist": {"fp8": {"enabled": True, "emulate": True}}}, model_of(Case(bf16=False)))
    assert load_config(layout).hf_dist.fp8.emulate and len(said) == 1
    assert eights_of({"zero_optimization": {"stage": 1}}, nn.Linear(2, 2)) == ({"zero_optimization": {"stage": 1}}, [])


def test_a_right_layout_is_equal_and_the_note_says_how_far_float8_takes_it(tmp_path: Path) -> None:
    start_fork_server()
    config = {**BF16, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    asked = asked_for(tmp_path, {"enabled": True}, gradient_accumulation_steps=1, **config)
    proof = prove(prepare(asked, tmp_path), asked.world)
    assert proof.equal, [(row.what, row.difference, row.allowed) for row in proof.rows if not row.equal]
    assert proof.precision == "fp32" and {row.allowed for row in proof.rows} == {1e-5}
    (note,) = (note for note in proof.notes if note.startswith("Against one that multiplies in fp32: loss "))
    # One that did not multiply so would be found.
    assert float(note.split("loss ")[1].split(",")[0]) > 1e-5
    assert float(note.split("at most ")[1].split(" ")[0]) > 1e-3
