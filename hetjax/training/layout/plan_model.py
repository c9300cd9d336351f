# SPDX-License-Identifier: Apache-2.0
"""Whether a plan is for a model, and which model a plan is for.

A plan is for every model whose layers and shapes have its fingerprint, however that is
named; a plan file that was written by hand, and has no fingerprint, is for the model of
its name. Does not own the fingerprint (`models/fingerprint.py`) nor what else has to
hold between a plan and a model (`plans/validation.py`).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hetjax.errors import BadInput, placed
from hetjax.models.fingerprint import fingerprint
from hetjax.models.model import Model
from hetjax.models.named import allowed_name, is_function, load_named
from hetjax.plans.plan import Plan


def is_for_model(plan: Plan, model: Model, names: Collection[str]) -> bool:
    """Whether the plan is for the model; `names` are those that a plan without a
    fingerprint may have for it."""
    if plan.fingerprint is None:
        return plan.model in names
    return plan.fingerprint == fingerprint(model)


def check_is_for_model(
    plan: Plan, model: Model, names: Collection[str], where: str, fix: str
) -> None:
    """Raise BadInput, beginning with `where`, for a plan of another model."""
    if is_for_model(plan, model, names):
        return
    if plan.fingerprint is None:
        raise BadInput(
            got=f"{where} is for model {plan.model!r}, and this model is "
            f"{model.name!r}",
            allowed="a plan for the same model: without a fingerprint it fits by name",
            fix=fix,
        )
    raise BadInput(
        got=f"{where} is for model {plan.model!r} (fingerprint {plan.fingerprint}), "
        f"and {model.name!r} has other layers or shapes ({fingerprint(model)})",
        allowed="a plan for a model with the same layers and shapes, whatever its name",
        fix=fix,
    )


def model_of_plan(plan: Plan, where: str, allow_model_code: str | None) -> Model:
    """Give the model that the plan names; BadInput if that is none, or has other layers
    than the plan is for.

    A function is called only if it is the one that `allow_model_code` names.
    """
    fix = "add --model with the model's folder, file or function (in Python: model=...)"
    name = allowed_name(plan.model, allow_model_code)
    with placed(where) if is_function(name) else _named_by_plan(plan, where, fix):
        model = load_named(name)
    check_is_for_model(plan, model, {name}, where, fix)
    return model


@contextmanager
def _named_by_plan(plan: Plan, where: str, fix: str) -> Iterator[None]:
    """Let a BadInput from inside say that the plan's name alone is not enough."""
    try:
        yield
    except BadInput as bad:
        raise BadInput(
            got=f"{where} is for model {plan.model!r}, which names none here "
            f"({bad.got})",
            allowed="a plan that names a preset, or the model given beside the plan",
            fix=fix,
        ) from bad
