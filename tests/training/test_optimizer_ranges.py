# SPDX-License-Identifier: Apache-2.0
"""All rules, state bits and corners of ranges: refused, or steps of sane size."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.errors import BadInput
from hetjax.models.model import AbstractParam
from hetjax.optimizers.optimizer import optimizer
from hetjax.optimizers.table import RULES
from hetjax.stage import eight_bits
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import OptimizerConfig, RunConfig
from tests.short_runs import rows_drawn
from tests.training.small import small_preset

NAMES = tuple(RULES)
SHAPES = {"block.w": (64, 64), "block.q": (16, 4, 2), "norm.scale": (16,)}
PARAMETERS = {name: AbstractParam(s, (None,) * len(s)) for name, s in SHAPES.items()}
MOST = 0.999999
CORNERS: dict[str, tuple[float, ...]] = {
    "learning_rate": (5e-324, 3e-4, 1e6),
    "weight_decay": (0.0, 0.1, 1e6),
    "beta1": (0.0, 0.9, MOST),
    "beta2": (0.0, 0.95, MOST),
}
# Per step, in learning rates: far above the update of any rule for gradients of norm 1,
# far below a division by epsilon.
MOST_RATES = 100
SETTING = re.compile(r"--optimizer\.([a-z0-9-]+) ([\w.-]+)")


def corners(name: Any, bits: Any) -> Iterator[OptimizerConfig]:
    for values in product(*CORNERS.values()):
        found: dict[str, Any] = dict(zip(CORNERS, values, strict=True))
        ema = MOST if found["weight_decay"] else 0.0
        if name == "schedule-free":
            found["schedule"], ema = "constant", 0.0
        yield OptimizerConfig(
            name=name, state_bits=bits, warmup_steps=0, ema=ema, **found
        )


def gradients() -> Iterator[dict[str, np.ndarray]]:
    """Yield gradients of four forms.

    They have norm 1, as if clipped; are zero, as for rare tokens; have values of all
    sizes; or have few nonzero rows.
    """
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in drawn.values()))
    whole = {name: g / norm for name, g in drawn.items()}
    yield whole
    yield {name: 0 * g for name, g in whole.items()}
    yield {name: g * 10.0 ** rng.uniform(-45, 0, g.shape) for name, g in whole.items()}
    yield {name: np.concatenate([g[:1], 0 * g[1:]]) for name, g in whole.items()}


def most_rates(config: OptimizerConfig) -> float:
    """Return the largest change of a weight in a step, in learning rates, beyond decay.

    Adafactor's rates are relative to the size of a parameter.
    """
    rule = optimizer(config, 10)
    weights: Any = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    state = eight_bits.held(rule.init(weights), PARAMETERS)
    found = []
    for drawn in gradients():
        grads = {name: jnp.asarray(g, jnp.float32) for name, g in drawn.items()}
        updates: Any
        updates, state = rule.update(grads, eight_bits.seen(state), weights)
        state = eight_bits.held(state, PARAMETERS)
        for name, change in updates.items():
            size = float(jnp.max(jnp.abs(weights[name])))
            beyond = float(jnp.max(jnp.abs(change))) - size  # decay takes no more
            found.append(beyond / (size if config.name == "adafactor" else 1))
        weights = optax.apply_updates(weights, updates)
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)), config
    assert np.isfinite(found).all(), config
    return max(found) / config.learning_rate


def refusal(run: RunConfig, config: OptimizerConfig) -> BadInput | None:
    try:
        check_config(replace(run, optimizer=config))
    except BadInput as problem:
        return problem
    return None


@pytest.mark.parametrize(
    ("name", "bits"),
    rows_drawn(sorted(product(NAMES, (32, 8)), key=("muon", 32).__eq__), short=11),
)
def test_corners_of_all_ranges_train_or_are_refused_with_advice(
    name: str, bits: int, tmp_path
):
    run, trained = small_preset(tmp_path).config, 0
    for config in corners(name, bits):
        advised, problem = config, refusal(run, config)
        while problem is not None:
            assert problem.got and problem.allowed
            before, hints = advised, get_type_hints(OptimizerConfig)
            for option, value in SETTING.findall(problem.fix):
                field = option.replace("-", "_")
                kind = float if hints[field] is float else str
                advised = replace(advised, **{field: kind(value)})
            assert advised != before, problem
            problem = refusal(run, advised)
        if advised is not config:
            continue
        trained += 1
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            assert most_rates(config) <= MOST_RATES, config
    assert (trained > 0) == (bits == 32 or name in ("adamw", "lion", "sgd"))
