"""`expert_load.json` and `hf-dist balance`: which experts a training has used."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hf_dist.errors import CheckpointError
from hf_dist.parallel.experts.draw_balance import balance_lines, draw_balance
from hf_dist.parallel.experts.load_file import FILE, ExpertLoad, read_load, write_load
from hf_dist.tools.cli import app

LOAD = ExpertLoad(
    2, 3, 9, {"model.layers.0.mlp.experts": [10, 10, 10, 10], "model.layers.11.mlp.experts": [30, 0, 6, 4]}
)


def test_the_busiest_expert_and_rank_of_each_layer_are_said() -> None:
    assert balance_lines(LOAD) == [
        "steps 3 to 9, experts on 2 ranks; the most rows over the mean (1 is even):",
        "           busiest expert    busiest rank  experts without a row",
        "layers.0   1.00 (expert 0)   1.00          0 of 4",
        "layers.11  3.00 (expert 0)   1.50          1 of 4",
    ]


def test_the_picture_has_a_cell_per_expert_and_a_line_around_each_rank() -> None:
    svg = ElementTree.fromstring(draw_balance(LOAD).svg())
    titles = [node[0].text for node in svg if node.tag.endswith("rect") and len(node)]
    assert len(titles) == 8 and titles[4] == "expert 0: 30 rows, 3.00 of the mean"
    assert len([node for node in svg if node.get("fill") == "#000000"]) == 3
    assert draw_balance(ExpertLoad(1, 1, 1, {"experts": [0, 0]})).svg(), "no row at all"


def test_the_command_reads_the_folder_of_a_training(tmp_path: Path) -> None:
    write_load(tmp_path, LOAD)
    assert read_load(tmp_path / FILE) == LOAD
    result = CliRunner().invoke(app, ["balance", str(tmp_path), "--output", str(tmp_path / "balance.svg")])
    assert result.exit_code == 0 and "layers.11" in result.stdout, result.output
    assert ElementTree.parse(tmp_path / "balance.svg").getroot() is not None


@pytest.mark.parametrize("text", [None, "[1]", "{}"])
def test_a_folder_without_the_file_is_told_what_writes_it(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(
        CheckpointError, match=r"expert_load.json: (cannot be read .*expert_parallel.enabled|is not a file)"
    ):
        read_load(tmp_path)
