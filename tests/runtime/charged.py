# SPDX-License-Identifier: Apache-2.0
"""The bytes of a step on every trunk, as costs charge them."""

from collections import Counter
from collections.abc import Iterable, Iterator

from hetjax.costs.costs import Costs
from tests.runtime.random_plans import Case


def messages(case: Case, costs: Costs) -> Iterator[tuple[str, float]]:
    """Yield (trunk, bytes) of all messages of a step, as costs charge them."""
    for (a, b), route in costs.routes.items():
        num_messages = case.plan.replicas[a[0]].num_microbatches
        for trunk in route.trunks:
            yield trunk, costs.message_bytes[a, b] * num_messages


def sums(costs: Costs) -> Iterator[tuple[str, float]]:
    """Yield (trunk, bytes) of all gradient sums of a step, as costs charge them."""
    for reduction in costs.reductions.values():
        yield from reduction.trunk_bytes.items()


def link_bytes(charged: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for trunk, size in charged:
        if ">" in trunk:
            found[trunk] += size  # pyright: ignore
    return dict(found)
