# SPDX-License-Identifier: Apache-2.0
"""What is read of a compiled program's text: aliases, arrays, collectives, products."""

from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.compile.expected import beyond
from experiments.compile.hlo import (
    aliased_parameters,
    collectives,
    has_type,
    hidden_collectives,
    permuted_numbers,
    products,
    square_arrays,
)


def text_of(function, *inputs, **options) -> str:
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in inputs]
    text = jax.jit(function, **options).lower(*abstract).compile().as_text()
    assert text is not None
    return text


def test_memory_that_is_given_away_and_taken_is_told_by_its_parameter():
    add = lambda x, y: (x + y, jnp.sum(y))  # noqa: E731
    assert aliased_parameters(text_of(add, (8, 8), (8, 8))) == set()
    donated = text_of(add, (8, 8), (8, 8), donate_argnums=1)
    assert aliased_parameters(donated) == {1}


def test_arrays_of_all_pairs_of_positions_are_found_unless_a_fusion_holds_them():
    def scores(x):
        return jax.nn.softmax(x @ x.T) @ x

    assert square_arrays(text_of(scores, (22, 4)), 22) == {"f32[22,22]"}
    assert square_arrays(text_of(scores, (22, 4)), 33) == set()
    fused = lambda x: jnp.sum(x[:, None] * x[None], axis=1)  # noqa: E731
    assert "[22,22]" in text_of(fused, (22,))
    assert square_arrays(text_of(fused, (22,)), 22) == set()


def test_collectives_are_counted_by_name():
    mesh = Mesh(jax.devices()[:2], ("data",))
    cut = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    summed = text_of(jnp.sum, (8, 8), in_shardings=cut, out_shardings=whole)
    assert collectives(summed) == {"all-reduce": 1}
    gathered = text_of(jnp.sin, (8, 8), in_shardings=cut, out_shardings=whole)
    assert collectives(gathered) == {"all-gather": 1}
    assert beyond(Counter(collectives(summed)), Counter()) == {"all-reduce": 1}
    assert not beyond(Counter({"reduce-scatter": 1}), Counter({"all-reduce": 1}))


SCHEDULE = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %start.1 = f32[8] all-reduce-start(%a), channel_id=1
  %other = f32[8] fusion(%a), kind=kLoop, calls=%f
  %done.1 = f32[8] all-reduce-done(%start.1)
  %start.2 = f32[8] all-reduce-start(%done.1), channel_id=2
  %done.2 = f32[8] all-reduce-done(%start.2)
  ROOT %last = f32[8] all-reduce(%done.2), channel_id=3
}
"""


def test_a_collective_is_hidden_if_something_runs_between_its_start_and_its_end():
    assert collectives(SCHEDULE) == {"all-reduce": 3}
    assert hidden_collectives(SCHEDULE) == 1


def test_a_collective_that_is_done_in_steps_counts_once_and_is_hidden():
    step = """
%async_collective_fusion.1 (a: f32[8]) -> f32[8] {
  %all-reduce.1 = f32[8] all-reduce(%a), channel_id=7
}
"""
    assert collectives(2 * step) == {"all-reduce": 1}
    assert hidden_collectives(2 * step) == 1


FLOAT16 = """
%fused (p: f16[8,16], q: f16[16,8]) -> f32[8,8] {
  %p = f16[8,16]{1,0} parameter(0)
  %q = f16[16,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}
}

ENTRY %main (p: f16[8,16], q: f32[16,8]) -> f32[8,8] {
  %p = f16[8,16]{1,0} parameter(0)
  %q = f32[16,8]{1,0} parameter(1)
  %p.1 = f32[8,16]{1,0} convert(%p)
  %by.1 = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%p.1, %q), custom_call_target="__cublas$gemm"
  %own.1 = f32[8,8]{1,0} custom-call(%p.1, %q), custom_call_target="__mine"
  ROOT %mine = f32[8,8]{1,0} fusion(%p, %p), kind=kCustom, calls=%fused
}
"""  # noqa: E501


def test_products_are_counted_by_the_types_of_their_factors():
    assert products(FLOAT16) == {"f16": 1, "f32": 1}
    assert has_type(FLOAT16, "f16")
    assert not has_type(FLOAT16.replace("f16", "bf16"), "f16")


def test_what_permutes_send_is_counted():
    text = """
  %p.1 = (f32[32,2048]{1,0:T(8)}, f32[32,2048]{1,0}) collective-permute-start(%a)
  %p.2 = f32[32,2048]{1,0} collective-permute-done(%p.1)
  %p.3 = f32[8]{0} collective-permute(%p.2), channel_id=3
"""
    assert permuted_numbers(text) == 32 * 2048 + 8
