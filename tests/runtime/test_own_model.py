# SPDX-License-Identifier: Apache-2.0
"""A user's own list of NNX modules trains like any preset, without registration."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from hetjax.costs.graph.flops import forward_flops
from hetjax.errors import BadInput
from hetjax.models.model import Layer, Model, ModuleSpec, parameter_count
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    random_batch,
)
from tests.runtime.random_plans import with_split_backwards

pytestmark = pytest.mark.usefixtures("quick_compiling")

VOCAB, WIDTH, HIDDEN, LENGTH = 32, 8, 16, 4


@dataclass(frozen=True)
class Sizes:
    vocab: int = VOCAB
    width: int = WIDTH
    hidden: int = HIDDEN


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], logical: tuple[str | None, ...]):
    return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape), logical=logical)


class Table(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.rows = weight(rngs, (sizes.vocab, sizes.width), ("vocab", None))

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        return self.rows[...][tokens_BL]


class Mixer(nnx.Module):
    """A running mean over the past and a two-layer perceptron."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.up = weight(rngs, (sizes.width, sizes.hidden), (None, "mlp"))
        self.down = weight(rngs, (sizes.hidden, sizes.width), ("mlp", None))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        counts_L = jnp.arange(1, x_BLD.shape[1] + 1, dtype=x_BLD.dtype)
        mean_BLD = jnp.cumsum(x_BLD, axis=1) / counts_L[None, :, None]
        return x_BLD + jnp.tanh(mean_BLD @ self.up[...]) @ self.down[...]


class Readout(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.rows = weight(rngs, (sizes.vocab, sizes.width), ("vocab", None))

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        return jnp.einsum("bld,vd->blv", x_BLD, self.rows[...])

    def __call__(self, x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
        log_BLV = jax.nn.log_softmax(self.logits(x_BLD))
        return -jnp.take_along_axis(log_BLV, targets_BL[..., None], axis=-1).sum()


def own_model(tied: bool) -> Model:
    tie = (("rows", "table.rows"),) if tied else ()
    inner = [f"block_{i}.mixer" for i in range(3)]
    return Model(
        name="own",
        layers=(
            Layer("table", (ModuleSpec("table", Table, Sizes()),)),
            *(Layer(path, (ModuleSpec(path, Mixer, Sizes()),)) for path in inner),
            Layer("readout", (ModuleSpec("readout", Readout, Sizes(), tie),)),
        ),
        vocab_size=VOCAB,
        max_seq_len=LENGTH,
    )


def plan() -> Plan:
    return Plan(
        model="own",
        seq_len=LENGTH,
        global_batch=8,
        replicas=(
            Replica(
                num_microbatches=3,
                microbatch_size=2,
                stages=(
                    Stage(node="a", devices=(0,), layers=(0, 1), launch_ahead=2),
                    Stage(node="a", devices=(1,), layers=(1, 5), launch_ahead=1),
                ),
            ),
            Replica(
                num_microbatches=1,
                microbatch_size=2,
                stages=(
                    Stage(
                        node="b",
                        devices=(0, 1),
                        mesh=StageMesh(tensor=2),
                        layers=(0, 5),
                        launch_ahead=1,
                    ),
                ),
            ),
        ),
    )


def expected_gradients(weights: dict[str, Any], batch: Any, tied: bool) -> Any:
    """Return the gradients of the model written by hand, without modules."""

    def loss(weights: dict[str, Any]) -> jax.Array:
        x = weights["table.rows"][batch[0]]
        counts = jnp.arange(1, LENGTH + 1, dtype=jnp.float32)[None, :, None]
        for i in range(3):
            up, down = (weights[f"block_{i}.mixer.{name}"] for name in ("up", "down"))
            x = x + jnp.tanh(jnp.cumsum(x, axis=1) / counts @ up) @ down
        rows = weights["table.rows" if tied else "readout.rows"]
        log = jax.nn.log_softmax(jnp.einsum("bld,vd->blv", x, rows))
        picked = jnp.take_along_axis(log, batch[1][..., None], axis=-1)
        return -picked.sum() / batch[1].size

    return jax.jit(jax.value_and_grad(loss))(weights)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_users_model_equal_those_written_by_hand(tied: bool):
    nodes = {"a": jax.devices()[:2], "b": jax.devices()[2:4]}
    chosen = plan()
    if tied:  # I and W on all stages: first, last, and both in one
        every = {(r, s) for r, s, _ in chosen.stages()}
        chosen = with_split_backwards(chosen, own_model(tied), every)
    runtime = StageRuntime(chosen, own_model(tied), nodes, keep_gradients())
    runtime.initialise(0)
    weights = {
        entry.name.removeprefix("params."): jnp.asarray(value)
        for entry, value in runtime.entries()
        if entry.name.startswith("params.")
    }
    batch = random_batch(plan(), VOCAB, 0)
    loss, expected = expected_gradients(weights, batch, tied)
    assert runtime.step(0, batch).loss() == pytest.approx(float(loss), rel=1e-5)
    assert_gradients_equal(kept_gradients(runtime), expected)


@pytest.mark.parametrize("path", ["blocks.0.mixer", "table", "block_0.", ""])
def test_module_paths_that_would_collide_are_refused(path: str):
    model = own_model(tied=False)
    extra = Layer("extra", (ModuleSpec(path, Mixer, Sizes()),))
    with pytest.raises(BadInput, match=r"got: .*module path(.|\n)*allowed:(.|\n)*fix:"):
        replace(model, layers=(*model.layers[:2], extra, *model.layers[2:]))


def test_a_users_model_is_counted():
    model = own_model(tied=True)
    counts = [parameter_count(layer) for layer in model.layers]
    assert counts == [VOCAB * WIDTH, *[2 * WIDTH * HIDDEN] * 3, 0]
    flops = forward_flops(model, LENGTH)
    assert flops[1] == 2 * 2 * LENGTH * WIDTH * HIDDEN
