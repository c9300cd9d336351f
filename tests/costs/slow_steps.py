# SPDX-License-Identifier: Apache-2.0
"""Steps of made-up runs: the time of each part is drawn, and so is known."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hetjax.costs.slowness.detector import Detector
from hetjax.costs.slowness.findings import Slowdown
from hetjax.costs.slowness.step_times import Ends, Lane, Lanes, Part, StepTimes

LINK = ("a", "b")

# slowdown factor by step, replica, stage, kind of action and node
Slow = Callable[[int, int, int, str, str], float]


def as_ever(step: int, r: int, s: int, kind: str, node: str) -> float:
    return 1.0


def lanes(nodes: Sequence[Sequence[str]], work: str | None = None) -> Lanes:
    """Return stages by replica, each on one device of a node."""
    return Lanes(
        tuple(
            Lane(key=(r, s), node=node, devices=(0,), work=work)
            for r, stages in enumerate(nodes)
            for s, node in enumerate(stages)
        )
    )


def steps(
    nodes: Sequence[Sequence[str]],
    num_steps: int,
    *,
    seed: int,
    noise: float = 0.03,
    work: float = 0.0,
    slow: Slow = as_ever,
    slow_link: Callable[[int], float] = lambda step: 1.0,
) -> Iterator[StepTimes]:
    """Yield steps: parts of unlike size, each with its own noise and a tail of pauses.

    `noise` and `work` are deviations of logarithms; a replica's batches share `work`.
    """
    draw = np.random.default_rng(seed)
    usual_s: dict[Part, float] = {}
    for r, stages in enumerate(nodes):
        for s in range(len(stages)):
            kinds = ("F", "B") if s < len(stages) - 1 else ("FB",)
            usual_s |= {(r, s, kind): draw.uniform(0.05, 0.2) for kind in kinds}
            usual_s[r, s, "UPDATE"] = 0.01
    for step in range(1, num_steps + 1):
        batches = draw.normal(0.0, work, len(nodes))
        parts = {
            (r, s, kind): usual
            * math.exp(batches[r] + draw.normal(0.0, noise))
            * (1.0 if draw.random() > 0.01 else draw.uniform(1.0, 5.0))
            * slow(step, r, s, kind, nodes[r][s])
            for (r, s, kind), usual in usual_s.items()
        }
        pace = 1e-9 * math.exp(draw.normal(0.0, noise)) * slow_link(step)
        links: dict[Ends, float] = {LINK: pace}
        yield StepTimes(step=step, parts=parts, links=links)


def found(there: Lanes, of: Iterator[StepTimes]) -> list[Slowdown]:
    """Return what a detector reports on these steps."""
    detector = Detector()
    detector.begin(there)
    return [finding for times in of for finding in detector.add(times)]
