# SPDX-License-Identifier: Apache-2.0
"""Checks whether a plan is for a model, and finds the model that a plan is for.

A plan is for every model whose layers and shapes have its fingerprint, whatever the
model's name. A plan file that was written by hand, without a fingerprint, is for the
model that it names. Does not own the fingerprint (`models/fingerprint.py`) nor other
conditions between a plan and a model (`plans/validation.py`).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hetjax.errors import BadInput, placed
from hetjax.models.fingerprint import fingerprint
from hetjax.models.model import Model
from hetjax.models.named import allowed_name, is_function, load_named
from hetjax.plans.plan import Plan


def is_for_model(plan: Plan, model: Model, names: Collection[str]) -> bool:
    """Return whether the plan is for the model.

    A plan without a fingerprint must call the model by one of `names`.
    """
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
            got=f"{where} is for model {plan.model!r}, but this model is "
            f"{model.name!r}",
            allowed="a plan for the same model (same name, for lack of a fingerprint)",
            fix=fix,
        )
    raise BadInput(
        got=f"{where} is for model {plan.model!r} (fingerprint {plan.fingerprint}), "
        f"but {model.name!r} has different layers or shapes ({fingerprint(model)})",
        allowed="a plan for a model with the same layers and shapes, whatever its name",
        fix=fix,
    )


def model_of_plan(plan: Plan, where: str, allow_model_code: str | None) -> Model:
    """Return the model that the plan names.

    A function is called only if it is the one that `allow_model_code` names. Raises
    BadInput if there is no such model, or if the plan is for other layers.
    """
    fix = "add --model with the model's folder, file or function (in Python: model=...)"
    name = allowed_name(plan.model, allow_model_code)
    with placed(where) if is_function(name) else _named_by_plan(plan, where, fix):
        model = load_named(name)
    check_is_for_model(plan, model, {name}, where, fix)
    return model


@contextmanager
def _named_by_plan(plan: Plan, where: str, fix: str) -> Iterator[None]:
    """Let a BadInput within `with` say that the plan's name alone is not enough."""
    try:
        yield
    except BadInput as bad:
        raise BadInput(
            got=f"{where} is for model {plan.model!r}, but no model with that name is "
            f"known here ({bad.got})",
            allowed="a plan that names a preset, or the model given with the plan",
            fix=fix,
        ) from bad
