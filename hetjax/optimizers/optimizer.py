# SPDX-License-Identifier: Apache-2.0
"""Makes the optimizer of a run, an Optax transformation, from its settings.

Owns the marks on what the runtime treats specially (moments in 8 bits, sums over
leaves) and the average of the weights beside a rule. Does not own the rules (one file
each, `table.py`), clipping, which needs the norm over all stages (NORM,
`hetjax/runtime/`), nor state.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hetjax.optimizers.learning_rate import schedule
from hetjax.optimizers.moments import marked, unmarked
from hetjax.optimizers.rule import Rule
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.optimizers.table import rule_named

AVERAGES = "opt.ema."  # prefix of checkpoint entries with the average of `Averaged`


class NonElementwise(optax.GradientTransformation):
    """A rule that sums over a leaf: the leaf's cut could change the rounding."""


def optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Return the leaf-wise rule of a run of so many steps, without clipping.

    Raises BadInput for a name of no rule.
    """
    rule = rule_named(config.name)
    made = rule.transform(config, schedule(config, num_steps))
    if config.state_bits == 8:
        made = _in_eight_bits(made, rule)
    if config.ema:
        made = _averaging(made, config.ema)
    kind = optax.GradientTransformation if rule.is_elementwise else NonElementwise
    return kind(made.init, made.update)


def _in_eight_bits(
    made: optax.GradientTransformation, rule: Rule
) -> optax.GradientTransformation:
    """Return the rule with the moments of its state marked: they are held in 8 bits
    between two updates."""

    def init(params: Any) -> Any:
        return marked(made.init(params), rule.moments)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = made.update(updates, unmarked(state), params)
        return updates, marked(state, rule.moments)

    return optax.GradientTransformation(init, update)


class Averaged(NamedTuple):
    """The state of a rule, and the average of the weights that it has made."""

    rule: Any
    ema: Any


def _averaging(
    made: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """Return the rule with an average of weights, initially the first weights."""

    def init(params: Any) -> Averaged:
        return Averaged(made.init(params), jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        assert params is not None, "averages are of weights"
        updates, of_rule = made.update(updates, state.rule, params)
        weights = optax.apply_updates(params, updates)
        ema = optax.incremental_update(weights, state.ema, 1 - decay)
        return updates, Averaged(of_rule, ema)

    return optax.GradientTransformation(init, update)
