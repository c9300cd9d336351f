# SPDX-License-Identifier: Apache-2.0
"""Lion: Chen et al. 2023 (arXiv 2302.06675), algorithm 2."""

from typing import TYPE_CHECKING

from hetjax.optimizers.rule import BETA, STEPS, Rule
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax


def _transform(
    config: OptimizerConfig, rate: "optax.Schedule"
) -> "optax.GradientTransformation":
    import optax

    from hetjax.optimizers.decay import matrices

    return optax.lion(
        rate,
        config.beta1,
        config.beta2,
        weight_decay=config.weight_decay,
        mask=matrices,
    )


LION = Rule(
    summary="the sign of a moving average of gradients, so that all updates are "
    "equally large",
    transform=_transform,
    fields={"beta1": BETA, "beta2": BETA},
    numbers={"ScaleByLionState.count": "updates", **STEPS},  # nothing reads it
    moments={"ScaleByLionState.mu": "signed"},
)
