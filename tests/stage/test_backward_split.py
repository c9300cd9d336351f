# SPDX-License-Identifier: Apache-2.0
"""I and W: the split of any function, and what a stage keeps between them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.plans.plan import Plan, Remat, Replica, Stage, StageMesh
from hetjax.runtime.execution.programs import StagePrograms
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.stage.backward_split import split_backward

WIDTH, NUM_UNITS, LENGTH = 6, 3, 5


def units(body: Any) -> Any:
    """Return the loss of a scanned run of units, which depends on all weights."""

    def loss(weights: dict[str, jax.Array], x_LD: jax.Array) -> jax.Array:
        def one(x_LD: jax.Array, unit: dict[str, jax.Array]):
            return body(x_LD, unit, weights["shared"]), None

        own = {name: w for name, w in weights.items() if name != "shared"}
        return jnp.sum(jnp.sin(jax.lax.scan(one, x_LD, own)[0]))

    return loss


def dense(x_LD: jax.Array, unit: Any, shared_DD: jax.Array) -> jax.Array:
    y_LD = jnp.tanh(x_LD * unit["scale"][None, :]) @ unit["up"]
    return x_LD + jax.nn.silu(y_LD) @ unit["down"] @ shared_DD


def with_inner_loop(x_LD: jax.Array, unit: Any, shared_DD: jax.Array) -> jax.Array:
    def token(state_D: jax.Array, x_D: jax.Array):
        state_D = jnp.tanh(state_D @ unit["up"] + x_D)
        return state_D, state_D @ shared_DD

    _, y_LD = jax.lax.scan(token, jnp.zeros(WIDTH), x_LD)
    return x_LD + (y_LD * unit["scale"][None, :]) @ unit["down"]


def with_a_choice(x_LD: jax.Array, unit: Any, shared_DD: jax.Array) -> jax.Array:
    y_LD = jax.lax.cond(
        jnp.sum(x_LD) > 0,
        lambda x: x @ unit["up"],
        lambda x: jnp.cos(x) @ unit["up"] ** 2,
        x_LD,
    )
    return x_LD + (y_LD + unit["scale"][None, :] ** 3) @ unit["down"] @ shared_DD


BODIES = {
    "dense": dense,
    "full remat": jax.checkpoint(dense),
    "inner loop": with_inner_loop,
    "inner loop, full remat": jax.checkpoint(with_inner_loop),
    "choice": with_a_choice,
}


def example(seed: int) -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    weights = {name: draw(NUM_UNITS, WIDTH, WIDTH) / 3 for name in ("up", "down")}
    weights |= {"scale": draw(NUM_UNITS, WIDTH), "shared": draw(WIDTH, WIDTH) / 3}
    return weights, draw(LENGTH, WIDTH)


@pytest.mark.parametrize("name", BODIES)
def test_the_halves_in_turn_give_the_gradients_of_the_whole(name: str):
    weights, x_LD = example(0)
    leaves, tree = jax.tree.flatten((weights, x_LD))

    def whole(*leaves: jax.Array) -> list[jax.Array]:
        grads, dx = jax.grad(units(BODIES[name]), (0, 1))(*tree.unflatten(leaves))
        return [dx, *jax.tree.leaves(grads)]

    halves = split_backward(whole, 1, leaves)
    first, crossing = jax.jit(halves.first)(*leaves)
    second = jax.jit(halves.second)([leaves[i] for i in halves.kept], crossing)
    for made, expected in zip([*first, *second], jax.jit(whole)(*leaves), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dense", "full remat"])
def test_the_second_half_is_one_product_per_matrix_and_none_is_done_twice(name: str):
    leaves, tree = jax.tree.flatten(example(0))

    def whole(*leaves: jax.Array) -> list[jax.Array]:
        grads, dx = jax.grad(units(BODIES[name]), (0, 1))(*tree.unflatten(leaves))
        return [dx, *jax.tree.leaves(grads)]

    halves = split_backward(whole, 1, leaves)
    _, crossing = jax.eval_shape(halves.first, *leaves)
    kept = [leaves[i] for i in halves.kept]
    texts = (
        str(jax.make_jaxpr(halves.second)(kept, crossing)),
        str(jax.make_jaxpr(halves.first)(*leaves)),
        str(jax.make_jaxpr(whole)(*leaves)),
    )
    second, first, both = (text.count("dot_general") for text in texts)
    assert second == 3  # up, down and shared
    # 3 in the forward, 6 for gradients; remat repeats the first two
    assert first + second == both == (9 if name == "dense" else 11)


SEQ_LEN, HIDDEN, INNER, VOCAB = 8, 16, 32, 64
MODEL = llama_model(
    LlamaConfig(
        name="llama",
        vocab_size=VOCAB,
        vocab_multiple=VOCAB,
        hidden_size=HIDDEN,
        inner_size=INNER,
        num_blocks=4,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=SEQ_LEN,
    )
)


def stage_programs(number: int, remat: Remat, mesh: StageMesh) -> StagePrograms:
    """Return the programs of one of two stages.

    Each stage has two blocks, and the embedding or the head.
    """
    devices = tuple(range(mesh.data * mesh.tensor))
    stages = tuple(
        Stage(
            node="n",
            devices=devices,
            mesh=mesh,
            layers=layers,
            remat=remat,
            launch_ahead=1,
        )
        for layers in [(0, 3), (3, 6)]
    )
    plan = Plan(
        model=MODEL.name,
        seq_len=SEQ_LEN,
        global_batch=2,
        replicas=(Replica(num_microbatches=1, microbatch_size=2, stages=stages),),
    )
    embedded = StageRuntime(plan, MODEL, {"n": jax.devices()}, optax.sgd(0.1))
    return embedded.stages[0, number].programs


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("number", [0, 1])
def test_between_i_and_w_lives_what_goes_into_each_matrix_and_its_gradient(
    number: int, remat: Remat
):
    mesh = StageMesh(data=2) if remat == "none" else StageMesh()
    programs = stage_programs(number, remat, mesh)
    # Per token: the inputs of (q, k, v), out, (gate, up) and down, and the gradients of
    # q, k + v, out, gate, up and down. That is 7 D + 3 F, as k and v are half as wide.
    # The gradients of the norms' scales are already complete.
    block = 16 * (7 * HIDDEN + 3 * INNER) + mesh.data * 2 * HIDDEN
    ends = {
        0: 16 + 16 * HIDDEN,  # tokens, gradient of the embedding
        1: 16 * (HIDDEN + VOCAB) + mesh.data * HIDDEN,  # head, its norm's scale
    }
    assert sum(a.size for a in programs.half) == 2 * block + ends[number]
