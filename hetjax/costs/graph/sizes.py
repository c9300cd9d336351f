# SPDX-License-Identifier: Apache-2.0
"""Replaces the sizes with which graphs were traced.

Owns the rule that unchanged values, operations and graphs stay the same objects, so
that cached results for a loop's body hold for any number of iterations. Does not own
the meaning of the sizes in a trace (`passes.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hetjax.costs.graph.values import Graph, Operation, Value


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Numbers for primes: each replaces its prime in every size of which the prime is a
    factor. Values that graphs share stay shared."""

    numbers: Mapping[int, int]
    _values: dict[int, Value] = field(default_factory=dict)

    def size(self, traced: int) -> int:
        for prime, number in self.numbers.items():
            if traced and traced % prime == 0:
                return self.size(traced // prime) * number
        return traced

    def value(self, value: Value) -> Value:
        found = self._values.get(id(value))
        if found is None:
            shape = tuple(map(self.size, value.shape))
            found = value if shape == value.shape else replace(value, shape=shape)
            self._values[id(value)] = found
        return found

    def values(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        found = tuple(map(self.value, values))
        same = all(a is b for a, b in zip(found, values, strict=True))
        return values if same else found

    def graph(self, graph: Graph) -> Graph:
        inputs, outputs = self.values(graph.inputs), self.values(graph.outputs)
        steps = tuple(map(self._operation, graph.steps))
        is_new = any(a is not b for a, b in zip(steps, graph.steps, strict=True))
        if is_new or inputs is not graph.inputs or outputs is not graph.outputs:
            return Graph(inputs=inputs, outputs=outputs, steps=steps)
        return graph

    def _operation(self, step: Operation) -> Operation:
        before = step.inputs, step.outputs, step.after
        inputs, outputs, after = found = tuple(map(self.values, before))
        body = None if step.body is None else self.graph(step.body)
        length = self.size(step.length)
        is_new = any(a is not b for a, b in zip(found, before, strict=True))
        if not is_new and body is step.body and length == step.length:
            return step
        changed = {"inputs": inputs, "outputs": outputs, "after": after}
        return replace(step, **changed, body=body, length=length)
