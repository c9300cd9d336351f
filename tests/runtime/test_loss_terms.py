# SPDX-License-Identifier: Apache-2.0
"""Label smoothing and z-loss on uneven plans equal the textbook formulas in one jit.

The oracle has whole logits, Optax's smoothed labels and cross-entropy, and the z-loss
of arXiv 2204.02311, section 5.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.data.batches import UNCOUNTED, Batch
from hetjax.errors import BadInput
from hetjax.models import cross_entropy
from hetjax.models.configs import LlamaConfig
from hetjax.models.decoders import llama_model
from hetjax.models.finetuning import LoraConfig, TrainConfig, fine_tuned
from hetjax.models.model import Layer, Model, ModuleSpec, apply, bind
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.runtime.execution.commit import total_loss
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    random_batch,
)
from tests.runtime.random_weights import random_params
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")

SIZES = LlamaConfig(
    name="small",
    vocab_size=100,  # of 128 rows: padding does not count
    hidden_size=16,
    inner_size=32,
    num_blocks=3,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=8,
)


def _stage(layers: tuple[int, int], first: int, **mesh: int) -> Stage:
    shape = StageMesh(**mesh)
    devices = tuple(range(first, first + shape.data * shape.tensor))
    return Stage(node="a", devices=devices, mesh=shape, layers=layers, launch_ahead=1)


def _plan(*replicas: Replica) -> Plan:
    size = sum(r.num_microbatches * r.microbatch_size for r in replicas)
    return Plan(model="small", seq_len=8, global_batch=size, replicas=replicas)


# the head split over tensor in one replica, over data in the other; over both; on one
# device
PLANS = {
    "two replicas": _plan(
        Replica(
            num_microbatches=2,
            microbatch_size=1,
            stages=(_stage((0, 2), 0), _stage((2, 5), 1, tensor=2)),
        ),
        Replica(
            num_microbatches=1, microbatch_size=4, stages=(_stage((0, 5), 3, data=2),)
        ),
    ),
    "three stages": _plan(
        Replica(
            num_microbatches=2,
            microbatch_size=2,
            stages=(
                _stage((0, 1), 0),
                _stage((1, 4), 1, tensor=2),
                _stage((4, 5), 3, data=2, tensor=2),
            ),
        ),
    ),
    "one device": _plan(
        Replica(num_microbatches=3, microbatch_size=1, stages=(_stage((0, 5), 0),))
    ),
}


@dataclass(frozen=True)
class Case:
    plan: str
    terms: TrainConfig
    tied: bool = False
    block_bytes: int | None = None  # None: all logits at once


BOTH = TrainConfig(label_smoothing=0.1, z_loss=1e-2)
CASES = [
    Case("two replicas", BOTH, tied=True),
    Case("three stages", TrainConfig(label_smoothing=0.3)),
    Case("three stages", BOTH, tied=True, block_bytes=128 * 4),
    Case("one device", TrainConfig(z_loss=0.1), tied=True),
]


def _batch(plan: Plan) -> Batch:
    """Return a batch in which half of the targets count, unevenly by sequence."""
    inputs_GL, targets_GL = random_batch(plan, SIZES.vocab_size, 1)
    counted_GL = np.arange(targets_GL.size).reshape(targets_GL.shape) % 5 < 3
    counted_GL[0, 2:] = False
    return inputs_GL, np.where(counted_GL, targets_GL, UNCOUNTED).astype(np.int32)


def _textbook(params: Any, model: Model, batch: Batch, terms: TrainConfig) -> Any:
    """Return the mean of smoothed cross-entropy and z-loss over counted targets."""
    inputs_GL, targets_GL = batch
    rows, columns = np.nonzero(targets_GL >= 0)
    x: Any = jnp.asarray(inputs_GL)
    for spec in model.modules:
        own = {
            path.removeprefix(spec.path + "."): value
            for path, value in params.items()
            if path.startswith(spec.path + ".")
        }
        own |= {name: params[owner] for name, owner in spec.tied}
        if spec is not model.modules[-1]:
            x, _ = apply(spec, own, x)
        else:
            head: Any = bind(spec, own)
            x = head.logits(x)
    logits_NV = x[rows, columns][:, : SIZES.vocab_size]
    labels_NV = jax.nn.one_hot(targets_GL[rows, columns], SIZES.vocab_size)
    with jax.numpy_rank_promotion("allow"):
        labels_NV = optax.losses.smooth_labels(labels_NV, terms.label_smoothing)
        loss_N = optax.losses.softmax_cross_entropy(logits_NV, labels_NV)
    z_N = jnp.log(jnp.sum(jnp.exp(logits_NV), axis=-1))
    return jnp.mean(loss_N + terms.z_loss * z_N**2)


@pytest.mark.parametrize("case", draws(CASES, short=2), ids=str)
def test_loss_and_gradients_are_those_of_the_textbook_and_validation_has_no_terms(
    case: Case, monkeypatch: pytest.MonkeyPatch
):
    if case.block_bytes is not None:
        monkeypatch.setattr(cross_entropy, "WHOLE_BYTES", 0)
        monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", case.block_bytes)
    plain = llama_model(replace(SIZES, tied=case.tied))
    model, plan = fine_tuned(plain, case.terms, LoraConfig()), PLANS[case.plan]
    params, batch = random_params(plain, 2), _batch(plan)
    runtime = StageRuntime(plan, model, {"a": jax.devices()}, keep_gradients())
    runtime.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    of = partial(_textbook, model=plain, batch=batch)
    expected, gradients = jax.jit(jax.value_and_grad(partial(of, terms=case.terms)))(
        params
    )
    cross_entropy_alone = of(params, terms=TrainConfig())
    assert abs(expected - cross_entropy_alone) > 1e-3 * expected
    validated = total_loss(runtime.evaluate(0, batch)) / np.sum(batch[1] >= 0)
    assert validated == pytest.approx(float(cross_entropy_alone), rel=1e-5)
    assert runtime.step(0, batch).loss() == pytest.approx(float(expected), rel=1e-5)
    assert_gradients_equal(kept_gradients(runtime), jax.tree.map(np.asarray, gradients))


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (TrainConfig(label_smoothing=1.0), "below 1"),
        (TrainConfig(label_smoothing=-0.1), "below 1"),
        (TrainConfig(label_smoothing=float("nan")), "below 1"),
        (TrainConfig(z_loss=-1e-4), "train.z_loss = -0.0001"),
        (TrainConfig(z_loss=float("inf")), "0 (none) to 1"),
    ],
)
def test_terms_that_cannot_be_are_refused(terms: TrainConfig, said: str):
    with pytest.raises(BadInput) as error:
        fine_tuned(llama_model(SIZES), terms, LoraConfig())
    assert said in str(error.value)


def test_a_head_of_somebodys_own_has_no_such_terms():
    model = llama_model(SIZES)
    own = Layer("head", (ModuleSpec("head", model.modules[0].cls, "own"),))
    model = replace(model, layers=(*model.layers[:-1], own))
    with pytest.raises(BadInput, match="whose last module is Embedding"):
        fine_tuned(model, BOTH, LoraConfig())
