# SPDX-License-Identifier: Apache-2.0
"""Describes skipped steps: why, how many a run allows, and how they end it.

Does not own the detection of bad steps nor the rollback to a checkpoint (`loop.py`,
`rollback.py`).
"""

from typing import Any

from hetjax.errors import RunFailed
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.settings.config import RunConfig

MOST_SKIPPED = 20  # steps in a row: they halve the usual first scale down to 2**-12


def diverged(got: str, config: RunConfig, saved: int | None) -> RunFailed:
    """Return the error for a loss or weights that are not finite numbers.

    `saved` is the newest step that is saved.
    """
    state, then = _saved(saved)
    return RunFailed(
        got=got,
        allowed=f"finite numbers; {state}",
        fix=f"{then} with a lower --optimizer.learning-rate (now "
        f"{config.optimizer.learning_rate})",
    )


def skips_all(
    step: int, scale: float | None, config: RunConfig, saved: int | None
) -> RunFailed:
    """Return the error for too many skipped steps in a row, up to `step`."""
    state, then = _saved(saved)
    if scale is None:
        return RunFailed(
            got=f"{MOST_SKIPPED} skipped steps in a row, up to step {step}: their "
            "gradients are not finite or their loss is a spike",
            allowed=f"an occasional skipped step; {state}",
            fix=f"{then} with a lower --optimizer.learning-rate (now "
            f"{config.optimizer.learning_rate}), or with --on-spike warn",
        )
    return RunFailed(
        got=f"gradients that are not finite in {MOST_SKIPPED} steps in a row, up to "
        f"step {step}, although the loss scale fell each time, to {scale:.10g}",
        allowed="an occasional overflow (float16: above 65504), which skips its step; "
        f"{state}",
        fix=f"{then} with --dtype float32 (or bfloat16, if all cards have it) and "
        "no float16 precision in the plan, or with a lower "
        f"--optimizer.learning-rate (now {config.optimizer.learning_rate})",
    )


def skipped_line(
    step: int, result: StepCommit, step_time_s: float, learning_rate: float
) -> dict[str, Any]:
    """Return the `metrics.jsonl` line of a step that changed no weights: no loss."""
    line = {
        "step": step,
        "skipped": True,
        "reason": _why(result),
        "tokens": 0 if result.is_left_out else result.num_tokens,
        "step_time_s": step_time_s,
        "learning_rate": learning_rate,
    }
    if result.loss_scale is not None:
        line["loss_scale"] = result.loss_scale
    return line


def _why(result: StepCommit) -> str:
    if result.is_left_out:
        return "left out after a loss spike"
    if result.is_spike:
        return f"loss {result.loss():.4f}, above {result.most_loss:.4f}"
    if result.loss_scale is not None:
        return f"gradients overflow at loss scale {result.loss_scale:.10g}"
    return "gradients that are not finite"


def _saved(saved: int | None) -> tuple[str, str]:
    """Return what is saved, and what to do now, in words."""
    if saved is None:
        return "no checkpoint is saved", "start again"
    return f"the last checkpoint is of step {saved}", "resume from there"
