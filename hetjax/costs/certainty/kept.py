# SPDX-License-Identifier: Apache-2.0
"""Keeps measured steps, by kind of device, for this user's later runs.

Owns the file, one per release of JAX in the user's cache; the rule for which devices
and precisions a step in it counts; and the safety of writes by simultaneous runs. Does
not own what a step teaches (`calibration.py`) nor the choice of runs that keep steps
(`training/observers/step_comparison.py`).
"""

import errno
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path

import jax
from filelock import FileLock

from hetjax.cluster.catalogue import canonical_name, device_spec
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.speeds import AS_MODELLED
from hetjax.costs.certainty.beliefs import Observation
from hetjax.costs.certainty.calibration import (
    UNCALIBRATED,
    StepCalibration,
    parse_step,
    step_rows,
    step_values,
)
from hetjax.costs.certainty.elasticities import LINK
from hetjax.costs.certainty.priors import EARLIER_RUNS, NOISE_OF_EARLIER_RUNS
from hetjax.costs.roofline import calibration
from hetjax.errors import BadInput, placed
from hetjax.files.reading import read_text
from hetjax.files.tables import as_kind, read_record
from hetjax.files.user_cache import user_cache
from hetjax.files.writing import write_whole
from hetjax.plans.plan import Plan
from hetjax.plans.precision import Dtype, stage_precision

VERSION = 1
MOST_ALIKE = 16  # steps that are kept per set of kinds and precisions
_MOST = 512  # steps in all
_MOST_USED = 512  # observations of them that a prediction uses: the last ones
_MOST_BYTES = 8 << 20
_WAIT_S = 5.0  # while another run writes
_FIX = "remove the file: runs write a new one"
_WHAT = "steps of earlier runs"

# By kind of device, its precision and a digest of its modelled figures: a step counts
# if it shares a kind with the cluster, and these are equal for every shared kind
RanAs = Mapping[str, str]
Precisions = Mapping[str, str]  # the precision of nodes, by their names


@dataclass(frozen=True, slots=True)
class KeptStep:
    """A step of some run with the work in it, and the devices that it used."""

    ran_as: RanAs
    observations: tuple[Observation, ...]


def kept_file() -> Path:
    """Return the path of the file for this release of JAX; it need not exist."""
    return user_cache("calibration") / f"jax-{jax.__version__}.json"


def plan_precisions(
    plan: Plan, cluster: Cluster, dtype: Dtype | None
) -> dict[str, str]:
    """Return the precision of each node that a plan uses."""
    found: dict[str, set[str]] = {}
    for _, _, stage in plan.stages():
        precision = stage_precision(stage, cluster.node(stage.node), dtype)
        found.setdefault(stage.node, set()).add(precision)
    return {node: " and ".join(sorted(names)) for node, names in found.items()}


def read_kept(cluster: Cluster, precisions: Precisions) -> StepCalibration:
    """Return the kept steps that count for the nodes in `precisions`.

    A file that cannot be used is named in one warning, and otherwise ignored.
    """
    path = kept_file()
    steps = _usable(path)
    if not steps:
        return UNCALIBRATED
    here = ran_as(cluster, precisions)
    names = {_outside(cluster, link): "-".join(link.between) for link in cluster.links}
    counting = (step for step in steps if _counts(step.ran_as, here))
    found = [seen for step in counting for seen in step.observations][-_MOST_USED:]
    if not found:
        return UNCALIBRATED
    seen = tuple(
        replace(_with_links(each, names), noise=max(each.noise, NOISE_OF_EARLIER_RUNS))
        for each in found
    )
    return StepCalibration(seen, source=str(path), lesson=EARLIER_RUNS)


def keep(
    step: Sequence[Observation],
    cluster: Cluster,
    precisions: Precisions,
    *,
    instead_of: Sequence[Observation] = (),
) -> None:
    """Add a step and the work in it, measured on the nodes in `precisions`.

    A step equal to `instead_of` is removed from the file. `cluster` is at speeds as
    modelled. A step that a profile has predicted is not kept: it only tells how good
    that profile was. Raises OSError if the file cannot be written, and filelock's
    Timeout (an OSError) if others write for too long.
    """
    if any(name == "layers" for seen in step for _, name in seen.elasticities):
        return
    names = {"-".join(link.between): _outside(cluster, link) for link in cluster.links}
    on = ran_as(cluster, precisions)
    new, old = (
        KeptStep(on, tuple(_with_links(seen, names) for seen in observations))
        for observations in (step, instead_of)
    )
    path = kept_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path.with_suffix(".lock"), timeout=_WAIT_S):
            others = (kept for kept in _usable(path) if kept != old)
            write_whole(path, kept_json(_newest([*others, new])))
    except NotImplementedError as error:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path)) from error


