# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run as a result: a list that shows itself.

Owns how the lines look. Does not own what is in them (`training/loop.py`).
"""

from typing import Any

from hetjax.errors import BadInput
from hetjax.plans.table import aligned, html_table


class Metrics(list[dict[str, Any]]):
    """The lines of `metrics.jsonl`, a dict each; always a list, in any installation.

    `frame()` gives the same as a `pandas.DataFrame`, where pandas is installed.

    >>> metrics = Metrics([{"step": 1, "loss": 6.9375}, {"step": 1, "val_loss": 6.5}])
    >>> print(metrics)
    step  loss    val_loss
    1     6.9375
    1             6.5
    """

    def frame(self) -> Any:
        """Return a DataFrame with a row per line; BadInput without pandas."""
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as missing:
            raise BadInput(
                got="a DataFrame asked for, and pandas is not installed",
                allowed="frames where the extra `notebook` is installed",
                fix="pip install 'hetjax[notebook]', or take the list as it is",
            ) from missing
        return pandas.DataFrame(self)

    def __str__(self) -> str:
        return "\n".join(aligned(self._header(), self._rows()))

    def _repr_html_(self) -> str:
        return "\n".join(html_table(self._header(), self._rows()))

    def _header(self) -> list[str]:
        return list(dict.fromkeys(name for line in self for name in line))

    def _rows(self) -> list[list[str]]:
        header = self._header()
        return [[_cell(line.get(name)) for name in header] for line in self]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
