# SPDX-License-Identifier: Apache-2.0
"""AdamW: Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2."""

from typing import TYPE_CHECKING

from hetjax.optimizers.rule import BETA, STEPS, Rule, mean_problems
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax


def _transform(
    config: OptimizerConfig, rate: "optax.Schedule"
) -> "optax.GradientTransformation":
    import optax

    from hetjax.optimizers.decay import matrices

    return optax.adamw(
        rate,
        config.beta1,
        config.beta2,
        weight_decay=config.weight_decay,
        mask=matrices,
    )


ADAMW = Rule(
    summary="the moving average of gradients, divided by the root of the moving "
    "average of their squares",
    transform=_transform,
    fields={"beta1": BETA, "beta2": BETA},
    numbers={"ScaleByAdamState.count": "updates", **STEPS},  # bias correction
    moments={"ScaleByAdamState.mu": "signed", "ScaleByAdamState.nu": "unsigned"},
    problems=mean_problems,
)
