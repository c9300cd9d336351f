# SPDX-License-Identifier: Apache-2.0
"""Schedule-free AdamW: Defazio et al. 2024 (arXiv 2405.15682), algorithm 1.

AdamW without a mean of gradients moves z. x is a mean of all z, which takes the place
of a schedule. Gradients are taken at y, beta1 of the way from z to x. A run's weights
are y. x, at which the model is evaluated, follows from y and z.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hetjax.errors import BadInput
from hetjax.optimizers.rule import BETA, STEPS, Rule, SettingRange
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax


def _transform(
    config: OptimizerConfig, rate: "optax.Schedule"
) -> "optax.GradientTransformation":
    import optax
    from optax.contrib import schedule_free

    from hetjax.optimizers.decay import matrices

    moves = optax.chain(
        optax.scale_by_rms(config.beta2, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(config.weight_decay, matrices),
        optax.scale_by_learning_rate(rate),
    )
    # each z counts by its step's rate squared; Optax counts steps from 1 there
    return schedule_free(moves, lambda count: rate(count - 1), b1=config.beta1)


def _mean_of_moves(state: Any, weights: dict[str, Any]) -> dict[str, Any]:
    from optax.contrib import schedule_free_eval_params

    return schedule_free_eval_params(state, weights)  # pyright: ignore[reportReturnType]


def _problems(config: OptimizerConfig) -> Iterator[BadInput]:
    if config.schedule != "constant":
        yield BadInput(
            got=f"--optimizer.name schedule-free with --optimizer.schedule "
            f"{config.schedule}",
            allowed="constant after the warm-up: a mean of weights replaces a schedule",
            fix="add --optimizer.schedule constant",
        )
    if config.ema:
        yield BadInput(
            got=f"--optimizer.name schedule-free with --optimizer.ema {config.ema:g}",
            allowed="one mean of weights: schedule-free has its own, which is "
            "validated, sampled and exported",
            fix="leave out --optimizer.ema, or give --optimizer.ema 0",
        )


SCHEDULE_FREE = Rule(
    summary="adamw with an average of all weights in place of both momentum and a "
    "schedule",
    transform=_transform,
    fields={
        # x is found by a division by beta1
        "beta1": SettingRange(
            lambda x: 0.1 <= x <= 0.999999, "0.1 <= {} <= 0.999999", "0.9"
        ),
        "beta2": BETA,
    },
    numbers={
        "ScaleByRmsWithCountState.count": "updates",  # bias correction
        "ScheduleFreeState.b1": "constant",
        "ScheduleFreeState.max_lr": "updates",  # the largest that moved z
        "ScheduleFreeState.step_count": "steps",  # the learning rate of the step
        "ScheduleFreeState.weight_sum": "updates",  # of all z so far
        **STEPS,
    },
    evaluation={"ScheduleFreeState": _mean_of_moves},
    problems=_problems,
    kept=("beta1",),  # it sets the place of y between x and z
)
