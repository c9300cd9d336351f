# SPDX-License-Identifier: Apache-2.0
"""Determines the order in which kernels run.

Owns the orders of XLA that matter to memory. On CPUs a kernel runs as soon as its
inputs exist. For accelerators XLA tries three orders: next the kernel that frees most,
and two depth-first orders. Does not own kernels (`fusion.py`), nor which of the three a
program has (`liveness.py`).
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from hetjax.costs.graph.fusion import WRITE, Kernel, gathers
from hetjax.costs.graph.values import Graph, Value

Bytes = Callable[[Value], int]  # of an array on one device
Stacks = Mapping[int, int]  # output of a body -> bytes of the stack that it goes to


def breadth_first(found: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels in the order in which they become ready.

    A loop waits for the tuple of its inputs, and the tuple for zeros to be made and
    copied: three more steps.
    """
    needs, users = _dependencies(found)
    for at, kernel in enumerate(found):
        if kernel.step.body is not None:
            _wait_for_tuple(at, needs, users)
    ready = deque(at for at, makers in enumerate(needs) if not makers)
    ordered = []
    while ready:
        done = ready.popleft()
        if done < len(found):
            ordered.append(found[done])
        for user in users[done]:
            needs[user].remove(done)
            if not needs[user]:
                ready.append(user)
    return ordered


def _wait_for_tuple(loop: int, needs: list[set[int]], users: list[list[int]]) -> None:
    """Insert zeros, their copies and a tuple in a row between a loop and its needs."""
    zeros = len(needs)
    copies, whole = zeros + 1, zeros + 2
    for made in needs[loop]:
        users[made] = [whole if user == loop else user for user in users[made]]
    needs += [set(), {zeros}, needs[loop] | {copies}]
    users += [[copies], [whole], [loop]]
    needs[loop] = {whole}


def least_memory(
    found: Sequence[Kernel],
    graph: Graph,
    num_bytes: Bytes,
    stacks: Stacks,
    partial: Collection[int] = (),
    *,
    loops_wait: bool = False,
) -> list[Kernel]:
    """Return the kernels in the order of a list scheduler: next is the ready kernel
    that frees the most bytes, less those that it makes; of equals the first.

    Copies of the graph's inputs come before all others. For the scheduler, a write into
    one of the `stacks` makes the whole stack. Devices all-reduce `partial` values;
    meanwhile another product or loop runs, if one is ready. With `loops_wait`, a loop
    starts after its zeros, which are scheduled like other arrays: for them, what the
    loop frees does not count.
    """
    needs, users = _dependencies(found)
    sizes = {id(v): num_bytes(v) for kernel in found for v in kernel.step.outputs}
    kept = {id(v): 0 for v in graph.outputs if id(v) not in stacks}  # never freed
    freed, made = sizes | kept, [_made_bytes(k, sizes, stacks) for k in found]
    left = Counter(id(v) for kernel in found for v in kernel.reads)

    def freed_bytes(at: int) -> int:
        if found[at].step.body is not None and loops_wait:
            return -made[at]
        last = (freed.get(id(v), 0) for v in found[at].reads if left[id(v)] == 1)
        return sum(last) - made[at]

    ready = {at for at, makers in enumerate(needs) if not makers}
    ordered = []
    begun = [bool(makers) for makers in needs]
    under_way: set[int] = set()
    while ready:
        done = max(
            ready,
            key=lambda at: (
                found[at].step.op == "copy" and not begun[at],
                all(id(v) not in under_way for v in found[at].reads),
                freed_bytes(at),
                -at,
            ),
        )
        ready.remove(done)
        ordered.append(found[done])
        left.subtract(id(v) for v in found[done].reads)
        if gathers(found[done].step):
            made_now = found[done].step.outputs
            under_way = {id(v) for v in made_now if id(v) in partial}
        for user in users[done]:
            needs[user].remove(done)
            if not needs[user]:
                ready.add(user)
    return ordered


def depth_first(
    found: Sequence[Kernel], graph: Graph, num_bytes: Bytes, *, weighed: bool
) -> list[Kernel]:
    """Return the kernels in post-order from the graph's outputs: each after all that it
    reads. `weighed`: first the kernel that, with all that it needs, has the most
    further readers, and of equals the one that makes the most bytes.
    """
    maker = {id(v): at for at, kernel in enumerate(found) for v in kernel.step.outputs}
    writer = {id(k.reads[0]): at for at, k in enumerate(found) if k.step.op == WRITE}
    read = [
        dict.fromkeys(maker[id(v)] for v in (*k.reads, *k.after) if id(v) in maker)
        for k in found
    ]
    ends = [(writer | maker | writer).get(id(v)) for v in graph.outputs]
    _, users = _dependencies(found)
    ends += [at for at in range(len(found)) if not users[at]]
    weights = _weights(found, read, users, num_bytes) if weighed else None
    stacked = [_heaviest_last(of, weights) for of in read]
    ordered = _post_order(_heaviest_last(ends, weights), stacked)
    return [found[at] for at in ordered]


def _post_order(ends: Iterable[int], read: Sequence[Iterable[int]]) -> list[int]:
    """Return kernels, each after all that it reads; of several, the last one first."""
    ordered: dict[int, None] = {}
    left = [(at, False) for at in ends]
    while left:
        at, is_read = left.pop()
        if is_read:
            ordered[at] = None
        elif at not in ordered:
            left += [(at, True), *((of, False) for of in read[at])]
    return list(ordered)


def _heaviest_last(
    kernels: Iterable[int | None], weights: Sequence[tuple[int, int]] | None
) -> list[int]:
    """Return kernels as a stack, of which the last is taken first."""
    found = list(dict.fromkeys(at for at in kernels if at is not None))
    if weights is not None:
        found.sort(key=lambda at: weights[at], reverse=True)
    return found[::-1]


def _weights(
    found: Sequence[Kernel],
    read: Sequence[Iterable[int]],
    users: Sequence[Sequence[int]],
    num_bytes: Bytes,
) -> list[tuple[int, int]]:
    """Return, for each kernel, its readers beyond the first, and the bytes it makes.

    Both include all that the kernel needs, once per path, and are capped: at the number
    of kernels and at all their bytes.
    """
    own = [sum(map(num_bytes, kernel.step.outputs)) for kernel in found]
    most, weights = (len(found), sum(own)), [(0, 0)] * len(found)
    for at in _post_order(range(len(read)), read):
        readers = max(len(users[at]) - 1, 0) + sum(weights[of][0] for of in read[at])
        size = own[at] + sum(weights[of][1] for of in read[at])
        weights[at] = min(readers, most[0]), min(size, most[1])
    return weights


def _made_bytes(kernel: Kernel, sizes: Mapping[int, int], stacks: Stacks) -> int:
    if kernel.step.op == WRITE:
        return stacks[id(kernel.reads[0])]
    return sum(sizes[id(v)] for v in kernel.step.outputs)


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
