# SPDX-License-Identifier: Apache-2.0
"""Lists the kernels of a pass with the arrays that they move through memory.

The kernels are those of memory estimates (`fusion.py`), as on a GPU since Ampere, for
devices of all kinds. But from an array of which only a slice is used, a kernel reads
the slice, and into an array that is updated in place it writes the update. Does not own
seconds (`roofline.py`).
"""

from dataclasses import replace
from functools import lru_cache

from hetjax.costs.graph.fusion import Kernel, device_kernels
from hetjax.costs.graph.values import Graph, Operation, Value


@lru_cache(maxsize=2048)
def moving_kernels(graph: Graph) -> tuple[Kernel, ...]:
    """Return a graph's kernels; the caller treats the bodies of loops.

    A kernel moves its `reads` and the outputs of its step.
    """
    return device_kernels(_in_slices(graph))


def _in_slices(graph: Graph) -> Graph:
    """Return the graph with slices and updated arrays as inputs, updates as outputs."""
    inputs: list[Value] = [*graph.inputs]
    outputs: list[Value] = [*graph.outputs]
    steps: list[Operation] = []
    for step in graph.steps:
        if step.op == "dynamic_slice":
            inputs += step.outputs
        elif step.op == "dynamic_update_slice":
            written = replace(step.inputs[1])
            steps.append(replace(step, inputs=step.inputs[1:], outputs=(written,)))
            outputs.append(written)
            inputs += step.outputs
        else:
            steps.append(step)
    return Graph(inputs=tuple(inputs), outputs=tuple(outputs), steps=tuple(steps))
