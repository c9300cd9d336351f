# SPDX-License-Identifier: Apache-2.0
"""Adafactor: Shazeer and Stern 2018 (arXiv 1804.04235), algorithm 4 without momentum.

Optax's own `adafactor` does not multiply its weight decay by the learning rate; this
rule, which is made of its parts, does.
"""

from typing import TYPE_CHECKING

from hetjax.optimizers.rule import STEPS, Rule
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax


def _transform(
    config: OptimizerConfig, rate: "optax.Schedule"
) -> "optax.GradientTransformation":
    import optax

    from hetjax.optimizers.decay import matrices

    direction = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    decayed = optax.add_decayed_weights(config.weight_decay, matrices)
    return optax.chain(direction, decayed, optax.scale_by_learning_rate(rate))


ADAFACTOR = Rule(
    summary="the gradient divided by the root of its second moment (of large "
    "matrices factored into rows and columns), times the root mean square "
    "of the parameter",
    transform=_transform,
    fields={},
    numbers={"FactoredState.count": "updates", **STEPS},  # its decay is 1 - t**-0.8
    is_elementwise=False,
)
