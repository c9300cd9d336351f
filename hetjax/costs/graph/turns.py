# SPDX-License-Identifier: Apache-2.0
"""The order in which kernels run.

Owns the two orders of XLA that matter to memory: that of its CPU backend, as soon as
what a kernel reads is there; and that of its schedulers for accelerators, the kernel
next that frees most. Does not own kernels (`fusion.py`).
"""

import math
from collections import Counter, deque
from collections.abc import Sequence

from hetjax.costs.graph.fusion import Kernel
from hetjax.costs.graph.values import Graph, Value


def breadth_first(found: Sequence[Kernel]) -> list[Kernel]:
    """Give the kernels in the order in which they can begin."""
    needs, users = _dependencies(found)
    ready = deque(at for at, makers in enumerate(needs) if not makers)
    ordered = []
    while ready:
        done = ready.popleft()
        ordered.append(found[done])
        for user in users[done]:
            needs[user].remove(done)
            if not needs[user]:
                ready.append(user)
    return ordered


def least_memory(found: Sequence[Kernel], graph: Graph) -> list[Kernel]:
    """Give them in the order of a list scheduler: of all that can begin the one next
    that frees most bytes, less those that it makes; of equals the first."""
    needs, users = _dependencies(found)
    made = {id(v): _num_bytes(v) for kernel in found for v in kernel.step.outputs}
    made |= {id(v): 0 for v in graph.outputs}  # never freed
    left = Counter(id(v) for kernel in found for v in kernel.reads)

    def freed_bytes(at: int) -> int:
        kernel = found[at]
        last = (made.get(id(v), 0) for v in kernel.reads if left[id(v)] == 1)
        return sum(last) - sum(map(_num_bytes, kernel.step.outputs))

    ready = {at for at, makers in enumerate(needs) if not makers}
    ordered = []
    begun = [bool(makers) for makers in needs]
    while ready:
        done = max(
            ready,
            key=lambda at: (
                found[at].step.op == "copy" and not begun[at],
                freed_bytes(at),
                -at,
            ),
        )
        ready.remove(done)
        ordered.append(found[done])
        left.subtract(id(v) for v in found[done].reads)
        for user in users[done]:
            needs[user].remove(done)
            if not needs[user]:
                ready.add(user)
    return ordered


def _dependencies(found: Sequence[Kernel]) -> tuple[list[set[int]], list[list[int]]]:
    """Of each kernel those that it waits for, and those that wait for it."""
    maker = {id(v): at for at, kernel in enumerate(found) for v in kernel.step.outputs}
    needs = [
        {maker[id(v)] for v in (*k.reads, *k.after) if id(v) in maker} for k in found
    ]
    users: list[list[int]] = [[] for _ in found]
    for at, makers in enumerate(needs):
        for made in makers:
            users[made].append(at)
    return needs, users


def _num_bytes(value: Value) -> int:
    """Of the whole array: the order is one however dims are cut."""
    return math.prod(value.shape) * value.dtype.itemsize
