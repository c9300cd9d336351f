# SPDX-License-Identifier: Apache-2.0
"""Small random planning problems, and their answers by full enumeration.

Owns an oracle that shares no code with the planner: it lists every pipeline, costs it
stage by stage from the terms, and tries every set of copies. Letters as in
`hetjax/planner/model/problem.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from random import Random

import numpy as np

from hetjax.planner.model.problem import (
    DeviceClass,
    LayerCosts,
    Option,
    Problem,
    problem,
)
from hetjax.planner.model.templates import Form, Template, TemplateStage

MICROBATCH_SIZES = (1, 2)

Used = tuple[int, ...]  # devices of each class


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A problem with the terms from which it was made."""

    terms: LayerCosts
    problem: Problem


def random_instance(seed: int) -> Instance:
    """Return a problem of few layers, devices and sequences."""
    r = Random(seed)
    num_kinds = r.randint(1, 3)
    kinds = tuple(r.randrange(num_kinds) for _ in range(r.randint(2, 4)))
    classes = [
        DeviceClass(name=f"c{n}", num_devices=r.randint(1, 4))
        for n in range(r.randint(1, 2))
    ]
    options = [
        Option(device_class=c, tensor=tensor)
        for c in range(len(classes))
        for tensor in (1, 2)[: r.randint(1, 2)]
    ]
    terms = _terms(r, kinds, options)
    return Instance(
        terms=terms,
        problem=problem(
            terms,
            classes=classes,
            options=options,
            microbatch_sizes=MICROBATCH_SIZES,
            global_batch=r.randint(4, 10),
        ),
    )


def unlike_speeds(seed: int) -> Instance:
    """Return a small model for three classes of speeds 1, 2, 4; 6 to 9 devices."""
    r = Random(seed)
    kinds = tuple(r.randrange(2) for _ in range(r.randint(2, 3)))
    classes = [
        DeviceClass(name=name, num_devices=r.randint(2, 3))
        for name in ("slow", "middle", "fast")
    ]
    options = [Option(device_class=c) for c in range(3)]
    terms = _terms(r, (*kinds, 1), options)
    slowness_O1 = np.array([[4.0], [2.0], [1.0]])
    terms = replace(terms, busy_s_BOK=terms.busy_s_BOK * slowness_O1)
    return Instance(
        terms=terms,
        problem=problem(
            terms,
            classes=classes,
            options=options,
            microbatch_sizes=MICROBATCH_SIZES,
            global_batch=r.randint(8, 16),
        ),
    )


def _terms(r: Random, kinds: tuple[int, ...], options: list[Option]) -> LayerCosts:
    num_kinds, num_sizes = max(kinds) + 1, len(MICROBATCH_SIZES)

    def table(*dims: int, most: float) -> np.ndarray:
        size = int(np.prod(dims))
        return np.array([r.uniform(0.0, most) for _ in range(size)]).reshape(dims)

    by_kind = num_sizes, len(options), num_kinds
    hops = num_sizes, num_kinds, len(options), len(options)
    tensor_O1 = np.array([[option.tensor] for option in options])
    slow = r.choice((0.0, 0.2, 1.0))
    blocking = r.choice((0.0, 0.3))
    link_s = table(*hops, most=slow)
    rate_O = table(len(options), most=1.0)
    busy_s_BOK = (0.1 + table(*by_kind, most=1.0)) / tensor_O1
    return LayerCosts(
        kinds=kinds,
        busy_s_BOK=busy_s_BOK,
        update_s_BOK=table(*by_kind, most=0.2),
        static_bytes_BOK=table(*by_kind, most=1.0) / tensor_O1,
        saved_bytes_BOK=2.0 * np.ones(by_kind) * table(num_sizes, 1, 1, most=1.0),
        memory_bytes_BO=table(num_sizes, len(options), most=9.0) + 1.0,
        sync_bytes_OK=table(len(options), num_kinds, most=1.0),
        sync_s=lambda o, size_bytes: rate_O[o] * np.sqrt(size_bytes),
        sync_exposed=r.choice(("largest", "first", "drained")),
        drain_s_BOK=busy_s_BOK * r.uniform(0.0, 1.0),
        stage_s_BO=table(num_sizes, len(options), most=0.1),
        message_bytes_BO=table(num_sizes, len(options), most=0.3),
        hop_s_BKOO=link_s * 1.2,
        link_s_BKOO=link_s,
        send_s_BKOO=table(*hops, most=blocking),
        return_s_BKOO=table(*hops, most=blocking),
        last_factor=r.choice((1.0, 2.0)),
        long_first_factor=r.choice((1.0, 2.0)),
        long_from=r.choice((2, 3)),
    )


