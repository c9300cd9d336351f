# SPDX-License-Identifier: Apache-2.0
"""Lists the optimizer rules by name, and the rules that are refused.

A rule is a file of this room and a row here. Owns the table and its facts about parts
of Optax's states, whichever rule made them. Does not own what a rule is (`rule.py`).
"""

from collections.abc import Mapping

from hetjax.errors import BadInput, did_you_mean
from hetjax.optimizers.adafactor import ADAFACTOR
from hetjax.optimizers.adamw import ADAMW
from hetjax.optimizers.lion import LION
from hetjax.optimizers.muon import MUON
from hetjax.optimizers.rule import EvaluationWeights, Number, Rule
from hetjax.optimizers.schedule_free import SCHEDULE_FREE
from hetjax.optimizers.sgd import SGD

RULES: Mapping[str, Rule] = {
    "adamw": ADAMW,
    "adafactor": ADAFACTOR,
    "lion": LION,
    "muon": MUON,
    "schedule-free": SCHEDULE_FREE,
    "sgd": SGD,
}

# All numbers of the rules' states that are not kept by parameter
NUMBERS: Mapping[str, Number] = {
    name: number for rule in RULES.values() for name, number in rule.numbers.items()
}
# The states from which the weights to evaluate follow
EVALUATION: Mapping[str, EvaluationWeights] = {
    name: weights
    for rule in RULES.values()
    for name, weights in rule.evaluation.items()
}

_AGAIN = "the loss at other weights within a step"
_ALL = "sums over all parameters, but a stage has only some of them"
_LOSS = "the value of the loss, which only the last stage has"
# Rules that need more than the gradient, the weights and the state of one layer
_REFUSED = {
    "sophia": "an estimate of the Hessian's diagonal",
    "adahessian": "an estimate of the Hessian's diagonal",
    "lbfgs": f"{_AGAIN}, for its line search",
    "sam": f"{_AGAIN}, for a second gradient",
    "polyak-sgd": _LOSS,
    "momo": _LOSS,
    "prodigy": _ALL,
    "dadapt-adamw": _ALL,
}


def rule_named(name: str) -> Rule:
    """Return the rule; BadInput for another name, with the reason if it is known."""
    if name in RULES:
        return RULES[name]
    plain = name.lower().replace("_", "-")
    spelled = {refused.replace("-", ""): refused for refused in _REFUSED}
    refused = spelled.get(plain.replace("-", ""))
    if refused is not None:
        raise BadInput(
            got=f"--optimizer.name {name}, a rule that needs {_REFUSED[refused]}",
            allowed="rules that need only gradients, weights and their own state: "
            + ", ".join(RULES),
            fix="add --optimizer.name adamw, say",
        )
    raise BadInput(
        got=f"--optimizer.name {name!r}",
        allowed=f"one of {', '.join(RULES)}",
        fix=did_you_mean(name, RULES),
    )
