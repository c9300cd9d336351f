# SPDX-License-Identifier: Apache-2.0
"""What accelerators store, in which order; the node's device selects the model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.cluster.catalogue import Backend, backend_of
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.graph.fusion import Kernel, device_kernels, identities, kernels
from hetjax.costs.graph.liveness import Surroundings, peak_bytes
from hetjax.costs.graph.turns import least_memory
from hetjax.costs.graph.values import Cuts, Dims, Graph, Operation, Origin, graph_of
from hetjax.costs.plan_costs import costs_of
from hetjax.costs.stage_memory import stage_memory
from hetjax.plans.plan import StageMesh
from tests.costs.small_models import family, pipeline


def traced(function: Callable[..., object], *shapes: tuple[int, ...]) -> Graph:
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    dims = Dims()
    inputs = [dims.value(a.shape, a.dtype, Origin.BATCH) for a in abstract]
    return graph_of(jax.make_jaxpr(function)(*abstract), inputs, dims)


def peak(graph: Graph, backend: Backend) -> int:
    cuts = Cuts(dims=Dims(), cut=frozenset(), tensor=1)
    return peak_bytes(graph, cuts, Surroundings(backend=backend))


def test_accelerators_sum_what_they_do_not_store():
    graph = traced(lambda x: jnp.sum(x + 1.0, axis=1), (64, 32))
    assert peak(graph, "cpu") == 64 * 32 * 4 + 64 * 4
    assert peak(graph, "gpu") == 64 * 4


def test_accelerators_read_a_matrix_either_way_whatever_dims_it_has():
    graph = traced(lambda x, y: jnp.einsum("blf,bld->fd", x, y), (2, 8, 16), (2, 8, 4))
    assert len(kernels(graph)) > len(device_kernels(graph))
    heads = traced(
        lambda q, k: jnp.einsum("blnh,bmnh->bnlm", q, k), *[(2, 8, 4, 16)] * 2
    )
    assert sum(k.step.op == "copy" for k in device_kernels(heads)) == 1  # queries


def test_kernels_that_read_one_array_are_one_unless_one_reads_the_other():
    def siblings(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (x + 1.0) @ w, (x * 2.0) @ w

    def chain(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = (x + 1.0) @ w
        return y, (x * y) @ w

    joint = device_kernels(traced(siblings, (8, 8), (8, 8)))
    assert [len(k.step.outputs) for k in joint if k.step.op == "fusion"] == [2]
    apart = device_kernels(traced(chain, (8, 8), (8, 8)))
    assert all(k.step.op != "fusion" for k in apart)


def looped(table_ND: jax.Array, y_LD: jax.Array) -> jax.Array:
    def layer(y_LD: jax.Array, w_DD: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(y_LD @ w_DD), None

    return jax.lax.scan(layer, y_LD, table_ND.reshape(-1, 256, 256))[0]


def multiplied(table_ND: jax.Array, y_LD: jax.Array) -> jax.Array:
    return y_LD @ jnp.sort(table_ND, axis=0).reshape(256, -1)


@pytest.mark.parametrize("function", [looped, multiplied])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_another_shape_of_what_is_stored_takes_no_bytes(
    function: Callable[..., jax.Array], backend: Backend
):
    shapes = (2048, 256), (8, 256)
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled: Any = jax.jit(function).lower(*abstract).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    graph = traced(function, *shapes)
    around = Surroundings(backend=backend, elsewhere=identities(graph.outputs))
    cuts = Cuts(dims=Dims(), cut=frozenset(), tensor=1)
    assert peak_bytes(graph, cuts, around) == pytest.approx(temporary, rel=0.1)


def test_another_shape_that_a_graph_gives_back_has_a_buffer_of_its_own():
    graph = traced(lambda x: x.reshape(8, 8), (64,))
    assert peak(graph, "gpu") == peak(graph, "cpu") == 64 * 4


@pytest.mark.parametrize("seed", range(5))
def test_of_all_kernels_that_can_run_the_next_leaves_least_alive(seed: int):
    found, graph = random_kernels(np.random.default_rng(seed), 9)
    ordered = least_memory(found, graph)
    assert sorted(map(id, ordered)) == sorted(map(id, found))
    for at, kernel in enumerate(ordered):
        made = {id(v) for k in ordered[:at] for v in k.step.outputs}
        ready = [k for k in ordered[at:] if all(id(v) in made for v in k.reads)]
        assert kernel in ready
        left = {id(k): alive([*ordered[:at], k], found) for k in ready}
        assert left[id(kernel)] == min(left.values())


def random_kernels(rng: np.random.Generator, number: int) -> tuple[list[Kernel], Graph]:
    """Kernels of one output each, which read what some before have made."""
    dims, found, made = Dims(), [], []
    for _ in range(number):
        reads = tuple(v for v in made if rng.random() < 0.4)
        shape = (int(rng.integers(1, 100)),)
        made.append(dims.value(shape, np.float32, Origin.BATCH))
        step = Operation(op="dot_general", params={}, inputs=reads, outputs=(made[-1],))
        found.append(Kernel(step=step, reads=reads))
    return found, Graph(inputs=(), outputs=(), steps=())


def alive(done: list[Kernel], found: list[Kernel]) -> int:
    """Elements that live after these kernels: read by another, or by none at all."""
    later = {id(v) for k in found if k not in done for v in k.reads}
    read = {id(v) for k in found for v in k.reads}
    made = [v for kernel in done for v in kernel.step.outputs]
    return sum(v.shape[0] for v in made if id(v) in later or id(v) not in read)


@pytest.mark.parametrize("device", ["cpu", "A100-SXM4-80GB", "TPU-v4"])
def test_the_device_of_the_node_selects_the_model_of_memory(device: str):
    model = family("llama")
    plan = pipeline(model, (0, 2), (2, 5), (5, 6), mesh=StageMesh(), remat="selective")
    cluster = Cluster(name="one", nodes=(Node(name="n", device=device, count=8),))
    costs = costs_of(plan, model, cluster, dtype="float32")
    backend = backend_of(device)
    expected = stage_memory(plan, model, (0, 1), dtype="float32", backend=backend)
    assert costs.memory[0, 1] == expected
    others = {
        stage_memory(plan, model, (0, 1), dtype="float32", backend=b).workspace_bytes
        for b in ("cpu", "gpu")
    }
    assert len(others) == 2
