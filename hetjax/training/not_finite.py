# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite: how many are borne, and how they end a run.

Does not own where they are found nor the going back to a checkpoint (`loop.py`).
"""

from hetjax.errors import RunFailed
from hetjax.training.config import RunConfig

MOST_SKIPPED = 20  # steps in a row: they halve the usual first scale down to 2**-12


class NotFinite(Exception):
    """A step, or the weights after it, have numbers that are not finite."""

    def __init__(self, step: int, got: str) -> None:
        super().__init__(got)
        self.step, self.got = step, got


def diverged(got: str, config: RunConfig, saved: int | None) -> RunFailed:
    """A run with a loss or weights that are no numbers; `saved` is the newest step."""
    state, then = _saved(saved)
    return RunFailed(
        got=got,
        allowed=f"finite numbers; {state}",
        fix=f"{then} with a lower --optimizer.learning-rate, which is "
        f"{config.optimizer.learning_rate} now",
    )


def overflows(
    step: int, scale: float | None, config: RunConfig, saved: int | None
) -> RunFailed:
    """A run whose gradients overflow whatever its loss is scaled by."""
    state, then = _saved(saved)
    return RunFailed(
        got=f"gradients that are not finite in {MOST_SKIPPED} steps in a row, to "
        f"step {step}, where the loss was scaled by {scale:.10g}, less each time",
        allowed="an overflow now and then, which skips its step, as float16 ends "
        f"at 65504; {state}",
        fix=f"{then} with --dtype float32 (or bfloat16, if all cards have it) and "
        "no precision of float16 in the plan, or with a lower "
        f"--optimizer.learning-rate, which is {config.optimizer.learning_rate} now",
    )


def _saved(saved: int | None) -> tuple[str, str]:
    """What is saved, and what to do now, in words."""
    if saved is None:
        return "none is saved", "start again"
    return f"the last checkpoint is of step {saved}", "go on from there"
