# SPDX-License-Identifier: Apache-2.0
"""Estimates the temporary bytes of a stage's programs, per backend of XLA.

Owns what surrounds the traced passes in their programs: accumulators of gradients,
outputs with their own buffers, and the residuals that XLA's CPU backend copies. Does
not own what is live at once in a graph (`graph/liveness.py`).
"""

from collections.abc import Mapping
from functools import lru_cache

from hetjax.cluster.catalogue import Backend, Compiler, backend_of_compiler
from hetjax.costs.graph.fusion import identities
from hetjax.costs.graph.liveness import Surroundings, peak_bytes
from hetjax.costs.graph.passes import Passes, SplitPasses
from hetjax.costs.graph.values import Graph, Operation, Origin, Value

# Factors for what the model of XLA leaves out: small buffers, gaps between buffers and
# copies for layouts. `experiments/compiled_memory/` chose them, and reports how well
# they predict kinds that were left out.
MARGINS: Mapping[Backend, float] = {"cpu": 1.06, "gpu": 1.17, "tpu": 1.20}

# What a TPU's compiler keeps of a fused program in the memory of the vector unit, or in
# v4's CMEM, at the peak. Programs were seen to use 45 to 112 MiB of it.
_VECTOR_BYTES = 45 * 2**20


def workspace_bytes(traced: Passes | SplitPasses, data: int, compiler: Compiler) -> int:
    """Estimate the temporary bytes of the largest pass, with a margin."""
    largest = max(pass_bytes(traced, data, compiler).values())
    return round(MARGINS[backend_of_compiler(compiler)] * largest)


def pass_bytes(
    traced: Passes | SplitPasses, data: int, compiler: Compiler
) -> dict[str, int]:
    """Estimate the temporary bytes of each pass.

    The passes are F and B, or FB on the last stage, or F, I and W.
    """
    backend = backend_of_compiler(compiler)
    if isinstance(traced, Passes) and not traced.forward.outputs[0].shape:
        return {"fused": _fused_bytes(traced, data, compiler)}  # the output is a loss
    outputs = identities(traced.forward.outputs)
    around = Surroundings(compiler=compiler, elsewhere=outputs)
    found = {"forward": peak_bytes(traced.forward, traced.cuts, around)}
    relaid = _relaid(traced, data) if backend == "cpu" else frozenset()
    for name, backward in _backwards(traced, backend).items():
        elsewhere = _added_in_place(backward, data, backend)
        if name == "input gradient" or backend == "cpu":
            elsewhere |= identities(backward.outputs)
        around = Surroundings(
            compiler=compiler,
            elsewhere=elsewhere,
            relaid=relaid,
            turns_gates=(name, compiler) == ("input gradient", "TPU-v6e"),
        )
        found[name] = peak_bytes(backward, traced.cuts, around)
    return found


def _backwards(traced: Passes | SplitPasses, backend: Backend) -> dict[str, Graph]:
    """Return the graphs of the backward or its halves, with gradient accumulation."""
    if isinstance(traced, Passes):
        return {"backward": _accumulating(traced, backend)}
    second = traced.weight_gradient
    return {
        "input gradient": traced.input_gradient,
        "weight gradient": _added(second, second.outputs),
    }


def _fused_bytes(traced: Passes, data: int, compiler: Compiler) -> int:
    backend = backend_of_compiler(compiler)
    backward = _accumulating(traced, backend)
    fused = Graph(
        inputs=traced.forward.inputs,
        outputs=backward.outputs,
        steps=(*traced.forward.steps, *backward.steps),
    )
    elsewhere = _added_in_place(backward, data, backend)
    around = Surroundings(compiler=compiler, elsewhere=elsewhere)
    fused_bytes = peak_bytes(fused, traced.cuts, around)
    return max(fused_bytes - _VECTOR_BYTES, 0) if backend == "tpu" else fused_bytes


def saved_bytes(traced: Passes | SplitPasses, value: Value, data: int) -> int:
    copies = 1 if value.origin is Origin.BATCH else data
    return copies * traced.cuts.num_bytes(value)


def _accumulating(traced: Passes, backend: Backend) -> Graph:
    """Return the backward pass with additions of its gradients to the accumulators.

    Programs for TPUs were seen to add at their end.
    """
    outputs, num_trained = traced.backward.outputs, len(traced.trained)
    gradients, others = outputs[:num_trained], outputs[num_trained:]
    after = outputs if backend == "tpu" else ()
    return _added(traced.backward, gradients, others, after)


@lru_cache(maxsize=1024)
def _added(
    graph: Graph,
    gradients: tuple[Value, ...],
    outputs: tuple[Value, ...] = (),
    after: tuple[Value, ...] = (),
) -> Graph:
    additions = tuple(
        Operation(
            op="accumulate", params={}, inputs=(gradient,), outputs=(), after=after
        )
        for gradient in gradients
    )
    return Graph(inputs=graph.inputs, outputs=outputs, steps=graph.steps + additions)


def _added_in_place(backward: Graph, data: int, backend: Backend) -> frozenset[int]:
    """Return the scatters that a CPU makes into the accumulator itself (data > 1)."""
    if backend != "cpu":
        return frozenset()
    scatters = [s for s in backward.steps if s.op == "scatter-add" and data > 1]
    return identities([v for step in scatters for v in step.outputs])


def _relaid(traced: Passes | SplitPasses, data: int) -> frozenset[int]:
    """Return the stacks of residuals that the backward loop can only read as a copy.

    They arrive with the data dim first. If that moves another dim, or if XLA cannot
    distinguish it from a second dim of size 1, it copies the whole stack.
    """
    return identities(
        [v for v in traced.saved if data > 1 or 1 in traced.cuts.shape(v)[1:]]
    )
