"""A picture of boxes and text: SVG without dependencies, PNG with matplotlib."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from hf_dist.errors import ConfigError, HfDistError, Problem

__all__ = ["NoMatplotlibError", "Picture", "check_picture", "headless_pyplot", "is_picture"]

_DPI = 96
"""A picture's pixels are CSS pixels, 96 per inch."""
_PNG_SCALE = 2
"""Pixels of a PNG per CSS pixel, so that small text is sharp on a page."""
_NORMAL, _BOLD = 0.62, 0.7
"""Mean width of a letter over the font's size: DejaVu Sans, which is wider than most."""
_SUFFIXES = (".svg", ".png")


_NO_MATPLOTLIB = 'the plot needs matplotlib: pip install "hf-dist[bench]"'


class NoMatplotlibError(HfDistError):
    """The plot needs matplotlib, which is not installed."""


def is_picture(path: Path) -> bool:
    """Whether the path names a picture: `.svg` or `.png`."""
    return path.suffix.lower() in _SUFFIXES


def check_picture(path: Path, option: str = "--output") -> None:
    """Raise `ConfigError` for a suffix other than `.svg` and `.png`, `NoMatplotlibError` for a `.png` without matplotlib."""
    if not is_picture(path):
        raise ConfigError(Problem(option, str(path), "is neither .svg nor .png", "Name one of them."))
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise NoMatplotlibError(_NO_MATPLOTLIB)


def headless_pyplot() -> Any:
    """matplotlib without a screen. Raises `NoMatplotlibError`."""
    try:
        import matplotlib
    except ImportError:
        raise NoMatplotlibError(_NO_MATPLOTLIB) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float
    edge: str
    title: str


@dataclass(frozen=True)
class _Words:
    x: float
    y: float
    text: str
    anchor: str
    bold: bool
    mono: bool

    def ends(self, size: float) -> tuple[float, float]:
        """About where the text begins and ends, in a font of `size` pixels; rather too wide than too narrow."""
        width = len(self.text) * size * (_BOLD if self.bold else _NORMAL) + 4
        left = self.x - width * {"start": 0, "middle": 0.5, "end": 1}[self.anchor]
        return left, left + width


@dataclass
class Picture:
    """Boxes and text at positions in pixels from the top left; later items cover earlier ones."""

    size: float = 11
    """Font size in pixels."""
    width: float = 0
    height: float = 0
    _boxes: list[_Box] = field(default_factory=list)
    _words: list[_Words] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        opacity: float = 1,
        edge: str = "",
        title: str = "",
    ) -> None:
        """Add a box; `title` appears as its tooltip."""
        self._boxes.append(_Box(x, y, width, height, fill, opacity, edge, title))

    def words(
        self, x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, mono: bool = False
    ) -> None:
        """Add text with its baseline at `y`; `anchor`: start, middle or end."""
        self._words.append(_Words(x, y, text, anchor, bold, mono))

    @property
    def frame(self) -> tuple[float, float]:
        """Its left and right end: 0 and `width`, or farther out where a text ends there, so that none is cut."""
        ends = [words.ends(self.size) for words in self._words]
        left, right = min((end[0] for end in ends), default=0), max((end[1] for end in ends), default=0)
        return min(0.0, round(left)), max(self.width, round(right))

    def svg(self) -> str:
        """The picture as an SVG document."""
        left, right = self.frame
        style = f'font-family="sans-serif" font-size="{self.size:g}"'
        size = f'width="{right - left:g}" height="{self.height:g}"'
        view = f' viewBox="{left:g} 0 {right - left:g} {self.height:g}"' if left else ""
        out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}{view} {style}>']
        out.append(f'<rect x="{left:g}" {size} fill="white"/>' if left else f'<rect {size} fill="white"/>')
        for box in self._boxes:
            more = f' fill-opacity="{box.opacity:g}"' if box.opacity < 1 else ""
            more += f' stroke="{box.edge}"' if box.edge else ""
            place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:.1f}" height="{box.height:g}"'
            inside = f"<title>{escape(box.title)}</title>" if box.title else ""
            out.append(f'<rect {place} fill="{box.fill}"{more}>{inside}</rect>')
        for words in self._words:
            more = f' text-anchor="{words.anchor}"' if words.anchor != "start" else ""
            more += ' font-weight="bold"' if words.bold else ""
            more += ' font-family="monospace" xml:space="preserve"' if words.mono else ""
            out.append(f'<text x="{words.x:g}" y="{words.y:g}"{more}>{escape(words.text)}</text>')
        return "\n".join([*out, "</svg>"]) + "\n"

    def save(self, path: Path) -> None:
        """Write a `.svg` or `.png` file. Raises `ConfigError` for other suffixes, and `NoMatplotlibError`."""
        check_picture(path)
        if path.suffix.lower() == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
        else:
            self._png(path)

    def _png(self, path: Path) -> None:
        pyplot = headless_pyplot()
        from matplotlib.patches import Rectangle

        left, right = self.frame
        figure = pyplot.figure(figsize=((right - left) / _DPI, self.height / _DPI), dpi=_DPI)
        panel = figure.add_axes((0, 0, 1, 1))
        panel.set(xlim=(left, right), ylim=(self.height, 0))
        panel.axis("off")
        for box in self._boxes:
            options: dict[str, Any] = {"facecolor": (box.fill, box.opacity), "edgecolor": box.edge or "none"}
            panel.add_patch(Rectangle((box.x, box.y), box.width, box.height, **options))
        places = {"start": "left", "middle": "center", "end": "right"}
        for words in self._words:
            weight = "bold" if words.bold else "normal"
            family = "monospace" if words.mono else "sans-serif"
            look: dict[str, object] = {"fontsize": self.size * 72 / _DPI, "weight": weight, "family": family}
            text = words.text.replace("$", r"\$")
            panel.text(words.x, words.y, text, ha=places[words.anchor], va="baseline", **look)
        figure.savefig(path, dpi=_PNG_SCALE * _DPI)
        pyplot.close(figure)
