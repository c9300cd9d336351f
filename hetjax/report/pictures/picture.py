# SPDX-License-Identifier: Apache-2.0
"""Defines a picture that was drawn: it can be saved, and shows itself in a notebook.

Owns its kinds of files, the looks that pictures share, and the error if matplotlib is
missing. Does not own what is drawn (`layout.py`, `timeline.py`).
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput

SUFFIXES = (".pdf", ".png", ".svg")
STYLE = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a dollar in a name is a dollar
}
EDGE, GREY, PALE = "#333333", "#666666", "#c8c8c8"  # of boxes, words, idle devices
IDLE: dict[str, Any] = {"facecolor": "white", "edgecolor": PALE, "hatch": "/////"}
WIDTH_INCHES = 10.0
_FITTING = "max-width: 100%; height: auto"  # style of a drawing within a page


@dataclass(frozen=True, eq=False)
class Picture:
    """A `matplotlib.figure.Figure`, which a notebook shows as SVG.

    >>> from matplotlib.figure import Figure
    >>> picture = Picture(Figure((2, 1)))
    >>> picture.image("png").startswith(b"\\x89PNG")
    True
    """

    figure: Any

    def save(self, path: str | Path) -> None:
        """Write a .png, .pdf or .svg file; BadInput for another kind of file."""
        check_picture(Path(path))
        self._write(path, Path(path).suffix.lower().removeprefix("."))

    def image(self, kind: str) -> bytes:
        """Return the bytes of such a file; `kind` is "png", "pdf" or "svg"."""
        buffer = io.BytesIO()
        self._write(buffer, kind)
        return buffer.getvalue()

    def _write(self, target: Any, kind: str) -> None:
        with matplotlib_module().rc_context(STYLE):
            self.figure.savefig(target, format=kind, dpi=200)

    def _repr_svg_(self) -> str:
        """Return SVG that shrinks to its place, so that any notebook shows it all."""
        drawing = self.image("svg").decode()
        return drawing.replace("<svg ", f'<svg style="{_FITTING}" ', 1)


def check_picture(path: Path) -> None:
    """Raise BadInput unless a picture can be written under that name."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(
            got=f"picture {str(path)!r}",
            allowed=f"a name that ends in {', '.join(SUFFIXES)}",
            fix=f"write {path.with_suffix('.png').name!r}, say",
        )
    if find_spec("matplotlib") is None:  # importing it takes seconds
        raise _not_installed()


def matplotlib_module() -> Any:
    """Return matplotlib; BadInput names the extra if it is not installed."""
    try:
        import matplotlib.collections
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as missing:
        raise _not_installed() from missing
    return matplotlib


def _not_installed() -> BadInput:
    return BadInput(
        got="a picture, but matplotlib is not installed",
        allowed="pictures, if the extra `plot` is installed",
        fix="pip install 'hetjax[plot]'",
    )


def new_figure(height_inches: float) -> Any:
    """Return a new figure as wide as a page of print."""
    size = WIDTH_INCHES, height_inches
    return matplotlib_module().figure.Figure(size, layout="constrained")


def titled_axes(figure: Any, title: str) -> Any:
    """Return the axes of a figure, or of a part of one."""
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=9)
    return axes


def patch(label: str, **look: Any) -> Any:
    """Return a box of the legend."""
    return matplotlib_module().patches.Patch(label=label, linewidth=0.4, **look)


def draw_legend(
    figure: Any, handles: Sequence[Any], num_columns: int, font_points: float
) -> None:
    """Draw the boxes and their labels below the axes."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=num_columns,
        fontsize=font_points,
        frameon=False,
        handlelength=1.4,
        columnspacing=1.4,
    )


def lighter(colour: str, shade: float) -> tuple[float, ...]:
    """Return "#rrggbb" mixed with white: 0 is the colour itself, 1 white."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(channel + (1 - channel) * shade for channel in channels)
