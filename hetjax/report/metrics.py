# SPDX-License-Identifier: Apache-2.0
"""Defines the table of metrics: every number that a run writes to `metrics.jsonl`.

Owns their keys, units, words and meanings, and where each is shown: in the lines of
progress, among the headline numbers of a run, as a curve. Lines, pages, the list in the
documentation, DataFrames and the checks of journals all use it. Does not own the
numbers (`training/loop.py`, `costs/utilization.py`) nor how anything looks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


def ms(seconds: float) -> str:
    """Return seconds as milliseconds, three digits after the point below 100."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.{1 if milliseconds >= 100 else 3}f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The axes that curves share; `factor` turns values into the title's unit."""

    title: str
    from_zero: bool = True
    factor: float = 1.0


LOSS = Axes(title="Loss (nats per token)", from_zero=False)
SPEED = Axes(title="Tokens per second")
STEP_TIME = Axes(title="Step time (ms)", factor=1e3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A number of a line of `metrics.jsonl`.

    `label` is its name on pages, `tracker_name` its name in TensorBoard and the like,
    in Levanter's groups. `unit` is the unit of the number in the file. The `headline`
    number of a run is the last value, or the median over the steps under the current
    plan. Two metrics at most share `axes`.
    """

    key: str
    tracker_name: str
    label: str
    unit: str
    format: Callable[[float], str]
    meaning: str
    in_progress: bool = False
    headline: Literal["last", "median"] | None = None
    axes: Axes | None = None

    @property
    def headline_label(self) -> str:
        return f"{self.label}, median" if self.headline == "median" else self.label


METRICS = (  # in display order
    Metric(
        key="loss",
        tracker_name="train/loss",
        label="loss",
        unit="nats per token",
        format="{:.4f}".format,
        meaning="mean loss of the batch, before the update: cross-entropy, plus label "
        "smoothing and z-loss if they are used",
        in_progress=True,
        headline="last",
        axes=LOSS,
    ),
    Metric(
        key="val_loss",
        tracker_name="eval/loss",
        label="validation loss",
        unit="nats per token",
        format="{:.4f}".format,
        meaning="mean cross-entropy of the validation text, after the step",
        in_progress=True,
        headline="last",
        axes=LOSS,
    ),
    Metric(
        key="val_bits_per_byte",
        tracker_name="eval/bpb",
        label="validation bits per byte",
        unit="bits per byte",
        format="{:.4f}".format,
        meaning="`val_loss` per byte of text, whatever the tokenizer",
        in_progress=True,
    ),
    Metric(
        key="grad_norm",
        tracker_name="grad/norm/total",
        label="gradient norm",
        unit="",
        format="{:.3f}".format,
        meaning="norm of the gradient over all parameters, before clipping",
        in_progress=True,
    ),
    Metric(
        key="learning_rate",
        tracker_name="optim/learning_rate",
        label="learning rate",
        unit="",
        format="{:.2e}".format,
        meaning="learning rate of the step",
        in_progress=True,
    ),
    Metric(
        key="loss_scale",
        tracker_name="optim/loss_scale",
        label="loss scale",
        unit="",
        format="{:g}".format,
        meaning="factor on the loss in the step; only if a stage computes in float16",
    ),
    Metric(
        key="tokens",
        tracker_name="throughput/tokens",
        label="tokens",
        unit="tokens",
        format="{:,.0f}".format,
        meaning="tokens of the batch that the loss counts",
    ),
    Metric(
        key="step_time_s",
        tracker_name="throughput/duration",
        label="step time",
        unit="s",
        format=lambda seconds: f"{ms(seconds)} ms",
        meaning="time from the end of the previous step to the end of this one",
        headline="median",
        axes=STEP_TIME,
    ),
    Metric(
        key="tokens_per_s",
        tracker_name="throughput/tokens_per_second",
        label="tokens/s",
        unit="tokens/s",
        format="{:,.0f}".format,
        meaning="`tokens` divided by `step_time_s`",
        in_progress=True,
        headline="median",
        axes=SPEED,
    ),
    Metric(
        key="mfu",
        tracker_name="throughput/mfu",  # a share; a percentage in Levanter
        label="MFU",
        unit="share",
        format="{:.1%}".format,
        meaning="model FLOPs of the step, as a share of what the devices in use could "
        "compute in the same time at their dense peak; only if all peaks are known and "
        "no device is simulated",
        in_progress=True,
        headline="median",
    ),
    Metric(
        key="joules_per_token",
        tracker_name="throughput/joules_per_token",
        label="J/token",
        unit="J/token",
        format="{:.3g}".format,
        meaning="board power (by data sheets, without hosts) of the devices in use, "
        "times `step_time_s`, divided by `tokens`; only if the power of all is known "
        "and no device is simulated",
        headline="median",
    ),
)
KEYS = tuple(metric.key for metric in METRICS)
HEADLINES = tuple(metric for metric in METRICS if metric.headline)


def spelled(metrics: Iterable[Metric], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield key and value of the known metrics.

    >>> [*spelled(METRICS, {"mfu": 0.25, "loss": 2.5, "step_time_s": None})]
    ['loss 2.5000', 'mfu 25.0%']
    """
    for metric in metrics:
        if values.get(metric.key) is not None:
            yield f"{metric.key} {metric.format(values[metric.key])}"


def tracked(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values under their names in trackers; unknown ones are of training.

    >>> tracked({"loss": 2.5, "mfu": 0.4, "rewards": 3.0})
    {'train/loss': 2.5, 'throughput/mfu': 0.4, 'train/rewards': 3.0}
    """
    names = {metric.key: metric.tracker_name for metric in METRICS}
    return {names.get(k, f"train/{k}"): value for k, value in values.items()}
