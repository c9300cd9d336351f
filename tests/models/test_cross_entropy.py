# SPDX-License-Identifier: Apache-2.0
"""The loss in blocks against plain logits: numbers, memory, layouts, communication.

Legend: B sequences, L positions, D residual width, V padded vocabulary.
"""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.models import cross_entropy
from hetjax.models.configs import NormConfig
from hetjax.models.head import Head, HeadConfig
from hetjax.models.layers import Embedding, EmbeddingConfig
from hetjax.models.model import ModuleSpec, apply
from hetjax.stage.backward_split import split_backward

NORM = NormConfig(kind="rms", eps=1e-5)
KNOWN, V, D = 100, 128, 16  # words, rows of the table, width
SPEC = ModuleSpec(
    "head",
    Head,
    HeadConfig(vocab_size=KNOWN, padded_vocab_size=V, hidden_size=D, norm=NORM),
)


def _case(num_tokens: int, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Return (scale, table, x, targets) of three sequences."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (3, num_tokens // 3)
    return (
        1 + 0.1 * jax.random.normal(keys[0], (D,), dtype),
        jax.random.normal(keys[1], (V, D), dtype),
        jax.random.normal(keys[2], (*shape, D), dtype),
        jax.random.randint(keys[0], shape, 0, KNOWN),
    )


def _loss(scale_D: Any, table_VD: Any, x_BLD: Any, targets_BL: Any) -> jax.Array:
    """Return our loss times three: like a scaled loss."""
    params = {"norm.scale": scale_D, "table": table_VD}
    return 3 * apply(SPEC, params, x_BLD, targets_BL)[0]


def _plain(scale_D: Any, table_VD: Any, x_BLD: Any, targets_BL: Any) -> jax.Array:
    scale_D, table_VD, x_BLD = (
        a.astype(jnp.float32) for a in (scale_D, table_VD, x_BLD)
    )
    root_BL1 = jnp.sqrt(jnp.mean(x_BLD**2, axis=-1, keepdims=True) + 1e-5)
    y_BLD = x_BLD / root_BL1 * scale_D[None, None, :]
    log_p_BLV = jax.nn.log_softmax(y_BLD @ table_VD[:KNOWN].T)
    log_p_BL1 = jnp.take_along_axis(log_p_BLV, targets_BL[..., None], axis=-1)
    return -3 * jnp.sum(log_p_BL1)


def _found(loss: Any, inputs: tuple[Any, ...]) -> list[np.ndarray]:
    """Return the loss and the gradients of all but the targets."""
    made = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*inputs)
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(made)]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the loss use blocks of this many bytes."""

    def of(num_bytes: int) -> None:
        monkeypatch.setattr(cross_entropy, "WHOLE_BYTES", 0)
        monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", num_bytes)

    return of


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_block"),
    # 39 in 4 blocks: the last is not full. Blocks of words have 1, 1, 7 and 2 of the 8
    # rows of each strip: the second block of 7 begins within the first
    [(21, 1), (21, 4), (21, 20), (39, 10)],
)
def test_the_loss_and_all_gradients_are_those_of_plain_logits(
    blocks: Any, num_tokens: int, tokens_per_block: int
):
    inputs = _case(num_tokens)
    blocks(tokens_per_block * V * 4)
    assert "scan" in str(jax.make_jaxpr(_loss)(*inputs))
    found, expected = _found(_loss, inputs), _found(_plain, inputs)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_gradients_are_rounded_like_those_of_logits_that_are_kept(
    blocks: Any, dtype: str
):
    inputs = _case(300, dtype)
    expected, kept = _found(_plain, inputs), _found(_loss, inputs)
    blocks(16 * V * 2)
    found = _found(_loss, inputs)
    for ours, whole, exact in zip(found, kept, expected, strict=True):
        error, usual = (np.linalg.norm(a - exact) for a in (ours, whole))
        assert error <= 2 * float(jnp.finfo(dtype).eps) * np.linalg.norm(exact)
        assert error <= 1.2 * usual + 1e-6 * np.linalg.norm(exact)


def test_a_table_that_is_the_embeddings_too_gets_both_gradients(blocks: Any):
    embedding = EmbeddingConfig(padded_vocab_size=V, hidden_size=D)
    rows = ModuleSpec("embedding", Embedding, embedding)
    scale_D, table_VD, _, targets_BL = _case(39)
    tokens_BL = jnp.flip(targets_BL)

    def tied(loss: Any, embed: Any) -> list[np.ndarray]:
        def of_both(scale_D: Any, table_VD: Any) -> jax.Array:
            return loss(scale_D, table_VD, embed(table_VD), targets_BL)

        made = jax.jit(jax.grad(of_both, argnums=(0, 1)))(scale_D, table_VD)
        return [np.asarray(a) for a in made]

    blocks(7 * V * 4)
    found = tied(_loss, lambda table: apply(rows, {"table": table}, tokens_BL)[0])
    expected = tied(_plain, lambda table: table[tokens_BL])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_table_cut_over_devices_costs_three_all_reduces_per_block_of_tokens(
    blocks: Any, tensor: int
):
    """The maximum, the sums, the input's gradient; none in the loop over words."""
    inputs = _case(39)
    expected = _found(_plain, inputs)
    blocks(7 * V * 4)
    mesh = Mesh(np.array(jax.devices()[:tensor]).reshape(1, tensor), ("data", "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec("tensor"))
    layouts = whole, cut, whole, whole
    step = jax.jit(
        jax.value_and_grad(_loss, argnums=(0, 1, 2)),
        in_shardings=layouts,
        out_shardings=(whole, layouts[:3]),
    )
    text = step.lower(*inputs).compile().as_text() or ""
    kinds = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(rf"\b{kinds}(?:-start)?\(.*op_name=\"(.*?)\"", text)
    assert Counter(kind for kind, _ in found) == {"all-reduce": 3}
    assert all("/while/body/" in name for _, name in found)
    of_loops = re.findall(r'known_trip_count":\{"n":"(\d+)"', text)
    assert sorted(map(int, of_loops)) == [6, 6, 8]  # 39 tokens by 7, 8 rows by 1
    made = jax.tree.leaves(step(*jax.device_put(inputs, layouts)))
    for ours, theirs in zip(made, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


def test_no_second_table_is_there_beside_the_gradient(blocks: Any):
    """64 MiB of table, the same of logits, and blocks of 4 MiB."""
    blocks(4 * 2**20)
    y_BLD = jax.ShapeDtypeStruct((1, 512, 512), jnp.float32)
    table_VD = jax.ShapeDtypeStruct((32_768, 512), jnp.float32)
    targets_BL = jax.ShapeDtypeStruct((1, 512), jnp.int32)

    def loss(y_BLD: Any, table_VD: Any, targets_BL: Any) -> Any:
        terms = cross_entropy.LossTerms(32_768)
        return cross_entropy.cross_entropy(y_BLD, table_VD, targets_BL, terms=terms)

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    memory: Any = step.lower(y_BLD, table_VD, targets_BL).compile().memory_analysis()
    assert memory.output_size_in_bytes >= 64 * 2**20
    assert memory.temp_size_in_bytes < 32 * 2**20


def test_many_logits_are_neither_kept_nor_there_at_once_nor_cross_to_w(monkeypatch):
    """4,096 tokens of 32,000 words: all logits are 500 MiB in fp32."""
    monkeypatch.setattr(cross_entropy, "WHOLE_BYTES", 0)
    spec = ModuleSpec(
        "head",
        Head,
        HeadConfig(
            vocab_size=32_000,
            padded_vocab_size=32_000,
            hidden_size=16,
            norm=NORM,
        ),
    )
    shapes = [((16,), "float32"), ((32_000, 16), "float32"), ((1, 4096, 16), "float32")]
    scale, table, x = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def gradients(scale, table, x, targets):
        def loss(scale, table, x):
            params = {"norm.scale": scale, "table": table}
            return apply(spec, params, x, targets)[0]

        return jax.grad(loss, argnums=(2, 0, 1))(scale, table, x)

    inputs = scale, table, x, tokens
    program = jax.jit(gradients).lower(*inputs).compile()
    memory: Any = program.memory_analysis()
    assert memory.temp_size_in_bytes < 256 * 2**20
    split = split_backward(gradients, 1, inputs)
    (dx,), crossing = jax.eval_shape(split.first, *inputs)
    assert dx.shape == x.shape
    assert sum(value.size for value in crossing) < 4 * x.size
    kept = [inputs[i] for i in split.kept]
    grads = jax.eval_shape(split.second, kept, crossing)
    assert [g.shape for g in grads] == [scale.shape, table.shape]
