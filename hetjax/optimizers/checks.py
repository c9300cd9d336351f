# SPDX-License-Identifier: Apache-2.0
"""Checks the settings of an optimizer for the rule that they name.

Owns the checks that hold for all rules. Does not own what each rule allows (the rules'
files) nor the ranges of settings that are the same for all rules
(`hetjax/training/settings/checks.py`).
"""

from collections.abc import Iterator

from hetjax.errors import BadInput
from hetjax.optimizers.rule import BETA, Rule
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.optimizers.table import RULES, rule_named

# also for rules that do not read them
_DECAYS = {"beta1": BETA, "beta2": BETA, "ema": BETA}


def optimizer_problems(config: OptimizerConfig) -> Iterator[BadInput]:
    """Yield problems of settings; those common to all rules must already be in range.

    Raises BadInput for a name of no rule.
    """
    rule = rule_named(config.name)
    yield from _range_problems(config, rule)
    yield from _state_problems(config, rule)
    yield from rule.problems(config)
    yield from _decay_problems(config)


def _range_problems(config: OptimizerConfig, rule: Rule) -> Iterator[BadInput]:
    for name, limit in {**_DECAYS, **rule.fields}.items():
        value = getattr(config, name)
        if not limit.has(value):
            yield BadInput(
                got=f"optimizer.{name} = {value}",
                allowed=limit.words.format(f"optimizer.{name}"),
                fix=f"give --optimizer.{name} {limit.example}, say",
            )


def _state_problems(config: OptimizerConfig, rule: Rule) -> Iterator[BadInput]:
    if config.state_bits == 8 and not rule.moments:
        *most, last = (name for name, rule in RULES.items() if rule.moments)
        yield BadInput(
            got=f"--optimizer.state-bits 8 with --optimizer.name {config.name}",
            allowed=f"8 bits for the moments of {', '.join(most)} and {last}, which "
            "update each number separately",
            fix=f"add --optimizer.name {most[0]}, or leave --optimizer.state-bits out",
        )


def _decay_problems(config: OptimizerConfig) -> Iterator[BadInput]:
    if config.learning_rate * config.weight_decay > 1:
        yield BadInput(
            got=f"--optimizer.learning-rate {config.learning_rate:g} with "
            f"--optimizer.weight-decay {config.weight_decay:g}",
            allowed="learning rate x weight decay <= 1: each step removes that share "
            "of each weight",
            fix="give --optimizer.learning-rate 3e-4 --optimizer.weight-decay 0.1, say",
        )
