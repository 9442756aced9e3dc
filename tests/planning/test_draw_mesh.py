"""The mesh in words and as a picture: who holds what, and where bytes go."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hf_dist.dist.axes import Axes
from hf_dist.errors import ConfigError
from hf_dist.planning.draw_mesh import draw_mesh, mesh_lines
from hf_dist.tools.cli import app
from tests.parity.families import make_model

AXES = Axes.of(16, pp=2, tp=2)
MACHINES = [rank // 8 for rank in range(16)]
SENT = {"tp": {"all_reduce": (4, 1000)}, "pp": {"send": (2, 500)}, "dp": {}}


def test_every_axis_says_what_its_ranks_hold_and_how_they_are_joined() -> None:
    assert mesh_lines(AXES, MACHINES, SENT) == [
        "pp 2        different layers   {0 8} {1 9} {2 10} {3 11} ... of 8             between machines",
        "dp_shard 4  ZeRO's shards      {0 2 4 6} {1 3 5 7} {8 10 12 14} {9 11 13 15}  inside machines",
        "tp 2        parts of a matrix  {0 1} {2 3} {4 5} {6 7} ... of 8               inside machines",
        "sent along tp, per rank and step: 1 kB inside a machine",
        "sent along pp, per rank and step: 500 B between machines",
    ]
    assert mesh_lines(Axes.of(1), [0]) == []
    assert "4 of them on a machine" in mesh_lines(Axes.of(8), [rank // 4 for rank in range(8)])[0]


def test_the_picture_has_every_rank_on_its_machine() -> None:
    svg = ElementTree.fromstring(draw_mesh(AXES, MACHINES, SENT).svg())
    boxes = [node for node in svg if node.tag.endswith("rect") and node.get("stroke")]
    texts = [node.text for node in svg if node.tag.endswith("text")]
    assert len(boxes) == 16 and len({box.get("y") for box in boxes}) == 2
    assert [text for text in texts if text and text.isdigit()] == [str(rank) for rank in range(16)]
    assert texts.count("tp 1") == 8 and "machine 1" in texts


def test_a_picture_is_svg_or_png(tmp_path: Path) -> None:
    picture = draw_mesh(AXES, MACHINES, SENT)
    picture.save(tmp_path / "mesh.svg")
    assert (tmp_path / "mesh.svg").read_text() == picture.svg()
    with pytest.raises(ConfigError, match=r"mesh.pdf is neither .svg nor .png"):
        picture.save(tmp_path / "mesh.pdf")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    picture.save(tmp_path / "mesh.png")
    pixels = pyplot.imread(tmp_path / "mesh.png")
    assert pixels.shape[:2] == pytest.approx((2 * picture.height, 2 * picture.frame[1]), abs=1)
    assert len({tuple(pixel) for pixel in pixels[40, :, :3].round(2)}) > 1, "ranks of a machine in this row"
    assert (pixels[2 * int(picture.height) - 52, :, :3] < 0.5).any(), "words"


def test_the_command_says_the_bytes_of_a_model(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "tiny")  # type: ignore[operator]
    (tmp_path / "ds.json").write_text('{"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}')
    options = ["mesh", "--config", str(tmp_path / "ds.json"), "--ranks", "4", "--gpus-per-node", "2", "--seq", "16"]
    options += ["--model", str(tmp_path / "tiny"), "--output", str(tmp_path / "mesh.svg")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "4 ranks = dp_replicate 1 x dp_shard 2 x tp 2" in result.stdout
    assert "sent along tp, per rank and step: " in result.stdout and "between machines" in result.stdout
    assert ElementTree.parse(tmp_path / "mesh.svg").getroot() is not None
