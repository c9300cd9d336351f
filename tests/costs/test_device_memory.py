# SPDX-License-Identifier: Apache-2.0
"""What accelerators store, and in which order; the node's device selects the model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.cluster.catalogue import Backend, Compiler, compiler_of
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.graph.fusion import Kernel, device_kernels, identities, kernels
from hetjax.costs.graph.liveness import Surroundings, peak_bytes
from hetjax.costs.graph.passes import Shares, passes, split_passes
from hetjax.costs.graph.turns import least_memory
from hetjax.costs.graph.values import (
    Cuts,
    Dims,
    Graph,
    Operation,
    Origin,
    Value,
)
from hetjax.costs.plan_costs import costs_of
from hetjax.costs.stage_memory import stage_memory
from hetjax.costs.workspace import pass_bytes
from hetjax.plans.plan import StageMesh
from hetjax.stage.partition import stage_stacks
from tests.costs.small_models import INNER, WIDTH, family, pipeline, traced
from tests.short_runs import draws

COMPILERS: tuple[Compiler, ...] = (
    *("cpu", "gpu", "GPU-before-Ampere", "tpu", "TPU-v6e"),
)


def peak(graph: Graph, compiler: Compiler) -> int:
    cuts = Cuts(dims=Dims(), cut=frozenset(), tensor=1)
    return peak_bytes(graph, cuts, Surroundings(compiler=compiler))


def test_accelerators_sum_what_they_do_not_store():
    graph = traced(lambda x: jnp.sum(x + 1.0, axis=1), (64, 32))
    assert peak(graph, "cpu") == 64 * 32 * 4 + 64 * 4
    assert peak(graph, "gpu") == 64 * 4


def test_gpus_since_ampere_normalize_rows_without_storing_their_sums():
    graph = traced(lambda x: jax.nn.softmax(x + 1.0), (64, 32))
    rows, array = 64 * 4, 64 * 32 * 4
    assert peak(graph, "gpu") == array
    # the exponents, their sums, and the result; the maxima are done with
    assert peak(graph, "GPU-before-Ampere") == 2 * array + rows


def test_accelerators_read_a_matrix_either_way_whatever_dims_it_has():
    graph = traced(lambda x, y: jnp.einsum("blf,bld->fd", x, y), (2, 8, 16), (2, 8, 4))
    assert len(kernels(graph)) > len(device_kernels(graph))
    heads = traced(
        lambda q, k: jnp.einsum("blnh,bmnh->bnlm", q, k), *[(2, 8, 4, 16)] * 2
    )
    # queries and keys, as in compiled programs: their heads move to the front
    assert sum(k.step.op == "copy" for k in device_kernels(heads)) == 2


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
    around = Surroundings(compiler=backend, elsewhere=identities(graph.outputs))
    cuts = Cuts(dims=Dims(), cut=frozenset(), tensor=1)
    assert peak_bytes(graph, cuts, around) == pytest.approx(temporary, rel=0.1)


def test_another_shape_that_a_graph_gives_back_has_a_buffer_of_its_own():
    graph = traced(lambda x: x.reshape(8, 8), (64,))
    assert peak(graph, "gpu") == peak(graph, "cpu") == 64 * 4


@pytest.mark.parametrize("seed", draws(range(5), short=2))
def test_of_all_kernels_that_can_run_the_next_leaves_least_alive(seed: int):
    found, graph = random_kernels(np.random.default_rng(seed), 9)
    ordered = least_memory(found, graph, num_bytes)
    assert sorted(map(id, ordered)) == sorted(map(id, found))
    for at, kernel in enumerate(ordered):
        made = {id(v) for k in ordered[:at] for v in k.step.outputs}
        ready = [k for k in ordered[at:] if all(id(v) in made for v in k.reads)]
        assert kernel in ready
        left = {id(k): alive([*ordered[:at], k], found) for k in ready}
        assert left[id(kernel)] == min(left.values())


def num_bytes(value: Value) -> int:
    return 4 * value.shape[0]


@pytest.mark.parametrize(
    "function", [lambda x, a: x @ jnp.exp(a), lambda x, a: jnp.exp(x @ a)]
)
def test_a_tpu_has_products_in_one_with_what_is_around_them(
    function: Callable[..., jax.Array],
):
    graph = traced(function, (8, 16), (16, 32))
    assert peak(graph, "tpu") == 8 * 32 * 4
    assert peak(graph, "gpu") > 8 * 32 * 4


def test_a_tpu_stores_a_product_that_two_read():
    def both(x: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x @ a
        return jnp.exp(product), jnp.sin(product)

    graph = traced(both, (8, 16), (16, 32))
    assert peak(graph, "tpu") == 3 * 8 * 32 * 4


def gradients_of(x_ULD: jax.Array, y_ULF: jax.Array) -> jax.Array:
    """Return the product of every pair of slices."""

    def unit(_: None, slices: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x_LD, y_LF = slices
        return None, jnp.einsum("ld,lf->df", x_LD, y_LF)

    return jax.lax.scan(unit, None, (x_ULD, y_ULF))[1]


def test_products_of_a_tpus_loop_are_read_off_stacks_and_written_into_them():
    graph = traced(gradients_of, (4, 8, 16), (4, 8, 32))
    assert peak(graph, "tpu") == 4 * 16 * 32 * 4
    assert peak(graph, "gpu") > 4 * 16 * 32 * 4


def test_heads_of_a_batch_fill_the_lanes_of_a_tpu_and_nothing_else_does():
    dims = Dims()
    cuts = Cuts(dims=dims, cut=frozenset(), tensor=1, lanes=128)
    sizes = {
        (shape, origin): cuts.num_bytes(dims.value(shape, np.float32, origin))
        for shape in ((2, 8, 4, 80), (8, 4, 80), (2, 8, 4, 256))
        for origin in (Origin.BATCH, Origin.WEIGHTS)
    }
    padded = sizes.pop(((2, 8, 4, 80), Origin.BATCH))
    assert padded == 2 * 8 * 4 * 128 * 4
    assert all(size == 4 * np.prod(shape) for (shape, _), size in sizes.items())


def scores_of(stack: jax.Array, x_BLNH: jax.Array, order: str) -> jax.Array:
    """Return the largest score over heads of a stack's slices, dims in this order."""

    def unit(largest: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
        y_BLNH = jnp.transpose(y, [order.index(dim) for dim in "blnh"])
        scores = jnp.einsum("blnh,bmnh->bnlm", y_BLNH, x_BLNH)
        return jnp.maximum(largest, jnp.max(scores)), None

    return jax.lax.scan(unit, jnp.float32(0), stack)[0]


def test_a_stack_is_copied_if_a_product_reads_it_in_another_order_than_it_arrives_in():
    as_it_is, turned = (64, 2, 4, 16, 8), (64, 2, 8, 4, 16)
    stack_bytes = 64 * 2 * 8 * 4 * 16 * 4
    x_BLNH = 2, 8, 4, 16

    def own(stack: jax.Array, x_BLNH: jax.Array) -> jax.Array:
        return scores_of(jnp.sort(stack, axis=0), x_BLNH, "blnh")

    transposed = traced(partial(scores_of, order="bnhl"), as_it_is, x_BLNH)
    assert peak(transposed, "gpu") < stack_bytes / 2
    given = traced(partial(scores_of, order="blnh"), turned, x_BLNH)
    assert stack_bytes < peak(given, "gpu") < 1.5 * stack_bytes
    made = traced(own, turned, x_BLNH)  # in the order in which it is read
    assert stack_bytes < peak(made, "gpu") < 1.5 * stack_bytes


def outputs_of(stack: jax.Array, x_BLNH: jax.Array, turned: bool) -> jax.Array:
    """Return the largest output of heads whose scores are slices of a stack."""

    def unit(largest: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
        scores_BNLM = jnp.exp(jnp.swapaxes(y, 2, 3) if turned else y)
        outputs = jnp.einsum("bnlm,bmnh->bnlh", scores_BNLM, x_BLNH)
        return jnp.maximum(largest, jnp.max(outputs)), None

    return jax.lax.scan(unit, jnp.float32(0), stack)[0]


def test_a_stack_of_scores_is_copied_if_rows_and_columns_change_places():
    stack, x_BLNH = (64, 2, 4, 16, 16), (2, 16, 4, 8)
    stack_bytes = 64 * 2 * 4 * 16 * 16 * 4
    as_it_is = traced(partial(outputs_of, turned=False), stack, x_BLNH)
    assert peak(as_it_is, "gpu") < stack_bytes / 2
    turned = traced(partial(outputs_of, turned=True), stack, x_BLNH)
    assert stack_bytes < peak(turned, "gpu") < 1.5 * stack_bytes


@pytest.mark.parametrize(
    ("gate", "copies"),
    [
        (lambda gate, up: jax.nn.silu(gate) * up, 2),
        (lambda gate, up: jax.nn.silu(gate) + up, 0),
        (lambda gate, up: gate * gate + up, 0),
        (lambda gate, up: gate * (gate + up), 0),  # as in a norm's derivative
        (lambda gate, up: jax.nn.silu(gate) * up[:, :1], 0),
    ],
)
def test_stacks_that_gate_one_another_are_copied_for_a_v6e_alone(
    gate: Callable[[jax.Array, jax.Array], jax.Array], copies: int
):
    def outputs(gates: jax.Array, ups: jax.Array, w_FD: jax.Array) -> jax.Array:
        def unit(
            y_BLD: jax.Array, slices: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            return jnp.tanh(y_BLD + gate(*slices) @ w_FD), None

        zeros_BLD = jnp.zeros((2, 8, 4), jnp.float32)
        return jax.lax.scan(unit, zeros_BLD, (gates, ups))[0]

    graph = traced(outputs, *[(64, 2, 8, 16)] * 2, (16, 4))
    cuts = Cuts(dims=Dims(), cut=frozenset(), tensor=1)
    others = Surroundings(compiler="tpu")
    copied_bytes = peak_bytes(graph, cuts, replace(others, turns_gates=True))
    copied_bytes -= peak_bytes(graph, cuts, others)
    assert copied_bytes == copies * 64 * 2 * 8 * 16 * 4


def test_a_product_of_batches_reads_either_way_and_copies_what_is_in_neither():
    graph = traced(
        lambda scores, x: jnp.einsum("bnmlg,bmnh->bnlgh", scores, x),
        (2, 4, 8, 8, 2),
        (2, 8, 4, 16),
    )
    (copy,) = [k.step for k in device_kernels(graph) if k.step.op == "copy"]
    assert copy.inputs == graph.inputs[1:]  # x, whose batch dims are apart


def test_a_tpus_loop_begins_after_its_zeros_which_are_made_in_turn():
    dims = Dims()
    saved, logits, dx, stack, gradient = (
        dims.value((n,), np.float32, Origin.BATCH) for n in (90, 50, 1, 30, 20)
    )

    def kernel(made: Value, *reads: Value, body: Graph | None = None) -> Kernel:
        op = "dot_general" if body is None else "scan"
        step = Operation(op=op, params={}, inputs=reads, outputs=(made,), body=body)
        return Kernel(step=step, reads=reads)

    graph = Graph(inputs=(), outputs=(), steps=())
    first = [kernel(saved), kernel(logits, saved), kernel(dx, logits)]
    loop, product = kernel(stack, saved, dx, body=graph), kernel(gradient, logits)
    found = [*first, loop, product]
    at_once = least_memory(found, graph, num_bytes)
    assert at_once[3:] == [loop, product]  # it frees 61, the product 30
    waiting = least_memory(found, graph, num_bytes, loops_wait=True)
    assert waiting[3:] == [product, loop]


def random_kernels(rng: np.random.Generator, number: int) -> tuple[list[Kernel], Graph]:
    """Return kernels of one output each that read some outputs of earlier kernels."""
    dims, found, made = Dims(), [], []
    for _ in range(number):
        reads = tuple(v for v in made if rng.random() < 0.4)
        shape = (int(rng.integers(1, 100)),)
        made.append(dims.value(shape, np.float32, Origin.BATCH))
        step = Operation(op="dot_general", params={}, inputs=reads, outputs=(made[-1],))
        found.append(Kernel(step=step, reads=reads))
    return found, Graph(inputs=(), outputs=(), steps=())


def alive(done: list[Kernel], found: list[Kernel]) -> int:
    """Return the elements live after these kernels: those read later or never read."""
    later = {id(v) for k in found if k not in done for v in k.reads}
    read = {id(v) for k in found for v in k.reads}
    made = [v for kernel in done for v in kernel.step.outputs]
    return sum(v.shape[0] for v in made if id(v) in later or id(v) not in read)


def test_a_tpu_holds_all_gradients_of_a_backward_until_its_end():
    stage = stage_stacks(family("llama"), [(0, 5)])
    shares = Shares(
        num_sequences=1, seq_len=8, hidden_size=WIDTH, dtype="float32", tensor=1
    )
    traced = passes(stage, shares, "none")
    gradients = traced.backward.outputs[: len(traced.trained)]
    gradient_bytes = sum(map(traced.cuts.num_bytes, gradients))
    assert pass_bytes(traced, 1, "tpu")["backward"] >= gradient_bytes


@pytest.mark.parametrize(("name", "copies"), [("llama", 2), ("gpt", 0), ("moe", 0)])
def test_an_input_gradient_alone_is_given_copies_of_gates_on_a_v6e(
    name: str, copies: int
):
    stage = stage_stacks(family(name), [(1, 4)])
    shares = Shares(
        num_sequences=1, seq_len=8, hidden_size=WIDTH, dtype="float32", tensor=1
    )
    whole, halves = (trace(stage, shares, "none") for trace in (passes, split_passes))
    assert pass_bytes(whole, 1, "TPU-v6e") == pass_bytes(whole, 1, "tpu")
    others, found = (pass_bytes(halves, 1, kind) for kind in ("tpu", "TPU-v6e"))
    stack_bytes = 3 * 8 * INNER * 4
    found["input gradient"] -= copies * stack_bytes
    assert found == others


@pytest.mark.parametrize(
    "device", ["cpu", "A100-SXM4-80GB", "V100-SXM2-32GB", "TPU-v4", "TPU-v6e"]
)
def test_the_device_of_the_node_selects_the_model_of_memory(device: str):
    model = family("llama")
    plan = pipeline(model, (0, 2), (2, 5), (5, 6), mesh=StageMesh(), remat="selective")
    cluster = Cluster(name="one", nodes=(Node(name="n", device=device, count=8),))
    costs = costs_of(plan, model, cluster, dtype="float32")
    expected = stage_memory(
        plan, model, (0, 1), dtype="float32", compiler=compiler_of(device)
    )
    assert costs.memory[0, 1] == expected
    others = {
        stage_memory(plan, model, (0, 1), dtype="float32", compiler=b).workspace_bytes
        for b in COMPILERS
    }
    assert len(others) == 4  # kinds of TPU differ for split backwards
