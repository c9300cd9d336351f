# SPDX-License-Identifier: Apache-2.0
"""The cost of attention by a kernel: against all scores at once, and to the byte."""

import math
from functools import partial
from typing import Any

import jax
import optax
import pytest

from hetjax.cluster.cluster import Node
from hetjax.costs.costs import StageTimes
from hetjax.costs.graph.all_reduces import all_reduces
from hetjax.costs.graph.passes import Passes, Shares, passes
from hetjax.costs.graph.traffic import moving_kernels
from hetjax.costs.stage_memory import adam_state, stage_memory
from hetjax.costs.stage_times import stage_times
from hetjax.models.attention import splash_kernel
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.model import Model
from hetjax.plans.plan import AttentionForm, Plan, Remat, Replica, Stage, StageMesh
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.stage.partition import stage_stacks

LENGTH, WIDTH, HEADS, KV_HEADS = 1024, 512, 8, 4
HEAD_SIZE = WIDTH // HEADS


def model_of(length: int = LENGTH) -> Model:
    return llama_model(
        LlamaConfig(
            name="llama",
            vocab_size=128,
            hidden_size=WIDTH,
            inner_size=1024,
            num_blocks=2,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            max_seq_len=length,
        )
    )


def traced(form: AttentionForm, remat: Remat = "selective", tensor: int = 2) -> Passes:
    """Return the passes of two blocks over two sequences."""
    shares = Shares(
        num_sequences=2,
        seq_len=LENGTH,
        hidden_size=WIDTH,
        dtype="bfloat16",
        tensor=tensor,
        attention=form,
    )
    return passes(stage_stacks(model_of(), [(1, 3)]), shares, remat)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("form", ["cudnn", "splash"])
def test_a_kernel_is_cut_over_heads_and_needs_no_all_reduce_of_its_own(
    form: AttentionForm, remat: Remat
):
    ours, plain = traced(form, remat), traced("xla", remat)
    for graph, other in (
        (ours.forward, plain.forward),
        (ours.backward, plain.backward),
    ):
        assert all_reduces(graph, ours.cuts) == all_reduces(other, plain.cuts)


@pytest.mark.parametrize("form", ["cudnn", "splash"])
def test_a_kernel_moves_its_operands_and_results(form: AttentionForm):
    found = traced(form)
    (body,) = [step.body for step in found.forward.steps if step.op == "scan"]
    assert body is not None
    (kernel,) = [k for k in moving_kernels(body) if k.step.op == "attention_forward"]
    moved = sum(map(found.cuts.num_bytes, (*kernel.reads, *kernel.step.outputs)))
    rows = 2 * LENGTH  # two sequences; each of two devices has half the heads
    own = rows * (2 * HEADS + 2 * KV_HEADS) * HEAD_SIZE * 2 // 2
    assert moved == own + rows * HEADS * 4 // 2


def times(form: AttentionForm, length: int) -> StageTimes:
    model = model_of(length)
    stages = tuple(
        Stage(node="n", devices=(s,), layers=cut, launch_ahead=1, attention=form)
        for s, cut in enumerate([(0, 1), (1, 3), (3, 4)])
    )
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=stages)
    plan = Plan(model="llama", seq_len=length, global_batch=1, replicas=(replica,))
    node = Node(name="n", device="A100-SXM4-80GB", count=3, memory_gb_per_s=1e9)
    given: Any = dict(dtype="bfloat16", optimizer=adam_state)
    return stage_times(plan, model, (0, 1), node, **given)


def test_a_kernel_takes_its_products_of_blocks_that_are_seen():
    """With ample memory bandwidth, all else grows as the length, or not at all."""
    lengths = 8_192, 16_384, 32_768
    found = [times("cudnn", length) for length in lengths]

    def products_s(length: int, products: int) -> float:
        """Return the time of blocks of 128 up to the diagonal, at most 0.87 of peak."""
        blocks = length // 128
        scores = 2 * HEADS * (blocks * (blocks + 1) / 2) * 128**2  # two layers
        filled = 0.87 * (length / (length + 64)) ** 2 * HEAD_SIZE / (HEAD_SIZE + 64)
        return 2 * products * scores * HEAD_SIZE / (312e12 * filled)

    for name, products in (("forward_s", 2), ("backward_s", 5)):
        short_s, long_s, longest_s = (
            getattr(one, name) - products_s(length, products)
            for one, length in zip(found, lengths, strict=True)
        )
        assert longest_s - long_s == pytest.approx(2 * (long_s - short_s), rel=0.02)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("mesh", [StageMesh(), StageMesh(data=2, tensor=2)])
def test_what_a_microbatch_keeps_is_known_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, mesh: StageMesh, remat: Remat
):
    interpreted = partial(splash_kernel.splash.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_kernel.splash, "make_splash_mha", interpreted)
    model, number = model_of(128), mesh.data * mesh.tensor
    stages = tuple(
        Stage(
            node="n",
            devices=tuple(range(s * number, (s + 1) * number)),
            mesh=mesh,
            layers=cut,
            remat=remat,
            launch_ahead=1,
            attention="splash",
        )
        for s, cut in enumerate([(0, 3), (3, 4)])
    )
    replica = Replica(num_microbatches=1, microbatch_size=2, stages=stages)
    plan = Plan(model="llama", seq_len=128, global_batch=2, replicas=(replica,))
    runtime = StageRuntime(plan, model, {"n": jax.devices()}, optax.sgd(0.1))
    programs = runtime.stages[0, 0].programs
    tokens = math.prod(programs.inputs.sharding.shard_shape(programs.inputs.shape)) * 4
    kept = sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in programs.saved
        if a.sharding is not None
    )
    assert stage_memory(plan, model, (0, 0)).saved_bytes == kept + tokens
