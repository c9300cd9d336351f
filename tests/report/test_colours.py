# SPDX-License-Identifier: Apache-2.0
"""A colour has one meaning: no two palettes have colours that look alike."""

from itertools import combinations
from math import dist

from hetjax.report.colours import CURVES, MEMORY, REPLICAS, TIME, WORK

PALETTES = {
    "replicas": REPLICAS,
    "work": tuple(WORK.values()),
    "memory": tuple(MEMORY.values()),
    "time": tuple(TIME.values()),
    "curves": tuple(CURVES.values()),
}
APART = 12.0  # of the 441 from black to white: twice what an eye can tell side by side


def channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def test_no_colour_has_two_meanings():
    for (_, one), (_, other) in combinations(PALETTES.items(), 2):
        for colour in one:
            for taken in other:
                assert dist(channels(colour), channels(taken)) > APART


def test_parts_of_a_palette_can_be_told_apart():
    for palette in PALETTES.values():
        for pair in combinations(palette, 2):
            assert dist(*map(channels, pair)) > 2 * APART