def all_templates(p: Problem) -> Iterator[Template]:
    """Yield every pipeline that uses no more devices than there are."""
    layers = range(1, p.num_layers)
    for depth in range(1, p.num_layers + 1):
        for cuts in combinations(layers, depth - 1):
            bounds = (0, *cuts, p.num_layers)
            for options in product(range(len(p.options)), repeat=depth):
                if any(
                    used > c.num_devices
                    for used, c in zip(used_by(p, options), p.classes, strict=True)
                ):
                    continue
                stages = tuple(
                    TemplateStage(option=o, layers=(bounds[s], bounds[s + 1]))
                    for s, o in enumerate(options)
                )
                for size in p.microbatch_sizes:
                    yield Template(microbatch_size=size, stages=stages)


def used_by(p: Problem, options: tuple[int, ...]) -> Used:
    """Return how many devices of each class stages with these options take."""
    used = [0] * len(p.classes)
    for o in options:
        used[p.options[o].device_class] += p.options[o].tensor
    return tuple(used)


def time_s(instance: Instance, template: Template, m: int, form: Form) -> float:
    """Return the step time of a pipeline with m microbatches; inf if out of memory."""
    return sum(parts_s(instance, template, m, form))


def parts_s(
    instance: Instance, template: Template, m: int, form: Form
) -> tuple[float, float]:
    """Return the time without the gradient sum, and the sum's; inf out of memory."""
    t = instance.terms
    b = MICROBATCH_SIZES.index(template.microbatch_size)
    stages, depth = template.stages, len(template.stages)
    busy, update, sync, hop, link, drain = [], [], [], [], [], []
    for s, stage in enumerate(stages):
        o = stage.option
        layers = [t.kinds[n] for n in range(*stage.layers)]
        ahead = min(depth - s, m)
        held = sum(t.static_bytes_BOK[b, o, k] for k in layers)
        assert t.message_bytes_BO is not None and t.stage_s_BO is not None
        each = sum(t.saved_bytes_BOK[b, o, k] for k in layers)
        each = max(each + t.message_bytes_BO[b, o], 1.0)
        if held + ahead * each > t.memory_bytes_BO[b, o]:
            return inf, 0.0
        seconds = t.stage_s_BO[b, o] + sum(t.busy_s_BOK[b, o, k] for k in layers)
        update.append(sum(t.update_s_BOK[b, o, k] for k in layers))
        assert t.drain_s_BOK is not None
        drain.append(sum(t.drain_s_BOK[b, o, k] for k in layers))
        size = sum(t.sync_bytes_OK[o, k] for k in layers)
        sync.append(float(t.sync_s(o, np.array([size]))[0]))
        if s > 0:
            assert t.return_s_BKOO is not None
            kind = t.kinds[stage.layers[0] - 1]
            times = t.last_factor if s == depth - 1 else 1.0
            seconds += times * t.return_s_BKOO[b, kind, stages[s - 1].option, o]
        if s < depth - 1:
            assert t.send_s_BKOO is not None
            assert t.hop_s_BKOO is not None and t.link_s_BKOO is not None
            at = b, layers[-1], o, stages[s + 1].option
            long = s == 0 and depth >= t.long_from
            seconds += t.send_s_BKOO[at] * (t.long_first_factor if long else 1.0)
            hop.append(t.hop_s_BKOO[at])
            link.append(t.link_s_BKOO[at])
        busy.append(seconds)
    shown = {
        "first": sync[0],
        "largest": max(sync),
        "drained": max(sync[s] - sum(drain[:s]) for s in range(depth)),
    }
    sum_s = shown[t.sync_exposed]
    if form == "closed":
        slowest = max(busy + link)
        return sum(busy) + 2 * sum(hop) + (m - 1) * slowest + max(update), sum_s
    rest = 0.0
    for s in reversed(range(depth)):
        if s < depth - 1:
            rest = max(rest + 2 * hop[s], (m + 1) * link[s] if link[s] else 0.0)
        rest = max(m * busy[s], busy[s] + rest)
    return rest + max(update), sum_s


