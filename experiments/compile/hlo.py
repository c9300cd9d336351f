# SPDX-License-Identifier: Apache-2.0
"""What the text of a compiled program says: collectives, aliases, arrays.

Owns the reading of XLA's text. Does not own what should be found there.
"""

import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z0-9-]*)\(")
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]+)\]")


def collectives(text: str) -> Counter[str]:
    """Count the collectives by name; one in the body of a loop counts once.

    What is started and awaited apart counts where it starts.
    """
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if instruction := _INSTRUCTION.match(line):
            name = instruction[2].removesuffix("-start")
            found[name] += name in COLLECTIVES
    return +found


def aliased_parameters(text: str) -> set[int]:
    """Return the numbers of the parameters whose memory an output takes."""
    head = text.partition("entry_computation_layout")[0]
    return {int(number) for number in _ALIAS.findall(head)}


def square_arrays(text: str, size: int) -> set[str]:
    """Return the arrays with two dims that are multiples of `size`, such as f32[8,8].

    Those inside a fusion are left out: they are never stored.
    """
    return {
        f"{dtype}[{dims}]"
        for types in _stored(text)
        for dtype, dims in _ARRAY.findall(types)
        if sum(int(dim) % size == 0 for dim in dims.split(",") if int(dim)) > 1
    }


def _stored(text: str) -> Iterator[str]:
    """The types of what instructions give, those inside fusions left out."""
    fused, inside = set(_FUSED.findall(text)), False
    for line in text.splitlines():
        if computation := _COMPUTATION.match(line):
            inside = computation[1] in fused
        elif not inside and (instruction := _INSTRUCTION.match(line)):
            yield instruction[1]
