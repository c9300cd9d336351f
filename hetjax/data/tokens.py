# SPDX-License-Identifier: Apache-2.0
"""Defines the tokens of a split as they are stored on disk.

Does not own their files (`building.py`) nor the windows cut from them (`batches.py`).
Shape legend: T tokens of a split, R its rows.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Where the rows of a split are, and which of their tokens are learnt.

    Row r is tokens starts[r] up to starts[r + 1]; `first_R` is the place in the row of
    the first learnt token that has a token before it.
    """

    starts_R: np.ndarray  # R + 1
    first_R: np.ndarray
    learnt_T: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a split: documents end to end, or rows that stay apart."""

    tokens_T: np.ndarray
    rows: Rows | None = None
    end: int | None = None  # the token after each document
