"""The plan and the mesh of a start with roles: each role is a job of its own, on its own ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_dist.config import load_config
from hf_dist.planning.role_parts import parts_of
from hf_dist.tools.cli import app
from tests.parity.families import make_model

OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}


def files(folder: Path, layout: dict[str, Any]) -> tuple[str, str, int]:
    """(config, student, bytes of the teacher): three ranks train, two hold the teacher."""
    teacher = make_model("llama", layers=3)
    teacher.save_pretrained(folder / "teacher")
    make_model("llama", layers=2).save_pretrained(folder / "student")
    roles = {"trainer": {"ranks": "rest"}, "teacher": {"ranks": 2, "model": str(folder / "teacher"), "config": layout}}
    (folder / "roles.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "hf_dist": {"roles": roles}}))
    return str(folder / "roles.json"), str(folder / "student"), 4 * sum(p.numel() for p in teacher.parameters())


def called(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_a_start_without_roles_is_one_part() -> None:
    (part,) = parts_of(load_config({"zero_optimization": {"stage": 2}}), 8)
    assert (part.title, part.ranks, part.trains) == ("", 8, True)


def test_the_plan_names_each_role_with_its_ranks_and_bytes(tmp_path: Path) -> None:
    config, student, nbytes = files(tmp_path, {"zero_optimization": {"stage": 3}})
    asked = ("plan", "--config", config, "--model", student, "--world-size", "5", "--seq", "16")
    text = called(*asked).stdout
    assert "role trainer, ranks 0-2" in text and "tokens, 3 ranks, fp32" in text
    found = json.loads(called(*asked, "--json").stdout)
    (weights,) = (
        row["bytes"] for row in found["roles"]["teacher"]["rows"] if "master" in row["what"] or row["what"] == "weights"
    )
    assert nbytes / 2 <= weights < nbytes / 2 * 1.02  # rounded up to whole elements per rank and unit
    assert called(*asked, "--device-memory", "1kB").exit_code == 3


def test_a_role_that_trains_has_gradients_and_states_in_the_plan(tmp_path: Path) -> None:
    config, student, _ = files(tmp_path, {"zero_optimization": {"stage": 1}, **OPTIMIZER})
    text = called("plan", "--config", config, "--model", student, "--world-size", "5", "--seq", "16").stdout
    assert "optimizer state" in text.split("role teacher, ranks 3-4")[1]


def test_the_mesh_has_a_block_for_each_role(tmp_path: Path) -> None:
    config, _, _ = files(tmp_path, {"tensor_parallel": {"autotp_size": 2}})
    result = called("mesh", "--config", config, "--ranks", "5")
    trainer, teacher = result.stdout.split("role teacher, ranks 3-4")
    assert "role trainer, ranks 0-2" in trainer and "3 ranks = " in trainer and "tp 2" in teacher


@pytest.mark.parametrize("command", ["plan", "mesh"])
def test_roles_that_do_not_add_up_are_named(command: str, tmp_path: Path) -> None:
    config, student, _ = files(tmp_path, {})
    ranks = ("--world-size", "2", "--model", student) if command == "plan" else ("--ranks", "2")
    result = called(command, "--config", config, *ranks)
    assert "hf_dist.roles" in str(result.exception) and "leaves no rank for trainer" in str(result.exception)


def test_a_role_of_another_job_takes_neither_ranks_nor_bytes_here(tmp_path: Path) -> None:
    file, student, _ = files(tmp_path, {"zero_optimization": {"stage": 3}})
    beside = json.loads(Path(file).read_text())
    beside["hf_dist"]["roles"]["teacher"] = {"job": "$TEACHER"}
    (part,) = parts_of(load_config(beside), 3)
    assert (part.title, part.trains) == ("role trainer, ranks 0-2", True)
    Path(file).write_text(json.dumps(beside))
    found = called("plan", "--model", student, "--config", file, "--world-size", "3", "--json")
    assert found.exit_code == 0 and "roles" not in json.loads(found.output)


def test_a_start_that_serves_other_jobs_is_planned_and_drawn_by_its_roles(tmp_path: Path) -> None:
    _, student, nbytes = files(tmp_path, {})
    teacher = {
        "ranks": "rest",
        "model": str(tmp_path / "teacher"),
        "config": {"zero_optimization": {"stage": 3}},
        "port": 29600,
    }
    file = tmp_path / "serving.json"
    file.write_text(json.dumps({"hf_dist": {"roles": {"teacher": teacher}}}))
    found = called("plan", "--model", student, "--config", str(file), "--world-size", "2")
    assert found.exit_code == 0 and "role teacher, ranks 0-1" in found.output and "weights, at rest" in found.output
    assert "backward" not in found.output and nbytes
    assert called("mesh", "--config", str(file), "--ranks", "2", "--output", str(tmp_path / "x.svg")).exit_code == 0
    found = called("check", "--model", student, "--config", str(file))
    assert found.exit_code != 0 and "none of them trains" in str(found.exception or found.output)
