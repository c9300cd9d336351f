# SPDX-License-Identifier: Apache-2.0
"""Computes what compilers needed as shares of the product's estimates of workspaces.

Owns the percentiles that the product keeps (`hetjax/costs/certainty/memory.py`), and
how often their intervals hold for kinds of device that were left out. Does not own the
estimates and the compiled bytes (`judging.py`).
"""

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from experiments.compiled_memory.cells import backend_of
from experiments.compiled_memory.judging import Rows, compared
from hetjax.cluster.catalogue import Backend
from hetjax.costs.certainty.memory import LEVEL
from hetjax.costs.workspace import MARGINS

_STEPS = 20  # from the least share to the greatest


def shares_of(files: Mapping[str, Rows]) -> dict[Backend, list[tuple[str, float]]]:
    """Return kind of device and share of each stage that compiled, by backend.

    A stage that is in several files counts once.
    """
    found: dict[Backend, list[tuple[str, float]]] = {}
    all_rows = {cell: row for rows in files.values() for cell, row in rows.items()}
    for cell, row in all_rows.items():
        if not row["failures"]:
            stage, backend = compared(cell, row), backend_of(cell.target)
            estimate = MARGINS[backend] * max(stage.predicted_bytes.values())
            share = max(stage.compiled_bytes.values()) / estimate
            found.setdefault(backend, []).append((cell.target, share))
    return found


def percentiles(shares: Sequence[float]) -> tuple[float, ...]:
    """Return the 0th, 5th, 10th ... 100th percentile."""
    inner = quantiles(shares, n=_STEPS, method="inclusive")
    return tuple(round(share, 3) for share in (min(shares), *inner, max(shares)))


def report(files: Mapping[str, Rows]) -> dict[str, Any]:
    """Return each backend's percentiles, and the coverage of kinds left out.

    `covered` is, for each kind, the share of its stages whose own share lies in the
    interval of all other kinds; it is empty for a backend of one kind.
    """
    judged: dict[str, Any] = {}
    for backend, found in shares_of(files).items():
        kinds = dict.fromkeys(kind for kind, _ in found)
        judged[backend] = {
            "stages": len(found),
            "percentiles": percentiles([share for _, share in found]),
            "covered": {
                kind: _covered(found, kind) for kind in kinds if len(kinds) > 1
            },
        }
    return judged


def _covered(found: Sequence[tuple[str, float]], left_out: str) -> float:
    others = percentiles([share for kind, share in found if kind != left_out])
    own = [share for kind, share in found if kind == left_out]
    edge = round((1 - LEVEL) / 2 * _STEPS)
    low, high = others[edge], others[-1 - edge]
    return sum(low <= share <= high for share in own) / len(own)