def ran_as(cluster: Cluster, precisions: Precisions) -> RanAs:
    """Return the description that decides whether a step counts for other nodes.

    Different nodes of one kind are described together.
    """
    found: dict[str, set[str]] = {}
    for node in cluster.nodes:
        if node.name in precisions:
            described = f"{precisions[node.name]} {_modelled(node)}"
            found.setdefault(canonical_name(node.device), set()).add(described)
    return {kind: " and ".join(sorted(described)) for kind, described in found.items()}


def parse_kept(text: str) -> tuple[KeptStep, ...]:
    """Read the JSON text; BadInput says where the error is."""
    rows = step_rows(text, version=VERSION, most=_MOST, fix=_FIX)
    return tuple(_kept(row, f"steps[{i}]") for i, row in enumerate(rows))


def kept_json(steps: Iterable[KeptStep]) -> str:
    """Return the JSON text that `parse_kept` reads back, with a line for each step."""
    rows = [
        json.dumps(
            {
                "ran_as": {**step.ran_as},
                "step": step_values(step.observations[-1]),
                "work": [step_values(work) for work in step.observations[:-1]],
            }
        )
        for step in steps
    ]
    lines = ",\n".join(rows)
    return f'{{"version": {VERSION}, "steps": [\n{lines}\n]}}\n'


def _kept(raw: object, where: str) -> KeptStep:
    row = read_record(
        raw,
        where=where,
        required={"ran_as": "a table", "step": "a table"},
        optional={"work": "a list"},  # none from before it was measured
    )
    on = {
        kind: as_kind(described, "a string", where=f"{where}.ran_as")
        for kind, described in row["ran_as"].items()
    }
    work = [
        parse_step(each, f"{where}.work[{i}]")
        for i, each in enumerate(row.get("work", ()))
    ]
    return KeptStep(on, (*work, parse_step(row["step"], f"{where}.step")))


def _usable(path: Path) -> Sequence[KeptStep]:
    """Return the steps in the file; none if it is missing or damaged."""
    if not os.path.exists(path):
        return ()
    try:
        text = read_text(path, what=_WHAT, most_bytes=_MOST_BYTES)
        with placed(f"{_WHAT}, {str(path)!r}"):
            return parse_kept(text)
    except BadInput as damaged:
        _say_once(f"{damaged.got}: ignored; the next run that learns writes a new file")
        return ()


@cache
def _say_once(line: str) -> None:
    warnings.warn(line, stacklevel=2)


def _counts(there: RanAs, here: RanAs) -> bool:
    """Return whether a step on the devices `there` counts for those `here`."""
    shared = there.keys() & here.keys()
    return bool(shared) and all(there[kind] == here[kind] for kind in shared)


def _newest(steps: Sequence[KeptStep]) -> list[KeptStep]:
    """Return the last steps, and not too many of the same devices, so that devices that
    run most do not displace others."""
    left: list[KeptStep] = []
    times: dict[str, int] = {}
    for step in reversed(steps):
        key = json.dumps(step.ran_as, sort_keys=True)
        times[key] = times.get(key, 0) + 1
        if times[key] <= MOST_ALIKE and len(left) < _MOST:
            left.append(step)
    return left[::-1]


def _with_links(step: Observation, names: Mapping[str, str]) -> Observation:
    """Return the step with its links renamed; a link not in `names` keeps its name."""
    shares = {
        (names.get(owner, owner) if name == LINK else owner, name): share
        for (owner, name), share in step.elasticities.items()
    }
    return replace(step, elasticities=shares)


def _outside(cluster: Cluster, link: Link) -> str:
    """Return a link's name in the file: equal only between the same nodes.

    Other clusters may have nodes of the same names.
    """
    ends = [
        (node.name, node.zone, canonical_name(node.device), node.count, node.hosts)
        for node in cluster.nodes
        if {node.name, node.zone} & {*link.between}
    ]
    return f"link-{_digest([link.between, link.bandwidth_gbit_per_s, ends])}"


def _modelled(node: Node) -> str:
    """Return a digest of the device figures to which the speeds of a step are relative.

    "cpu" is any CPU, so for it the digest includes the machine.
    """
    try:
        spec = device_spec(replace(node, speeds=AS_MODELLED))
    except BadInput:  # the caller that predicts reports it
        return "unknown"
    figures = [*_figures(spec.peak_tflops, spec.fp32_tflops, spec.memory_gb_per_s)]
    figures += _figures(spec.intra_node_gb_per_s, spec.network_gbit_per_s)
    ways = [spec.bf16_native, spec.fp16_native, spec.attention, spec.links_span_hosts]
    where = platform.node() if spec.name == "cpu" else ""
    return _digest([figures, ways, astuple(calibration(spec)), where])


def _figures(*figures: float | None) -> Iterator[str]:
    yield from (f"{figure:.4g}" if figure else "" for figure in figures)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
