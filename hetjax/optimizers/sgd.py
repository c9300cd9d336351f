# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent, with momentum unless beta1 is 0."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetjax.errors import BadInput
from hetjax.optimizers.rule import BETA, STEPS, Rule
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax


def _transform(
    config: OptimizerConfig, rate: "optax.Schedule"
) -> "optax.GradientTransformation":
    import optax

    from hetjax.optimizers.decay import matrices

    decayed = optax.add_decayed_weights(config.weight_decay, matrices)
    return optax.chain(decayed, optax.sgd(rate, momentum=config.beta1 or None))


def _problems(config: OptimizerConfig) -> Iterator[BadInput]:
    if config.state_bits == 8 and not config.beta1:
        yield BadInput(
            got="--optimizer.state-bits 8 with --optimizer.name sgd and "
            "--optimizer.beta1 0",
            allowed="8 bits for rules with a state; sgd without momentum has none",
            fix="leave --optimizer.state-bits out, or add --optimizer.beta1 0.9",
        )


SGD = Rule(
    summary="the gradient, or with a beta1 above 0 the momentum",
    transform=_transform,
    fields={"beta1": BETA},
    numbers=STEPS,
    moments={"TraceState.trace": "signed"},
    problems=_problems,
)
