# SPDX-License-Identifier: Apache-2.0
"""Defines what is compiled: a pairwise covering of devices, models, meshes, programs.

Every two choices that are compatible occur together in at least one cell. Owns the
choices, their compatibility, and the covering. Does not own how a cell becomes a
program (`stages.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any, Literal, TypeVar

import numpy as np

from experiments.compile.targets import MOST_DEVICES, TARGETS
from hetjax.plans.plan import Remat

Program = Literal[
    "forward",
    "backward",
    "fused",
    "input gradient",
    "weight gradient",
    "evaluate",
    "logits",
    "zeros",
    "pack",
    "square sum",
    "update",
    "copies",
    "first moments",
    "finite check",
    "weight digests",
    "gradient digests",
]
Place = Literal["first", "inner", "last"]
C = TypeVar("C")  # a frozen dataclass of choices
# two whole blocks, half of a block, or two blocks on sequences of several documents
Part = Literal["blocks", "attention", "mlp", "packed blocks"]

MODELS = ("llama-1b", "llama3-8b", "gpt3-2.6b", "mixtral-8x7b", "gemma3-12b")
MESHES = tuple(  # (tensor, data); the covering prefers earlier ones
    (tensor, data)
    for data, tensor in product((2, 1), (4, 2, 1, 8))
    if tensor * data <= MOST_DEVICES
)
REMATS: tuple[Remat, ...] = ("none", "selective", "full")
PASSES: tuple[Program, ...] = (
    "forward",
    "backward",
    "fused",
    "input gradient",
    "weight gradient",
)
PROGRAMS: tuple[Program, ...] = (
    *PASSES,
    "evaluate",
    "pack",
    "update",
    "square sum",
    "copies",
    "logits",
    "zeros",
    "first moments",
    "finite check",
    "weight digests",
    "gradient digests",
)
_LATER = frozenset({"gemma3-12b", *PROGRAMS[PROGRAMS.index("logits") :]})


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One program of one stage for one target; the order of fields is the table's."""

    target: str
    program: Program
    model: str
    mesh: tuple[int, int]
    remat: Remat
    place: Place
    part: Part

    @property
    def tensor(self) -> int:
        return self.mesh[0]

    @property
    def data(self) -> int:
        return self.mesh[1]

    @property
    def packed(self) -> bool:
        return self.part == "packed blocks"

    @property
    def runs(self) -> bool:
        """Whether a run has such a program, and no other cell has the same program."""
        if self.program not in PASSES and self.remat != "selective":
            return False  # nothing is kept for a backward
        if (self.place, self.part) in (("first", "mlp"), ("last", "attention")):
            return False  # embedding, attention, mlp, ..., mlp, head
        if self.packed and self.program not in (*PASSES, "evaluate"):
            return False  # these programs do not see documents
        if self.program == "pack":
            return self.data > 1
        if self.program in ("fused", "logits"):
            return self.place == "last"
        return self.program != "backward" or self.place != "last"

    @property
    def is_later(self) -> bool:
        """Whether one of its choices was added later than the others."""
        return self.packed or not _LATER.isdisjoint((self.program, self.model))


def all_cells() -> Iterator[Cell]:
    """Yield every cell that a run can have."""
    places: tuple[Place, ...] = ("first", "inner", "last")
    parts: tuple[Part, ...] = ("blocks", "attention", "mlp", "packed blocks")
    for target, program, model, mesh, remat, place, part in product(
        TARGETS, PROGRAMS, MODELS, MESHES, REMATS, places, parts
    ):
        cell = Cell(
            target=target,
            program=program,
            model=model,
            mesh=mesh,
            remat=remat,
            place=place,
            part=part,
        )
        if cell.runs:
            yield cell


def covering() -> list[Cell]:
    """Return a subset of all cells that has every pair of their choices.

    Choices that were added later are covered after the rest, so that the earlier
    covering stays the same: TPUs' compilers take minutes for some cells.
    """
    cells = list(all_cells())
    first = covered(cell for cell in cells if not cell.is_later)
    return [*first, *covered(cells, first)]


def covered(cells: Iterable[C], having: Sequence[C] = ()) -> list[C]:
    """Return a subset of the cells that has every pair of choices of all cells, except
    the pairs that `having` already covers.

    Greedy: the cell that adds most pairs comes next, the first one on a tie. So
    the first cells of the list cover most pairs.
    """
    cells = [*having, *cells]
    pairs, num_pairs = _pairs(cells)
    missing, chosen = np.ones(num_pairs, bool), []
    missing[pairs[: len(having)]] = False
    while missing.any():
        best = int(np.argmax(missing[pairs].sum(axis=1)))
        missing[pairs[best]] = False
        chosen.append(cells[best])
    return chosen


def _pairs(cells: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Return the numbers of each cell's pairs of choices, and how many pairs exist."""
    names = [field.name for field in fields(cells[0])]
    numbers: dict[object, int] = {}
    found = [
        [
            numbers.setdefault((a, getattr(cell, a), b, getattr(cell, b)), len(numbers))
            for a, b in combinations(names, 2)
        ]
        for cell in cells
    ]
    return np.array(found), len(numbers)
