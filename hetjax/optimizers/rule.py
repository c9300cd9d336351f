# SPDX-License-Identifier: Apache-2.0
"""What a file of this room says of an optimizer rule: a `Rule`.

Owns the questions that settings, runtime and costs have for a rule. Does not own the
answers (one file per rule), which rules there are (`table.py`), nor the transformation
of a run (`optimizer.py`). No module that settings import may import JAX at its top:
help and errors of command lines come before it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hetjax.errors import BadInput
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax

# What a skipped step does to a number of the state: a count of the run's steps, which
# the learning rate follows, goes on; what counts or sums updates stays
Number = Literal["steps", "updates", "constant"]
Signs = Literal["signed", "unsigned"]  # of the values of a moment
Transform = Callable[
    [OptimizerConfig, "optax.Schedule"], "optax.GradientTransformation"
]
# (state, weights) by leaf -> the weights that are validated, sampled and exported
EvaluationWeights = Callable[[Any, dict[str, Any]], dict[str, Any]]


class SettingRange(NamedTuple):
    """The range of a setting: a test, the test in words with {} for its name, and a
    value that passes."""

    has: Callable[[float], bool]
    words: str
    example: str


BETA = SettingRange(  # more: 1 in float32
    lambda x: 0 <= x <= 0.999999, "0 <= {} <= 0.999999", "0.9"
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An optimizer rule. Parts of its state are called as in Optax: `State.field`.

    `summary` is a line for people. `transform` gives Optax's rule for the settings and
    the learning rate by steps done. `fields` are the settings that it reads besides the
    rate, its course, clipping and decay, which are the same for all rules, with their
    ranges. `numbers` say what a skipped step does to what the state does not keep by
    parameter. `moments` may be kept in 8 bits, as each of their values is updated by
    itself. A rule `is_elementwise` if it treats each leaf by itself and sums over none,
    so that it does not matter how leaves are cut. `evaluation` has the state from which
    the weights to evaluate follow, for a rule that trains at others. `problems` yields
    what is wrong with settings that are each in their range. Settings that are `kept`
    stay as they were when the run began.
    """

    summary: str
    transform: Transform
    fields: Mapping[str, SettingRange]
    numbers: Mapping[str, Number]
    moments: Mapping[str, Signs] = field(default_factory=dict)
    is_elementwise: bool = True
    evaluation: Mapping[str, EvaluationWeights] = field(default_factory=dict)
    problems: Callable[[OptimizerConfig], Iterable[BadInput]] = lambda config: ()
    kept: tuple[str, ...] = ()


# of Optax's own scaling by a schedule, which most rules end with
STEPS: Mapping[str, Number] = {"ScaleByScheduleState.count": "steps"}


def mean_problems(config: OptimizerConfig) -> Iterable[BadInput]:
    """Yield what is wrong with means by which a rule divides another mean.

    Kingma and Ba 2015, theorem 4.1. Otherwise the squares are forgotten before the mean
    is: where gradients stop, as in the embedding of a rare token, updates grow without
    limit.
    """
    if config.beta1**2 > config.beta2:
        yield BadInput(
            got=f"--optimizer.beta1 {config.beta1:g} with --optimizer.beta2 "
            f"{config.beta2:g} and --optimizer.name {config.name}",
            allowed="beta1 x beta1 <= beta2; updates grow without limit otherwise",
            fix="give --optimizer.beta1 0.9 --optimizer.beta2 0.95, say",
        )
