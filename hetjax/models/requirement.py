# SPDX-License-Identifier: Apache-2.0
"""The checks that configs make of themselves, told as `BadInput`.

Owns the wording for "must be positive" and "must divide". Does not own which fields
are checked: each config's `__post_init__` says that.
"""

from hetjax.errors import BadInput


def require_positive(owner: str, **values: float) -> None:
    """Raise BadInput unless every value is above zero."""
    for name, value in values.items():
        if value <= 0:
            raise BadInput(
                got=f"{owner}: {name} = {value}",
                allowed=f"{name} above 0",
                fix=f"set {name} to 1 or more",
            )


def require_divides(
    owner: str, divisor: tuple[str, int], dividend: tuple[str, int]
) -> None:
    """Raise BadInput unless divisor divides dividend; both are (name, value)."""
    (name, value), (of, total) = divisor, dividend
    if total % value:
        near = sorted(
            (d for d in range(1, total + 1) if total % d == 0),
            key=lambda d: abs(d - value),
        )[:3]
        raise BadInput(
            got=f"{owner}: {name} = {value} does not divide {of} = {total}",
            allowed=f"a {name} that divides {total}, such as {sorted(near)}",
            fix=f"set {name} to {near[0]}, or change {of}",
        )
