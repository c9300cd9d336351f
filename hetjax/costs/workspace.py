# SPDX-License-Identifier: Apache-2.0
"""Temporary bytes of the programs of a stage, by XLA's backend.

Owns what surrounds the traced passes in their programs: accumulators that gradients are
added into, outputs with buffers of their own, and the copies that XLA's CPU backend
makes of residuals. Does not own what lives at once in a graph (`graph/liveness.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from hetjax.cluster.catalogue import Backend
from hetjax.costs.graph.fusion import identities
from hetjax.costs.graph.kernels import all_reduces
from hetjax.costs.graph.liveness import (
    Surroundings,
    least_peak_bytes,
    peak_bytes,
)
from hetjax.costs.graph.passes import Passes, SplitPasses
from hetjax.costs.graph.values import Cuts, Graph, Operation, Origin, Value

# The model of XLA leaves out small buffers, gaps between buffers and the copies that
# layouts cost; so much more there is of what it says.
# Chosen by `experiments/compiled_memory/`, which says how well kinds that are left out
# are foretold.
MARGINS: Mapping[Backend, float] = {"cpu": 1.05, "gpu": 1.19, "tpu": 1.20}

# Seen of programs for TPUs: the heap of a whole backward over what lives at once, the
# memory of every all-reduce, whatever its size, and what of a loop's body lies in the
# memory of the vector unit, or of v4's CMEM (64 to 128 MiB, shared with prefetches).
_GAPS = 1.25
_SUMMING_BYTES = 64 * 2**20
_VECTOR_BYTES = 32 * 2**20


def workspace_bytes(traced: Passes | SplitPasses, data: int, backend: Backend) -> int:
    """Estimate the temporary bytes of the largest pass, its margin included."""
    largest = max(pass_bytes(traced, data, backend).values())
    return round(MARGINS[backend] * largest)


def pass_bytes(
    traced: Passes | SplitPasses, data: int, backend: Backend
) -> dict[str, int]:
    """Estimate the temporary bytes of each pass.

    Those are F and B, or FB on the last stage, or F, I and W.
    """
    if isinstance(traced, Passes) and not traced.forward.outputs[0].shape:
        return {"fused": _fused_bytes(traced, data, backend)}  # it gives a loss
    outputs = identities(traced.forward.outputs)
    around = _around(backend, outputs)
    forward_bytes = least_peak_bytes(traced.forward, traced.cuts, around)
    found = {"forward": forward_bytes + _summing_bytes(traced.forward, traced, backend)}
    for name, backward in _backwards(traced).items():
        elsewhere = _added_in_place(backward, data, backend)
        if name == "input gradient" or backend == "cpu":
            elsewhere |= identities(backward.outputs)
        around = _around(backend, elsewhere)
        found[name] = _backward_bytes(traced, backward, data, around)
        found[name] += _summing_bytes(backward, traced, backend)
    return found


def _around(backend: Backend, elsewhere: frozenset[int]) -> Surroundings:
    vector_bytes = _VECTOR_BYTES if backend == "tpu" else 0
    return Surroundings(backend=backend, elsewhere=elsewhere, vector_bytes=vector_bytes)


def _backwards(traced: Passes | SplitPasses) -> dict[str, Graph]:
    """What runs in place of a backward, gradients added to their accumulators."""
    if isinstance(traced, Passes):
        return {"backward": _accumulating(traced)}
    second = traced.weight_gradient
    return {
        "input gradient": traced.input_gradient,
        "weight gradient": _added(second, second.outputs, ()),
    }


def _fused_bytes(traced: Passes, data: int, backend: Backend) -> int:
    backward = _accumulating(traced)
    fused = Graph(
        inputs=traced.forward.inputs,
        outputs=backward.outputs,
        steps=(*traced.forward.steps, *backward.steps),
    )
    elsewhere = _added_in_place(backward, data, backend)
    around = _around(backend, elsewhere)
    fused_bytes = _whole_bytes(fused, traced.cuts, around)
    return fused_bytes + _summing_bytes(fused, traced, backend)


def _backward_bytes(
    traced: Passes | SplitPasses, backward: Graph, data: int, around: Surroundings
) -> int:
    if around.backend != "cpu":
        halves = isinstance(traced, SplitPasses)
        peak = least_peak_bytes if halves else _whole_bytes
        return peak(backward, traced.cuts, around)
    relaid = replace(around, relaid=_relaid(traced, data))
    copies_bytes = _own_copies_bytes(traced, backward, data)
    return peak_bytes(backward, traced.cuts, relaid) + copies_bytes


def _whole_bytes(graph: Graph, cuts: Cuts, around: Surroundings) -> int:
    """Of a backward that is not cut in halves.

    XLA for GPUs was seen to run it in the first order where another would do with less.
    On a TPU what loops need and what all else does were seen to share no space, and to
    have gaps between.
    """
    if around.backend != "tpu":
        return peak_bytes(graph, cuts, around)
    loops = [step for step in graph.steps if step.body is not None]
    others = [step for step in graph.steps if step.body is None]

    def peak(of: Graph, without: list[Operation]) -> int:
        made = identities([v for step in without for v in step.outputs])
        return peak_bytes(of, cuts, replace(around, elsewhere=around.elsewhere | made))

    beside_bytes = peak(replace(graph, steps=tuple(others)), loops)
    apart_bytes = peak(graph, others) + max(beside_bytes - around.vector_bytes, 0)
    return round(_GAPS * apart_bytes)


def _summing_bytes(graph: Graph, traced: Passes | SplitPasses, backend: Backend) -> int:
    """What a TPU sets aside for sums over devices."""
    sums = backend == "tpu" and all_reduces(graph, traced.cuts)
    return _SUMMING_BYTES if sums else 0


def saved_bytes(traced: Passes | SplitPasses, value: Value, data: int) -> int:
    copies = 1 if value.origin is Origin.BATCH else data
    return copies * traced.cuts.num_bytes(value)


def _accumulating(traced: Passes) -> Graph:
    """The backward pass with its gradients added into their accumulators."""
    outputs, num_trained = traced.backward.outputs, len(traced.trained)
    return _added(traced.backward, outputs[:num_trained], outputs[num_trained:])


@lru_cache(maxsize=1024)
def _added(
    graph: Graph, gradients: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Graph:
    additions = tuple(
        Operation(op="accumulate", params={}, inputs=(gradient,), outputs=())
        for gradient in gradients
    )
    return Graph(inputs=graph.inputs, outputs=outputs, steps=graph.steps + additions)


def _added_in_place(backward: Graph, data: int, backend: Backend) -> frozenset[int]:
    """Scatters that a CPU makes into the accumulator itself: those over a data dim."""
    if backend != "cpu":
        return frozenset()
    scatters = [s for s in backward.steps if s.op == "scatter-add" and data > 1]
    return identities([v for step in scatters for v in step.outputs])


def _relaid(traced: Passes | SplitPasses, data: int) -> frozenset[int]:
    """Stacks of residuals that the backward loop can only read as a copy.

    They arrive with the data dim first. Where that moves another dim, and where XLA
    cannot tell it from a second dim of size 1, it copies the whole stack.
    """
    return identities(
        [v for v in traced.saved if data > 1 or 1 in traced.cuts.shape(v)[1:]]
    )


def _own_copies_bytes(traced: Passes | SplitPasses, backward: Graph, data: int) -> int:
    """Each data rank's copy out of residuals that are stacked over all ranks, where no
    loop reads them."""
    if data == 1:
        return 0
    loops = [step for step in backward.steps if step.body is not None]
    looped = identities([v for step in loops for v in step.inputs])
    return sum(
        traced.cuts.num_bytes(v)
        for v in traced.saved
        if v.origin is not Origin.BATCH and id(v) not in looped
    )
