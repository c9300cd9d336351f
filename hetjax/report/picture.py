# SPDX-License-Identifier: Apache-2.0
"""A picture that was drawn: to be saved, or to show itself in a notebook.

Owns its kinds of files, its fonts, and what is said where matplotlib is missing. Does
not own what is drawn (`layout.py`, `timeline.py`).
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput

SUFFIXES = (".pdf", ".png", ".svg")
STYLE = {"svg.fonttype": "none", "pdf.fonttype": 42, "hatch.linewidth": 0.5}


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
        return self.image("svg").decode()


def check_picture(path: Path) -> None:
    """Raise BadInput unless a picture can be written under that name."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(
            got=f"picture {str(path)!r}",
            allowed=f"a name that ends in {', '.join(SUFFIXES)}",
            fix=f"write {path.with_suffix('.png').name!r}, say",
        )
    matplotlib_module()


def matplotlib_module() -> Any:
    """Return matplotlib; BadInput names the extra if it is not installed."""
    try:
        import matplotlib.collections
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as missing:
        raise BadInput(
            got="a picture asked for, and matplotlib is not installed",
            allowed="pictures where the extra `plot` is installed",
            fix="pip install 'hetjax[plot]'",
        ) from missing
    return matplotlib
