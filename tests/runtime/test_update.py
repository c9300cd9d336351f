# SPDX-License-Identifier: Apache-2.0
"""Updates equal those of Optax on the unsharded, unstacked model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.costs.stage_memory import static_bytes
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.optimizers.optimizer import NonElementwise, optimizer
from hetjax.optimizers.table import RULES
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.runtime.execution.commit import total_loss
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.training.settings.config import OptimizerConfig
from tests.runtime.oracle import oracle_gradients, random_batch
from tests.runtime.test_same_numbers import random_params
from tests.short_runs import draws

MODEL = llama_model(
    LlamaConfig(
        name="llama",
        vocab_size=128,
        hidden_size=16,
        inner_size=32,
        num_blocks=4,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=8,
    )
)
PLAN = Plan(
    model="llama",
    seq_len=8,
    global_batch=10,
    replicas=(
        Replica(
            num_microbatches=3,
            microbatch_size=2,
            stages=(
                Stage(node="a", devices=(0,), layers=(0, 4), launch_ahead=2),
                Stage(node="a", devices=(1,), layers=(4, 6), launch_ahead=1),
            ),
        ),
        Replica(
            num_microbatches=1,
            microbatch_size=4,
            stages=(
                Stage(
                    node="b",
                    devices=(0, 1, 2, 3),
                    mesh=StageMesh(data=2, tensor=2),
                    layers=(0, 6),
                    launch_ahead=1,
                ),
            ),
        ),
    ),
)
OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5), weight_decay=0.1),
    "lamb": optax.lamb(1e-2),  # a trust ratio per parameter of each layer
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
WHOLE = {  # a run's rules by name; below, also Adafactor as for large matrices
    name: optimizer(OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=0), 9)
    for name in RULES
}
for name in ("adamw", "muon"):
    averaged = OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=0, ema=0.9)
    WHOLE[f"averaged {name}"] = optimizer(averaged, 9)
WHOLE["factored"] = NonElementwise(*OPTIMIZERS["adafactor"])
OPTIMIZERS |= WHOLE


def runtime_of(rule: optax.GradientTransformation, **options: Any) -> StageRuntime:
    devices = jax.devices()
    nodes = {"a": devices[:2], "b": devices[2:6]}
    return StageRuntime(PLAN, MODEL, nodes, rule, **options)


@contextmanager
def fully_optimised() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def weights(runtime: StageRuntime) -> dict[str, np.ndarray]:
    return {
        entry.name.removeprefix("params."): value
        for entry, value in runtime.entries()
        if entry.name.startswith("params.")
    }


@pytest.mark.usefixtures("quick_compiling")
@pytest.mark.parametrize("name", draws(OPTIMIZERS, short=3))
def test_three_clipped_steps_equal_optax_on_every_parameter(name: str):
    clip_norm, rule = 0.5, OPTIMIZERS[name]
    runtime = runtime_of(rule, clip_norm=clip_norm)
    runtime.initialise(0)
    expected: Any = weights(runtime)
    reference = optax.chain(optax.clip_by_global_norm(clip_norm), rule)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = reference.init(expected)
        for step in range(3):
            batch = random_batch(PLAN, MODEL.vocab_size, step)
            _, grads = oracle_gradients(MODEL, expected, batch)
            updates, state = reference.update(grads, state, expected)
            expected = optax.apply_updates(expected, updates)
            runtime.step(step, batch)
    for path, value in weights(runtime).items():
        np.testing.assert_allclose(value, expected[path], atol=2e-5, err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "factored", "muon"])
def test_replicas_that_are_cut_differently_stay_bit_equal(name: str):
    runtime = runtime_of(OPTIMIZERS[name], clip_norm=1.0)
    runtime.initialise(0)
    with fully_optimised():  # as in a real run: the compiler's freedom is the danger
        for state in runtime.stages.values():
            assert state.updates.stack_updates
    for step in range(3):
        runtime.step(step, random_batch(PLAN, MODEL.vocab_size, step))
    held: dict[str, np.ndarray] = {}
    num_compared = 0
    for key, state in runtime.stages.items():
        for named, leaves in zip(
            runtime.partition.stages[key].stacks, state.masters, strict=True
        ):
            for leaf, array in leaves.items():
                value = np.asarray(array)
                values = value if named.stack.stacked else value[None]
                for unit, value in enumerate(values):
                    path = named.path(leaf, unit)
                    if path in held:
                        np.testing.assert_array_equal(value, held[path], err_msg=path)
                        num_compared += 1
                    held[path] = value
    assert num_compared == len(held)


@pytest.mark.parametrize(
    "name", draws(["averaged muon", "averaged adamw", "factored"], short=1)
)
def test_a_restored_runtime_goes_on_bit_equal_although_it_reads_one_copy(name: str):
    runtimes = []
    with fully_optimised():
        for _ in range(2):
            runtime = runtime_of(OPTIMIZERS[name], clip_norm=1.0)
            assert all(s.updates.stack_updates for s in runtime.stages.values())
            runtimes.append(runtime)
    unbroken, resumed = runtimes
    unbroken.initialise(0)
    batches = [random_batch(PLAN, MODEL.vocab_size, step) for step in range(4)]
    for step in range(2):
        unbroken.step(step, batches[step])
    saved = {entry.name: value for entry, value in unbroken.entries()}
    resumed.restore(lambda entry: saved[entry.name])
    for step in range(2, 4):
        results = [r.step(step, batches[step]) for r in runtimes]
        assert results[0].loss() == results[1].loss()
        assert results[0].grad_norm == results[1].grad_norm


@pytest.mark.usefixtures("quick_compiling")
def test_weights_of_step_0_depend_on_the_seed_and_not_on_the_plan():
    plain = runtime_of(optax.sgd(0.1))
    plain.initialise(3)
    whole = Plan(
        model="llama",
        seq_len=8,
        global_batch=2,
        replicas=(
            Replica(
                num_microbatches=1,
                microbatch_size=2,
                stages=(Stage(node="a", devices=(0,), layers=(0, 6), launch_ahead=1),),
            ),
        ),
    )
    other = StageRuntime(whole, MODEL, {"a": jax.devices()}, optax.sgd(0.1))
    other.initialise(3)
    expected = weights(other)
    for path, value in weights(plain).items():
        np.testing.assert_array_equal(value, expected[path])
    other.initialise(4)
    assert any((weights(other)[path] != expected[path]).any() for path in expected)


@pytest.mark.usefixtures("quick_compiling")
def test_optimizer_state_and_master_weights_are_cut_over_data_and_tensor():
    runtime = runtime_of(optax.adamw(1e-2))
    runtime.initialise(0)
    state = runtime.stages[1, 0]
    for tree in (state.masters, state.opt_state):
        for leaf in jax.tree.leaves(tree):
            if leaf.ndim >= 2 and leaf.size > 100:
                shard = leaf.addressable_shards[0].data
                assert shard.size * 4 in (leaf.size, 2 * leaf.size), leaf.sharding
    table = state.masters[0]["embedding.table"]
    assert table.addressable_shards[0].data.size * 4 == table.size


@pytest.mark.usefixtures("quick_compiling")
@pytest.mark.parametrize("name", WHOLE)
def test_the_state_of_every_rule_takes_the_bytes_that_are_foretold(name: str):
    runtime = runtime_of(OPTIMIZERS[name])
    runtime.initialise(0)
    for (r, s), state in runtime.stages.items():
        mesh = PLAN.replicas[r].stages[s].mesh
        stacks = [named.stack for named in runtime.partition.stages[r, s].stacks]
        leaves = jax.tree.leaves(state.opt_state)
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        init = OPTIMIZERS[name].init
        assert static_bytes(stacks, mesh, "float32", init).optimizer == held


@pytest.mark.usefixtures("quick_compiling")
def test_bf16_compute_keeps_fp32_masters_and_trains():
    runtime = runtime_of(optax.adamw(1e-2), dtype="bfloat16", clip_norm=1.0)
    runtime.initialise(0)
    batch = random_batch(PLAN, MODEL.vocab_size, 0)
    losses = [runtime.step(step, batch).loss() for step in range(5)]
    reference = runtime_of(optax.adamw(1e-2), clip_norm=1.0)
    reference.initialise(0)
    expected = [reference.step(step, batch).loss() for step in range(5)]
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert losses[-1] < losses[0] - 0.1
    for state in runtime.stages.values():
        assert {a.dtype.name for a in jax.tree.leaves(state.params)} == {"bfloat16"}
        assert {a.dtype.name for a in jax.tree.leaves(state.masters)} == {"float32"}


@pytest.mark.usefixtures("quick_compiling")
def test_evaluation_and_logits_equal_the_model_called_directly():
    runtime = runtime_of(optax.sgd(0.1))
    runtime.restore(
        lambda entry: random_params(MODEL, 5)[entry.name.removeprefix("params.")]
    )
    batches = [random_batch(PLAN, MODEL.vocab_size, seed) for seed in (1, 2)]
    expected = [oracle_gradients(MODEL, random_params(MODEL, 5), b)[0] for b in batches]
    for batch, loss in zip(batches, expected, strict=True):
        found = total_loss(runtime.evaluate(0, batch)) / batch[1].size
        assert found == pytest.approx(loss, rel=1e-5)
    prompt = [5, 6, 7]
    logits = runtime.next_logits(0, prompt)
    assert logits is not None
    log_sum = np.log(np.sum(np.exp(logits.astype(np.float64))))
    for target in (0, 9, 127):
        direct = loss_of_last_token(prompt, target)
        assert log_sum - logits[target] == pytest.approx(direct, rel=1e-4)


def loss_of_last_token(prompt: list[int], target: int) -> float:
    """Return the cross-entropy of one token, as the difference of two oracle sums."""
    inputs = np.array([prompt], np.int32)
    targets = np.array([[1, 2, target]], np.int32)
    params = random_params(MODEL, 5)
    with_last, _ = oracle_gradients(MODEL, params, (inputs, targets))
    shorter, _ = oracle_gradients(MODEL, params, (inputs[:, :2], targets[:, :2]))
    return 3 * with_last - 2 * shorter


@pytest.mark.usefixtures("quick_compiling")
def test_stages_that_are_made_again_compile_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
):
    rule = optax.adamw(0.1)
    ahead, again = runtime_of(rule), runtime_of(rule)
    ahead.compile()
    compiled, compile_ = list[object](), jax.stages.Lowered.compile

    def note_and_compile(lowered: jax.stages.Lowered, **options: Any) -> Any:
        compiled.append(lowered)
        return compile_(lowered, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", note_and_compile)
    again.compile()
    assert not compiled
    runtime_of(optax.adamw(0.1)).compile()  # counts as another rule
    assert compiled
