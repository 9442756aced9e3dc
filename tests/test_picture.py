"""Pictures of commands: no text is cut, PNGs are sharp, and what is drawn is what occurs."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_dist.dist.axes import Axes
from hf_dist.parallel.experts.draw_balance import draw_balance
from hf_dist.parallel.experts.load_file import ExpertLoad
from hf_dist.parallel.pipeline.draw import draw_schedule
from hf_dist.parallel.pipeline.schedule import make_schedule
from hf_dist.planning.describe_layouts import draw_layouts
from hf_dist.planning.draw_mesh import draw_mesh
from hf_dist.planning.step_time import PARTS, StepTime
from hf_dist.svg import Picture, headless_pyplot


def found(name: str, need: int, **seconds: float) -> Any:
    """A layout with these parts of a step."""
    time = StepTime({part: seconds.get(part, 0.0) for part in PARTS})
    return SimpleNamespace(layout=SimpleNamespace(text=name), time=time, plan=SimpleNamespace(device_need=need))


LONG = "pp 16 x dp_replicate 4 x dp_shard 32 x cp 4 x tp 8 (ep 32), ZeRO 3, optimizer over all"
LAYOUTS = [found(LONG, 70 * 10**9, compute=1.5, bubble=0.2), found("tp 2, ZeRO 1", 9 * 10**9, compute=2.0)]
PICTURES = {
    "two experts": draw_balance(ExpertLoad(2, 1, 123456, {"model.layers.0.mlp.experts": [3, 5]})),
    "256 ranks": draw_balance(ExpertLoad(256, 1, 9, {"model.layers.0.mlp.experts": [3] * 256})),
    "one stage": draw_schedule(make_schedule("1f1b", 1, 1, 1)),
    "one rank": draw_mesh(Axes.of(1, pp=1, shard=None, tp=1, cp=1), [0]),
    "layouts": draw_layouts(LAYOUTS, 80 * 10**9),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_text_lies_inside_of_the_frame(name: str) -> None:
    """As matplotlib measures it; fonts of browsers are narrower."""
    pytest.importorskip("matplotlib")
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    picture = PICTURES[name]
    left, right = picture.frame
    for words in picture._words:
        look = FontProperties(
            family=["monospace" if words.mono else "sans-serif"], weight="bold" if words.bold else "normal"
        )
        width = TextPath((0, 0), words.text, size=picture.size, prop=look).get_extents().width
        start = words.x - width * {"start": 0, "middle": 0.5, "end": 1}[words.anchor]
        assert left <= start and start + width <= right, words.text


def test_no_two_names_of_ranks_lie_on_each_other() -> None:
    for name in ("two experts", "256 ranks"):
        picture = PICTURES[name]
        ends = [words.ends(picture.size) for words in picture._words if words.text.startswith("rank ")]
        assert ends and all(end[1] <= following[0] + 8 for end, following in itertools.pairwise(ends))


def test_a_png_has_two_pixels_for_one_of_the_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = Picture(11, 200, 40)
    picture.words(6, 20, "a text that is far longer than the picture is wide, so it is widened")
    picture.save(tmp_path / "a.png")
    height, width, _ = headless_pyplot().imread(tmp_path / "a.png").shape
    assert (width, height) == (2 * picture.frame[1], 80) and width > 400


def test_the_picture_of_a_plan_has_axes_the_device_and_only_colours_that_occur() -> None:
    text = PICTURES["layouts"].svg()
    for word in (
        "time of a step",
        "1.5 s",
        "memory that a device needs",
        "40 GB",
        "the device: 80 GB",
        "compute",
        "bubble",
    ):
        assert f">{word}<" in text, word
    for word in ("recomputation", "optimizer", "tp", "weights"):
        assert f">{word}<" not in text
    assert "the device" not in draw_layouts(LAYOUTS).svg()
