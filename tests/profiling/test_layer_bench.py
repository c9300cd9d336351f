# SPDX-License-Identifier: Apache-2.0
"""Layers are distinguished by their content, and timed as stages hold them."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from hetjax.models.decoders import GPTConfig, LlamaConfig, gpt_model, llama_model
from hetjax.models.experts.moe import Routing
from hetjax.models.model import Layer, Model
from hetjax.profiling import layer_bench
from hetjax.profiling.layer_bench import (
    Case,
    LayerBench,
    layer_kinds,
    measure_link,
    program_seconds,
)

LLAMA = LlamaConfig(
    name="llama",
    vocab_size=64,
    hidden_size=16,
    inner_size=32,
    num_blocks=3,
    num_heads=2,
    num_kv_heads=2,
    max_seq_len=8,
)
GPT = GPTConfig(
    name="gpt",
    vocab_size=64,
    hidden_size=16,
    num_blocks=2,
    num_heads=2,
    max_seq_len=8,
    grain="half",
)


def bench(model: Model, case: Case, halves: bool = False) -> LayerBench:
    rule = optax.adamw(1e-3)
    devices = jax.devices()
    return LayerBench(
        case, model, devices, rule, seq_len=8, dtype="float32", halves=halves
    )


def test_equal_blocks_are_one_kind_however_many():
    assert layer_kinds(llama_model(LLAMA)) == ("embedding", *["block"] * 3, "head")
    more = llama_model(replace(LLAMA, num_blocks=6))
    assert layer_kinds(more) == ("embedding", *["block"] * 6, "head")


def test_halves_of_blocks_are_two_kinds():
    halves = ("block.attention", "block.mlp")
    assert layer_kinds(gpt_model(GPT)) == ("embedding", *halves, *halves, "head")


def test_unlike_blocks_of_one_name_are_kinds_of_their_own():
    dense = llama_model(LLAMA)
    routing = Routing(num_experts=2, top_k=1)
    sparse = llama_model(replace(LLAMA, routing=routing))
    first, one, two, three, last = dense.layers
    mixed = replace(dense, layers=(first, one, sparse.layers[2], three, last))
    assert layer_kinds(mixed) == ("embedding", "block", "block-2", "block", "head")


def test_a_name_of_digits_alone_still_gives_a_kind():
    model = llama_model(replace(LLAMA, num_blocks=1))
    block = Layer("007", model.layers[1].modules)
    layers = (model.layers[0], block, model.layers[2])
    assert layer_kinds(replace(model, layers=layers))[1] == "layer"


@pytest.mark.usefixtures("quick_compiling")
def test_an_inner_layer_is_timed_in_a_run_of_two_and_priced_as_one():
    case = Case(device="cpu", kind="block", microbatch_size=2)
    timed = bench(llama_model(LLAMA), case, halves=True)
    names = {"forward", "backward", "input_gradient", "weight_gradient", "update"}
    assert set(timed.time_once()) == names
    assert all(seconds > 0 for seconds in timed.time_once().values())
    repetitions = [
        {name: n * seconds for n, name in enumerate(sorted(names), start=1)}
        for seconds in (5.0, 1.0, 3.0)
    ]
    m = timed.measurement(repetitions, program_s=1.0)
    # medians are 3, 6, 9, 12, 15; minus the program, halved
    assert (m.backward_s, m.forward_s) == (1.0, 2.5)
    assert (m.input_gradient_s, m.update_s, m.weight_gradient_s) == (4.0, 5.5, 7.0)
    assert (m.device, m.kind, m.microbatch_size) == ("cpu", "block", 2)


@pytest.mark.usefixtures("quick_compiling")
def test_the_head_is_timed_with_its_loss_and_its_backward_is_what_fusing_adds():
    case = Case(device="cpu", kind="head", tensor=2, microbatch_size=1, remat="full")
    timed = bench(gpt_model(GPT), case)
    assert set(timed.time_once()) == {"forward", "fused", "update"}
    times = {"forward": 2.0, "fused": 7.0, "update": 1.5}
    m = timed.measurement([times], program_s=1.0)
    assert (m.forward_s, m.backward_s, m.update_s) == (1.0, 5.0, 0.5)
    assert m.input_gradient_s is None and m.weight_gradient_s is None
    assert (m.tensor, m.remat) == (2, "full")


@pytest.mark.usefixtures("quick_compiling")
def test_of_a_layer_that_replicas_share_the_update_alone_is_timed():
    case = Case(device="cpu", kind="block", microbatch_size=1)
    rule, devices = optax.adamw(1e-3), jax.devices()
    timed = LayerBench(
        case,
        llama_model(LLAMA),
        devices,
        rule,
        seq_len=8,
        dtype="float32",
        num_replicas=2,
    )
    assert set(timed.time_once()) == {"update"}
    times = [{"update": seconds} for seconds in (9.0, 5.0, 1.0)]
    assert timed.update_s(times, program_s=1.0) == 2.0


@pytest.mark.usefixtures("quick_compiling")
def test_noise_never_makes_a_time_negative():
    timed = bench(
        llama_model(LLAMA), Case(device="cpu", kind="embedding", microbatch_size=1)
    )
    times = {"forward": 1.0, "backward": 0.5, "update": 2.0}
    m = timed.measurement([times], program_s=1.0)
    assert m.forward_s > 0 and m.backward_s > 0 and m.update_s == 1.0


def test_a_link_is_what_more_bytes_cost_and_what_none_would(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(layer_bench, "_message_s", lambda a, b, size: 1e-4 + size / 1e9)
    one, two = jax.devices()[:2]
    link = measure_link(one, two, ("a", "b"))
    assert link.between == ("a", "b")
    np.testing.assert_allclose(link.bandwidth_gbit_per_s, 8.0)
    np.testing.assert_allclose(link.latency_ms, 0.1)


def test_links_and_programs_take_time():
    one, two = jax.devices()[:2]
    link = measure_link(one, two, ("a", "b"))
    assert link.bandwidth_gbit_per_s > 0 and link.latency_ms >= 0
    assert 0 < program_seconds(one) < 0.1
