# SPDX-License-Identifier: Apache-2.0
"""Determines the order in which kernels run.

Owns the orders of XLA that matter to memory. On CPUs a kernel runs as soon as its
inputs exist, on accelerators next the kernel that frees most. (For GPUs XLA also tries
two depth-first orders. Estimates with these were no closer to what compilers reported.)
Does not own kernels (`fusion.py`).
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from hetjax.costs.graph.fusion import Kernel
from hetjax.costs.graph.values import Graph, Value

Bytes = Callable[[Value], int]  # of an array on one device


def breadth_first(found: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels in the order in which they become ready."""
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


def least_memory(
    found: Sequence[Kernel],
    graph: Graph,
    num_bytes: Bytes,
    *,
    loops_wait: bool = False,
) -> list[Kernel]:
    """Return the kernels in the order of a list scheduler: next is the ready kernel
    that frees the most bytes, less those that it makes; of equals the first.

    Copies of the graph's inputs come before all others. With `loops_wait`, a loop
    starts after its zeros, which are scheduled like other arrays: for them, what the
    loop frees does not count.
    """
    needs, users = _dependencies(found)
    sizes = {id(v): num_bytes(v) for kernel in found for v in kernel.step.outputs}
    freed = sizes | {id(v): 0 for v in graph.outputs}  # outputs are never freed
    made = [sum(sizes[id(v)] for v in kernel.step.outputs) for kernel in found]
    left = Counter(id(v) for kernel in found for v in kernel.reads)

    def freed_bytes(at: int) -> int:
        if found[at].step.body is not None and loops_wait:
            return -made[at]
        last = (freed.get(id(v), 0) for v in found[at].reads if left[id(v)] == 1)
        return sum(last) - made[at]

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
    """Return, for each kernel, those that it waits for, and those that wait for it."""
    maker = {id(v): at for at, kernel in enumerate(found) for v in kernel.step.outputs}
    needs = [
        {maker[id(v)] for v in (*k.reads, *k.after) if id(v) in maker} for k in found
    ]
    users: list[list[int]] = [[] for _ in found]
    for at, makers in enumerate(needs):
        for made in makers:
            users[made].append(at)
    return needs, users
