# SPDX-License-Identifier: Apache-2.0
"""Reads a compiled program's text: collectives, aliases, arrays, products.

Owns the reading of XLA's text. Does not own what the text should contain.
"""

import math
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
_NAMED = re.compile(r"^ +(?:ROOT )?%?([\w.-]+) = .*? ([a-z][a-z0-9-]*)\((.*)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_PERMUTED = re.compile(
    r" = \(?[a-z]+\d*\w*\[([\d,]*)\].* collective-permute(?:-start)?\("
)
_STEPS = re.compile(r"^%async_collective_fusion.*?^}", re.MULTILINE | re.DOTALL)
_KERNELS = frozenset({"convolution", "custom-call", "dot", "fusion", "while"})
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.-]+)")
_TYPED = re.compile(
    r"^ +(?:ROOT )?%?([\w.-]+) = \(?([a-z]+\d*\w*)\[.*? ([a-z][a-z0-9-]*)\((.*)"
)
_LIBRARY = re.compile(r'custom_call_target="__cu(?:blas|dnn)')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]+)\]")


def collectives(text: str) -> Counter[str]:
    """Count the collectives by name; one in the body of a loop counts once.

    An asynchronous collective counts where it starts. A collective that is done in
    steps, which share a channel, counts once.
    """
    seen = {(name, channel or line) for name, channel, line in _collectives(text)}
    return Counter(name for name, _ in seen)


def permuted_numbers(text: str) -> int:
    """Return how many numbers a device sends in collective-permutes."""
    return sum(
        math.prod(int(dim) for dim in dims.split(",") if dim)
        for dims in _PERMUTED.findall(text)
    )


def hidden_collectives(text: str) -> int:
    """Count the collectives that overlap with computation.

    The computation is either between the collective's start and end, in the order of
    execution, or in the fusions that a TPU's compiler makes of its steps and of other
    work.
    """
    fusions = _STEPS.findall(text)
    channels = {c for body in fusions for _, c, _ in _collectives(body)}
    return len(channels) + sum(work > 0 for work in _work_between(text))


def _collectives(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield every collective's name, its channel ("" if it has none), and its line."""
    for line in text.splitlines():
        if instruction := _INSTRUCTION.match(line):
            name = instruction[2].removesuffix("-start")
            if name in COLLECTIVES:
                yield name, "".join(_CHANNEL.findall(line)[:1]), line


def _work_between(text: str) -> Iterator[int]:
    """Yield how many kernels run between start and end of each collective."""
    running: dict[str, int] = {}
    for line in text.splitlines():
        instruction = _NAMED.match(line)
        if instruction is None:
            continue
        name, op, operands = instruction.groups()
        if op.removesuffix("-start") in COLLECTIVES and op.endswith("-start"):
            running[name] = 0
        elif op.removesuffix("-done") in COLLECTIVES and op.endswith("-done"):
            started = operands.partition(")")[0].rpartition("%")[2]
            yield running.pop(started, 0)
        elif op in _KERNELS:
            running = {name: work + 1 for name, work in running.items()}


def has_type(text: str, dtype: str) -> bool:
    """Return whether some array is of the type, by XLA's name (f16)."""
    return re.search(rf"\b{dtype}\[", text) is not None


def products(text: str) -> Counter[str]:
    """Count the products of matrices by the types of their factors, such as f16.

    Counts products in the compiler's own kernels, and calls of cuBLAS and cuDNN.
    """
    found: Counter[str] = Counter()
    types: dict[str, str] = {}
    for line in text.splitlines():
        if _COMPUTATION.match(line):
            types = {}
        elif instruction := _TYPED.match(line):
            name, dtype, op, rest = instruction.groups()
            types[name] = dtype
            if op in ("dot", "convolution") or (
                op == "custom-call" and _LIBRARY.search(rest)
            ):
                factors = re.findall(r"%([\w.-]+)", rest.partition(")")[0])[:2]
                found["·".join(sorted({types[f] for f in factors}))] += 1
    return found


def aliased_parameters(text: str) -> set[int]:
    """Return the numbers of the parameters whose memory an output reuses."""
    head = text.partition("entry_computation_layout")[0]
    return {int(number) for number in _ALIAS.findall(head)}


def square_arrays(text: str, size: int) -> set[str]:
    """Return the arrays with two dims that are multiples of `size`, such as f32[8,8].

    Arrays inside a fusion are left out: they are never stored.
    """
    return {
        f"{dtype}[{dims}]"
        for types in _stored(text)
        for dtype, dims in _ARRAY.findall(types)
        if sum(int(dim) % size == 0 for dim in dims.split(",") if int(dim)) > 1
    }


def _stored(text: str) -> Iterator[str]:
    """Yield the result types of instructions outside fusions."""
    fused, inside = set(_FUSED.findall(text)), False
    for line in text.splitlines():
        if computation := _COMPUTATION.match(line):
            inside = computation[1] in fused
        elif not inside and (instruction := _INSTRUCTION.match(line)):
            yield instruction[1]