def best_step_s(instance: Instance, form: Form, *, apart: bool = False) -> float:
    """Return the least step time over all sets of copies; inf if there is none.

    If sums end for all at once, all wait for the longest sum, unless `apart`.
    """
    p, options = instance.problem, list(_options(instance, form))
    if apart or instance.terms.sync_exposed != "drained":
        return _least_s(p, [(done + after, u, n) for done, after, u, n in options])
    best_s = inf
    for longest_s in sorted({after for _, after, _, _ in options}):
        waiting = [
            (done + longest_s, u, n)
            for done, after, u, n in options
            if after <= longest_s and done + longest_s < best_s
        ]
        best_s = min(best_s, _least_s(p, waiting))
    return best_s


def _options(
    instance: Instance, form: Form
) -> Iterator[tuple[float, float, Used, int]]:
    """Yield times, devices and sequences of every possible copy."""
    p = instance.problem
    for t in all_templates(p):
        used = used_by(p, tuple(s.option for s in t.stages))
        for m in range(1, p.global_batch // t.microbatch_size + 1):
            done_s, after_s = parts_s(instance, t, m, form)
            if done_s < inf:
                yield done_s, after_s, used, m * t.microbatch_size


def _least_s(p: Problem, options: list[tuple[float, Used, int]]) -> float:
    times = sorted({seconds for seconds, _, _ in options})
    if not times or not _doing(p, {(u, n) for _, u, n in options}):
        return inf
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _doing(p, {(u, n) for s, u, n in options if s <= times[middle]}):
            high = middle
        else:
            low = middle + 1
    return times[low]


def uses_that_do(
    instance: Instance, form: Form, step_s: float, *, apart: bool = False
) -> set[Used]:
    """Return the devices of each class that sets of copies take to do the global batch.

    Only sets within the step time count. `apart` as in `best_step_s`.
    """
    p, options = instance.problem, list(_options(instance, form))
    if apart or instance.terms.sync_exposed != "drained":
        return _doing(p, {(u, n) for d, a, u, n in options if d + a <= step_s})
    sets = {
        frozenset((u, n) for d, a, u, n in options if a <= s and d + s <= step_s)
        for s in {after for _, after, _, _ in options}
    }
    return set().union(*(_doing(p, set(copies)) for copies in sets))


def _doing(p: Problem, copies: set[tuple[Used, int]]) -> set[Used]:
    """Return the devices that copies take; bit n of `done`: n sequences done."""
    there = [range(c.num_devices + 1) for c in p.classes]
    done = {used: 0 for used in product(*there)}
    done[(0,) * len(there)] = 1
    for used in product(*there):
        for of_copy, sequences in copies:
            before = tuple(u - c for u, c in zip(used, of_copy, strict=True))
            if min(before) >= 0:
                done[used] |= done[before] << sequences
    return {used for used, mask in done.items() if mask >> p.global_batch & 1}
