# SPDX-License-Identifier: Apache-2.0
"""Validates a plan against the cluster and the model that it is for.

Owns one small check per rule, and their order: a check may rely on earlier checks.
Does not own the keys and types of the file (`plan_files.py`), memory or time
(`costs/`), nor whether a schedule can deadlock (`schedule/`).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from hetjax.cluster import ranges
from hetjax.cluster.catalogue import Precision
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.ranges import Range
from hetjax.errors import BadInput, counted_noun, did_you_mean
from hetjax.plans.plan import AttentionForm, Offload, Plan, Remat, Stage
from hetjax.plans.schedules import SCHEDULES

_SHARING = [name for name, schedule in SCHEDULES.items() if schedule.shares]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    plan: Plan
    nodes: Mapping[str, Node]
    num_layers: int
    tensor_sizes: Mapping[str, Collection[int]]
    max_seq_len: int

    def stages(self) -> Iterator[tuple[str, int, Stage]]:
        """Yield all stages as (place in the plan, replica index, stage)."""
        for r, s, stage in self.plan.stages():
            yield f"replicas[{r}].stages[{s}]", r, stage


def validate_plan(
    plan: Plan,
    cluster: Cluster,
    num_layers: int,
    tensor_sizes: Mapping[str, Collection[int]],
    max_seq_len: int,
) -> None:
    """Raise BadInput for the first rule that the plan breaks.

    `num_layers` counts the embedding and the head; `tensor_sizes` gives, for each
    logical axis that is split over `tensor`, its sizes in the model.
    """
    case = _Case(
        plan=plan,
        nodes={node.name: node for node in cluster.nodes},
        num_layers=num_layers,
        tensor_sizes=tensor_sizes,
        max_seq_len=max_seq_len,
    )
    for check in _CHECKS:
        for problem in check(case):
            raise problem


def _names(case: _Case) -> Iterator[BadInput]:
    if case.plan.schedule not in SCHEDULES:
        yield _unknown("schedule", case.plan.schedule, tuple(SCHEDULES))
    for where, _, stage in case.stages():
        if stage.node not in case.nodes:
            yield _unknown(f"{where}.node", stage.node, tuple(case.nodes))
        if stage.remat not in get_args(Remat):
            yield _unknown(f"{where}.remat", stage.remat, get_args(Remat))
        if stage.precision not in (None, *get_args(Precision)):
            said = str(stage.precision)
            yield _unknown(f"{where}.precision", said, get_args(Precision))
        if stage.attention not in (None, *get_args(AttentionForm)):
            attention = str(stage.attention)
            yield _unknown(f"{where}.attention", attention, get_args(AttentionForm))
        if stage.offload not in get_args(Offload):
            yield _unknown(f"{where}.offload", stage.offload, get_args(Offload))
    for node in case.plan.programs:
        if node not in case.nodes:
            yield _unknown("programs for node", node, tuple(case.nodes))


def _counts(case: _Case) -> Iterator[BadInput]:
    plan = case.plan
    lists: dict[str, Sized] = {"replicas": plan.replicas}
    counts: dict[str, tuple[int, Range]] = {
        "seq_len": (plan.seq_len, ranges.TOKENS),
        "global_batch": (plan.global_batch, ranges.SEQUENCES),
    }
    for r, replica in enumerate(plan.replicas):
        where = f"replicas[{r}]"
        lists[f"{where}.stages"] = replica.stages
        microbatches = replica.num_microbatches, ranges.COUNT
        counts[f"{where}.num_microbatches"] = microbatches
        counts[f"{where}.microbatch_size"] = replica.microbatch_size, ranges.SEQUENCES
    for where, _, stage in case.stages():
        lists[f"{where}.devices"] = stage.devices
        counts[f"{where}.mesh.data"] = stage.mesh.data, ranges.COUNT
        counts[f"{where}.mesh.tensor"] = stage.mesh.tensor, ranges.COUNT
        counts[f"{where}.launch_ahead"] = stage.launch_ahead, ranges.COUNT
    for where, entries in lists.items():
        if not entries:
            yield BadInput(
                got=f"{where} = []",
                allowed=f"{where} with 1 entry or more",
                fix=f"add an entry to {where}",
            )
    for where, (count, range_) in counts.items():
        if not range_.has(count):
            yield BadInput(
                got=f"{where} = {count}",
                allowed=range_.allowed(where),
                fix=f"write {where} as {'1 or more' if count < 1 else 'a lower value'}",
            )
    forwards = plan.num_forwards
    if forwards > ranges.MOST_FORWARDS:
        yield BadInput(
            got=f"{forwards} forwards in a step: num_microbatches x stages, summed "
            "over all replicas",
            allowed=f"at most {ranges.MOST_FORWARDS}",
            fix="use fewer and larger microbatches",
        )


def _seq_len(case: _Case) -> Iterator[BadInput]:
    if case.plan.seq_len > case.max_seq_len:
        yield BadInput(
            got=f"seq_len = {case.plan.seq_len}",
            allowed=f"seq_len <= {case.max_seq_len}, the model's max_seq_len",
            fix=f"write seq_len as {case.max_seq_len} or less",
        )


def _layer_ranges(case: _Case) -> Iterator[BadInput]:
    for where, _, stage in case.stages():
        lo, hi = stage.layers
        if not 0 <= lo < hi <= case.num_layers:
            yield BadInput(
                got=f"{where}.layers = [{lo}, {hi}]",
                allowed=f"[first, end] with 0 <= first < end <= {case.num_layers}, "
                "the model's number of layers",
                fix=f"write a range within [0, {case.num_layers}]",
            )


def _coverage(case: _Case) -> Iterator[BadInput]:
    allowed = f"stages that hold layers 0 to {case.num_layers - 1} once each, in order"
    for r, replica in enumerate(case.plan.replicas):
        held = 0
        for s, stage in enumerate(replica.stages):
            where = f"replicas[{r}].stages[{s}]"
            lo, hi = stage.layers
            fix = f"start {where}.layers at {held}"
            if lo > held:
                got = f"replicas[{r}] leaves out {_layers(held, lo)} before stages[{s}]"
                yield BadInput(got=got, allowed=allowed, fix=fix)
            if lo < held:
                again = _layers(lo, min(held, hi))
                got = f"{where} overlaps the stages before it in {again}"
                yield BadInput(got=got, allowed=allowed, fix=fix)
            held = hi
        if held < case.num_layers:
            yield BadInput(
                got=f"replicas[{r}] leaves out {_layers(held, case.num_layers)} "
                "after its last stage",
                allowed=allowed,
                fix=f"end the last stage's layers at {case.num_layers}",
            )


def _devices(case: _Case) -> Iterator[BadInput]:
    for where, _, stage in case.stages():
        count = case.nodes[stage.node].count
        for index in stage.devices:
            if not 0 <= index < count:
                yield BadInput(
                    got=f"{where}.devices has {index}, but node {stage.node!r} has "
                    f"{counted_noun(count, 'device')}",
                    allowed=f"device indices 0 to {count - 1} on {stage.node!r}",
                    fix="change the index, or give another --cluster",
                )


def _device_used_twice(case: _Case) -> Iterator[BadInput]:
    users: dict[tuple[str, int], tuple[str, int, Stage]] = {}
    sharing = case.plan.schedule in _SHARING
    for where, r, stage in case.stages():
        for i, index in enumerate(stage.devices):
            user, of, other = users.setdefault((stage.node, index), (where, r, stage))
            again = index in stage.devices[:i]
            same = of == r and other.devices == stage.devices
            if again or (user != where and not (sharing and same)):
                yield BadInput(
                    got=f"{where} uses device {index} of {stage.node!r}, which "
                    f"{where if again else user} uses already",
                    allowed="a device in one stage only"
                    + (
                        ", or in several stages of one replica with equal devices"
                        if sharing
                        else f" (schedules {' and '.join(_SHARING)} allow more)"
                    ),
                    fix=_free_devices(case, stage.node),
                )


def _mesh(case: _Case) -> Iterator[BadInput]:
    for where, _, stage in case.stages():
        data, tensor, count = stage.mesh.data, stage.mesh.tensor, len(stage.devices)
        if data * tensor != count:
            pairs = ", ".join(f"{count // t} x {t}" for t in _divisors(count))
            yield BadInput(
                got=f"{where}.mesh is data {data} x tensor {tensor} = "
                f"{data * tensor}, but the stage has {counted_noun(count, 'device')}",
                allowed=f"data x tensor: {pairs}",
                fix="change mesh or devices so that data x tensor = number of devices",
            )


def _offload(case: _Case) -> Iterator[BadInput]:
    for where, _, stage in case.stages():
        per_host = case.nodes[stage.node].devices_per_host
        hosts = {index // per_host for index in stage.devices}
        if stage.offload != "none" and len(hosts) > 1:
            yield BadInput(
                got=f"{where}.offload = {stage.offload!r}, but the stage is on "
                f"{len(hosts)} hosts",
                allowed="masters and optimizer state on the host of a stage whose "
                "devices share one host",
                fix="leave offload out, or give the stage devices of one host",
            )


def _tensor(case: _Case) -> Iterator[BadInput]:
    for where, _, stage in case.stages():
        where = f"{where}.mesh.tensor"
        yield from tensor_problems(stage.mesh.tensor, case.tensor_sizes, where=where)


def tensor_problems(
    tensor: int, tensor_sizes: Mapping[str, Collection[int]], *, where: str
) -> Iterator[BadInput]:
    """Yield a BadInput for each logical axis that the tensor degree does not divide."""
    every = math.gcd(*(size for sizes in tensor_sizes.values() for size in sizes))
    for logical, sizes in tensor_sizes.items():
        bad = sorted(size for size in sizes if size % tensor)
        if bad:
            yield BadInput(
                got=f"{where} = {tensor} does not divide {logical!r} of size "
                f"{', '.join(map(str, bad))}",
                allowed=f"tensor degrees {', '.join(map(str, _divisors(every)))}",
                fix=f"change {where} to one of these",
            )


def _batch(case: _Case) -> Iterator[BadInput]:
    for where, r, stage in case.stages():
        size, data = case.plan.replicas[r].microbatch_size, stage.mesh.data
        if size % data:
            yield BadInput(
                got=f"replicas[{r}].microbatch_size = {size} with "
                f"{where}.mesh.data = {data}",
                allowed=f"a multiple of {data}",
                fix=f"write microbatch_size as {size + -size % data}, or data as one "
                f"of {', '.join(map(str, _divisors(size)))}",
            )
    terms = [(r.num_microbatches, r.microbatch_size) for r in case.plan.replicas]
    total = sum(m * b for m, b in terms)
    if total != case.plan.global_batch:
        shown = " + ".join(f"{m} x {b}" for m, b in terms)
        yield BadInput(
            got=f"global_batch = {case.plan.global_batch}, but num_microbatches x "
            f"microbatch_size sum to {shown} = {total}",
            allowed="a sum over the replicas equal to global_batch",
            fix=f"write global_batch as {total}, or change num_microbatches",
        )


def _launch_ahead(case: _Case) -> Iterator[BadInput]:
    for r, replica in enumerate(case.plan.replicas):
        ahead = [stage.launch_ahead for stage in replica.stages]
        for s, (before, after) in enumerate(pairwise(ahead), start=1):
            if after > before:
                yield BadInput(
                    got=f"replicas[{r}].stages[{s}].launch_ahead = {after}, but "
                    f"the stage before it has {before}",
                    allowed="launch_ahead that does not rise along the pipeline",
                    fix=f"write {before} or less, or leave launch_ahead out of all "
                    "stages",
                )


_CHECKS = (
    _names,
    _counts,
    _seq_len,
    _layer_ranges,
    _coverage,
    _devices,
    _device_used_twice,
    _mesh,
    _offload,
    _tensor,
    _batch,
    _launch_ahead,
)


def _unknown(what: str, name: str, names: Collection[str]) -> BadInput:
    return BadInput(
        got=f"{what} = {name!r}",
        allowed=f"one of {', '.join(names)}",
        fix=did_you_mean(name, names),
    )


def _layers(lo: int, hi: int) -> str:
    return f"layer {lo}" if hi - lo == 1 else f"layers {lo} to {hi - 1}"


def _free_devices(case: _Case, node: str) -> str:
    used = {
        i for _, _, stage in case.stages() if stage.node == node for i in stage.devices
    }
    free = [str(i) for i in range(case.nodes[node].count) if i not in used]
    if not free:
        return f"use another node: all devices of {node!r} are in use"
    return f"use a free device of {node!r}: {', '.join(free)}"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
