# SPDX-License-Identifier: Apache-2.0
"""Decides whether pipelines fit into memory on the available devices, ignoring times.

Owns the count of devices that are needed to hold all layers. Stages are added from the
last to the first. With given devices and stages, holding more layers is always better,
since any part of these layers needs less memory. Does not own the times of pipelines
(`pricing.py`) nor advice on what would help (`search/infeasible.py`).

Letters of array names as in `model/problem.py`; T different amounts of the limits that
a stage can take.
"""

from collections.abc import Iterator
from math import ceil

import numpy as np

from hetjax.planner.model.problem import Ints, Problem

_MOST_STATES = 300_000  # combinations of devices; with more, devices are not counted


def fits(p: Problem) -> bool:
    """Return whether memory has room for the pipelines of any plan.

    If not, there is no plan. In every plan some replica computes at least the mean, so
    a pipeline that computes that much must fit. With too many devices to count, the
    test is weaker.
    """
    if one_fits_all(p):
        return True
    if p.one_replica and _is_counted(p):
        return False
    num_copies = 1 if p.one_replica else _most_copies(p)
    if not num_copies:
        return False
    sequences = ceil(p.global_batch / num_copies)
    return any(
        _holds(p, b, ceil(sequences / size))
        for b, size in enumerate(p.microbatch_sizes)
        if size <= p.global_batch
    )


def one_fits_all(p: Problem) -> bool:
    """Return whether one pipeline that computes the whole global batch fits.

    If so, there is a plan. False if there are too many devices to count.
    """
    return _is_counted(p) and any(
        _holds(p, b, p.global_batch // size)
        for b, size in enumerate(p.microbatch_sizes)
        if p.global_batch % size == 0
    )


def _most_copies(p: Problem) -> int:
    """Return the most copies that can fit into memory, however few microbatches they
    have."""
    num_devices = int(p.devices_C.sum())
    if not _is_counted(p):
        return num_devices
    needed = [
        int(np.argwhere(first_G == 0)[:, : len(p.classes)].sum(axis=1).min())
        for b in range(len(p.microbatch_sizes))
        for first_G in _first_held(p, b, 1)
        if not first_G.all()
    ]
    return num_devices // min(needed) if needed else 0


def _holds(p: Problem, b: int, num_microbatches: int) -> bool:
    """Return whether pipelines of some depth hold all layers at this size."""
    return any(not first_G.all() for first_G in _first_held(p, b, num_microbatches))


def _first_held(p: Problem, b: int, num_microbatches: int) -> Iterator[Ints]:
    """Yield, for 1, 2, ... stages, the earliest layer from which they hold all layers.

    The arrays are indexed by how much a pipeline may take of each limit.
    """
    room_R, taken_TR, kind_O = _stages(p)
    first_G = np.full(room_R + 1, p.num_layers)
    for depth in range(1, _deepest(p) + 1):
        first_TJ = _first_layers(p, b, min(depth, num_microbatches), kind_O)
        more_G = np.full_like(first_G, p.num_layers)
        for taken_R, first_J in zip(taken_TR, first_TJ, strict=True):
            if (taken_R <= room_R).all():
                after = first_G[tuple(slice(0, n) for n in room_R + 1 - taken_R)]
                begun = more_G[tuple(slice(n, None) for n in taken_R)]
                np.minimum(begun, first_J[after], out=begun)
        first_G = more_G
        yield first_G


def _first_layers(p: Problem, b: int, held: int, kind_O: Ints) -> Ints:
    """Return the first layer of the longest stage that ends at J, by what the stage
    takes; (T, J).

    J itself if not even one layer fits with so many microbatches in flight.
    """
    fits_OIJ = (p.most_in_flight_BOU[b][:, p.range_IJ] >= held) & (p.range_IJ >= 0)
    ends_J = np.arange(p.num_layers + 1)
    first_OJ = np.where(fits_OIJ.any(axis=1), fits_OIJ.argmax(axis=1), ends_J)
    return np.stack(
        [first_OJ[kind_O == t].min(axis=0) for t in range(kind_O.max() + 1)]
    )


def _stages(p: Problem) -> tuple[Ints, Ints, Ints]:
    """Return the room of each limit (at most what a pipeline can take), the different
    amounts that stages can take, and the index of each option's amounts."""
    taken_OR, room_R = p.taken_OR.astype(np.int64), _room(p)
    if not _is_counted(p):
        taken_OR, room_R = 0 * taken_OR[:, :1], 0 * room_R[:1]
    taken_TR, kind_O = np.unique(taken_OR, axis=0, return_inverse=True)
    return room_R, taken_TR, kind_O.reshape(-1)


def _is_counted(p: Problem) -> bool:
    return float((_room(p) + 1.0).prod()) <= _MOST_STATES


def _room(p: Problem) -> Ints:
    """Return the room of each limit, at most what the deepest pipeline takes."""
    return np.minimum(p.room_R, _deepest(p) * p.taken_OR.max(axis=0)).astype(np.int64)


def _deepest(p: Problem) -> int:
    return min(p.max_launch_ahead, p.num_layers, int(p.devices_C.sum()))
