# SPDX-License-Identifier: Apache-2.0
"""The cost tables that the planner works on: stages and hops, as plain arrays.

Owns the tables (`LayerCosts`, by kind of layer) and their form for the search
(`Problem`, by range of layers). Equal layers are one kind; ranges with equal kinds are
one row. Does not own where the numbers come from (`costs/`, or a published profile),
nor the costs of a whole pipeline (`templates.py`).

Letters of array names: B microbatch sizes, O options, K kinds of layers, L layers,
I and J first layer and end of a range (0 to L), U different ranges, A the terms after
the pipeline (gradient sum, update), C device classes, R limits on devices: of each
class, then of fragments. M meshes, F microbatches held (`meshes.py`), G groups of
meshes. In OO the option of the earlier stage comes first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.model.meshes import Meshes, fragment_limits, merged
from hetjax.planner.model.network_cuts import WorkLimit
from hetjax.plans.plan import Offload, Remat

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Exposed = Literal["largest", "first", "drained"]

_SCARCE = 17  # devices of a class; with more, one copy hardly meets the limit
_LEAST_SHARE_S = 1e-9  # gives equal shares to layers that all take no time
UNLIMITED = 2**30  # microbatches in flight where memory does not limit them


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClass:
    """Devices that the planner does not distinguish, and their number.

    Stages lie inside nodes of `devices_per_node` (0: anywhere).
    """

    name: str
    num_devices: int
    devices_per_node: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A way to run a stage: its devices, its mesh, and what it keeps where."""

    device_class: int
    tensor: int = 1
    data: int = 1
    remat: Remat = "none"
    offload: Offload = "none"

    @property
    def num_devices(self) -> int:
        return self.tensor * self.data


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCosts:
    """Costs by kind of layer; those of a stage are sums over its layers.

    `kinds` gives every layer's kind. `busy_s_BOK` is forward and backward of one
    microbatch; every stage adds `stage_s_BO`. NaN: no such option at this size.
    A stage's device holds `static_bytes_BOK` (`spared_bytes_BOK` less for its only
    layer of a kind) and, for every microbatch in flight, `saved_bytes_BOK` and (once
    per stage) `message_bytes_BO`; all must fit into `memory_bytes_BO`. With none in
    flight it holds `packed_bytes_OK` while gradients are packed, `updated_bytes` (by
    counts of kinds in ranges) while weights are updated, each within `device_bytes_O`.

    Messages after a layer of kind K: `hop_s_BKOO` is from the end of sending to
    arrival, one way, `link_s_BKOO` how long the link is held (both may be 0). Where
    messages keep stages busy, `send_s_BKOO` is the earlier stage's time for the
    activation, `return_s_BKOO` the later stage's for the gradient. In published costs
    `last_factor` multiplies the last stage's return, and `long_first_factor` the first
    stage's send if there are at least `long_from` stages.

    `sync_s` gives the seconds to sum an option's `sync_bytes_OK` over the replicas.
    `sync_exposed` says which sum comes after the pipeline: the `largest`, that of the
    `first` stage, or the largest after subtracting what is hidden (`drained`). While a
    stage sums, every earlier stage still has its last backward pass, `drain_s_BOK`.
    """

    kinds: tuple[int, ...]
    busy_s_BOK: Floats
    update_s_BOK: Floats
    static_bytes_BOK: Floats
    saved_bytes_BOK: Floats
    memory_bytes_BO: Floats
    sync_bytes_OK: Floats
    sync_s: Callable[[int, Floats], Floats]
    sync_exposed: Exposed = "largest"
    spared_bytes_BOK: Floats | None = None
    drain_s_BOK: Floats | None = None
    packed_bytes_OK: Floats | None = None
    device_bytes_O: Floats | None = None
    updated_bytes: Callable[[Floats], Floats] | None = None
    stage_s_BO: Floats | None = None
    message_bytes_BO: Floats | None = None
    hop_s_BKOO: Floats | None = None
    link_s_BKOO: Floats | None = None
    send_s_BKOO: Floats | None = None
    return_s_BKOO: Floats | None = None
    last_factor: float = 1.0
    long_first_factor: float = 1.0
    long_from: int = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A planning problem, with costs by range of layers.

    `range_IJ` is the row U of a range. `busy_s_BOU` includes `stage_s_BO`, the time
    that every stage adds. `most_in_flight_BOU` is how many microbatches fit into memory
    (0: not even the weights). `after_s_ABOU` are the terms after the pipeline has
    drained: the gradient sum, then the update. `exposed` says for each which counts:
    the largest over the stages, that of the first stage, or the largest of what
    `drain_s_BOU` of the earlier stages does not hide. `max_launch_ahead` limits
    launch-aheads and thereby the number of stages. With `one_replica` every pipeline
    computes the whole global batch. `work_limit` is an additional limit, if given.
    """

    classes: tuple[DeviceClass, ...]
    options: tuple[Option, ...]
    microbatch_sizes: tuple[int, ...]
    global_batch: int
    range_IJ: Ints
    kind_J: Ints
    busy_s_BOU: Floats
    stage_s_BO: Floats
    most_in_flight_BOU: Ints
    after_s_ABOU: Floats
    drain_s_BOU: Floats
    exposed: tuple[Exposed, ...]
    hop_s_BKOO: Floats
    link_s_BKOO: Floats
    send_s_BKOO: Floats
    return_s_BKOO: Floats
    last_factor: float
    long_first_factor: float
    long_from: int
    max_launch_ahead: int
    one_replica: bool = False
    work_limit: WorkLimit | None = None

    @property
    def num_layers(self) -> int:
        return len(self.range_IJ) - 1

    @cached_property
    def devices_C(self) -> Floats:
        """The number of devices of each class."""
        return np.array([c.num_devices for c in self.classes], dtype=np.float64)

    @cached_property
    def used_OC(self) -> Floats:
        """The devices of each class that a stage takes, by option."""
        used = np.zeros((len(self.options), len(self.classes)))
        for o, option in enumerate(self.options):
            used[o, option.device_class] = option.num_devices
        return used

    @cached_property
    def fragments(self) -> list[tuple[int, int, int]]:
        """The fragment limits: class, smallest size of stages, devices."""
        return [
            (c, size, room)
            for c, there in enumerate(self.classes)
            for size, room in fragment_limits(
                there.num_devices,
                there.devices_per_node,
                [o.num_devices for o in self.options if o.device_class == c],
            )
        ]

    @cached_property
    def room_R(self) -> Floats:
        """The capacity of every limit."""
        return np.array([*self.devices_C, *(room for _, _, room in self.fragments)])

    def room_at(self, step_s: float) -> Floats:
        """Return the capacity of every limit in a step, the limit on work last."""
        if self.work_limit is None:
            return self.room_R
        return np.append(self.room_R, self.work_limit.most_sequences(step_s))

    @cached_property
    def taken_OR(self) -> Floats:
        """What a stage takes of each limit, by option."""
        large_RO = [
            self.used_OC[:, c] * (self.used_OC[:, c] >= size)
            for c, size, _ in self.fragments
        ]
        return np.column_stack([self.used_OC, *large_RO])

    @cached_property
    def holds_all(self) -> bool:
        """Whether memory never limits how many microbatches are in flight."""
        most_BOU = self.most_in_flight_BOU
        return not ((most_BOU > 0) & (most_BOU < UNLIMITED)).any()

    @cached_property
    def hop_key_O(self) -> list[bytes]:
        """A key per option: equal if hops to and from the options cost the same."""
        tables = self.hop_s_BKOO, self.link_s_BKOO, self.send_s_BKOO, self.return_s_BKOO
        return [
            b"".join(
                side.tobytes()
                for table in tables
                for side in (table[:, :, o], table[:, :, :, o])
            )
            for o in range(len(self.options))
        ]

    @cached_property
    def meshes(self) -> Meshes:
        """The options, merged by mesh."""
        keys = [
            (*taken_R, self.hop_key_O[o], self.after_s_ABOU[:, :, o].tobytes())
            for o, taken_R in enumerate(self.taken_OR)
        ]
        most_held = 1 if self.holds_all else self.max_launch_ahead
        return merged(keys, self.busy_s_BOU, self.most_in_flight_BOU, most_held)

    @cached_property
    def members_GM(self) -> list[Ints]:
        """Groups of meshes with equal costs of hops to and from them."""
        groups: dict[bytes, list[int]] = {}
        for m, o in enumerate(self.meshes.first_M):
            groups.setdefault(self.hop_key_O[o], []).append(m)
        return [np.array(group) for group in groups.values()]

    @cached_property
    def has_sends(self) -> bool:
        """Whether messages keep stages busy."""
        return bool(self.send_s_BKOO.any() or self.return_s_BKOO.any())

    @cached_property
    def scarce(self) -> list[int]:
        """The limits that a single pipeline might exceed."""
        most = self.max_launch_ahead * max(o.num_devices for o in self.options)
        return [r for r, room in enumerate(self.room_R) if room < min(most, _SCARCE)]

    @cached_property
    def layer_s_BOL(self) -> Floats:
        """The seconds of a microbatch in each layer; inf if not even the layer fits."""
        layers = np.arange(self.num_layers)
        rows = self.range_IJ[layers, layers + 1]
        seconds_BOL = self.busy_s_BOU[:, :, rows] - self.stage_s_BO[:, :, None]
        fits_BOL = self.most_in_flight_BOU[:, :, rows] > 0
        return np.where(fits_BOL, seconds_BOL, np.inf)

    @cached_property
    def fastest_s_BJ(self) -> Floats:
        """The least seconds of a microbatch through layers 0 to J and back."""
        fastest_BL = self.layer_s_BOL.min(axis=1)
        start_B1 = np.zeros((len(fastest_BL), 1))
        return np.concatenate([start_B1, fastest_BL.cumsum(axis=1)], axis=1)

    @cached_property
    def least_after_s_AB(self) -> Floats:
        """A lower bound on the terms after any pipeline. It holds because some stage is
        the first, and some stage has the worst layer."""
        fits_BOU = self.most_in_flight_BOU > 0
        after_s_ABU = np.where(fits_BOU, self.after_s_ABOU, np.inf).min(axis=2)
        after_s_ABIJ = np.where(
            self.range_IJ >= 0, after_s_ABU[..., self.range_IJ], np.inf
        )
        first_s_AB = after_s_ABIJ[:, :, 0].min(axis=2)
        of_layer_s_LAB = [
            after_s_ABIJ[:, :, : at + 1, at + 1 :].min(axis=(2, 3))
            for at in range(self.num_layers)
        ]
        first_A1 = self.sure_of_first_A[:, None]
        return np.where(first_A1, first_s_AB, np.max(of_layer_s_LAB, axis=0))

    @cached_property
    def share_AJ(self) -> Floats:
        """The share of layers 0 to J in each term after the pipeline.

        The worst stage's term is at least the mean over the stages, weighted by their
        shares. The share is 0 where only the first stage's term surely counts.
        """
        layers = np.arange(self.num_layers)
        rows = self.range_IJ[layers, layers + 1]
        own_s_ABOL = np.nan_to_num(self.after_s_ABOU[..., rows], nan=np.inf)
        own_s_AL = own_s_ABOL.min(axis=(1, 2)) + _LEAST_SHARE_S
        share_AL = own_s_AL / own_s_AL.sum(axis=1, keepdims=True)
        share_AL[self.sure_of_first_A] = 0.0
        start_A1 = np.zeros((len(share_AL), 1))
        return np.concatenate([start_A1, share_AL.cumsum(axis=1)], axis=1)

    @cached_property
    def sure_of_first_A(self) -> NDArray[np.bool_]:
        """By term after the pipeline: whether only the first stage's surely counts."""
        return np.array([exposed != "largest" for exposed in self.exposed])

    @cached_property
    def is_drained_A(self) -> NDArray[np.bool_]:
        """By term after the pipeline: whether earlier stages hide part of it."""
        return np.array([exposed == "drained" for exposed in self.exposed])

    @cached_property
    def rates_C(self) -> Floats:
        """The most sequences per second that a device of each class could compute."""
        whole = self.range_IJ[0, -1]
        devices_O = self.used_OC.sum(axis=1)
        sizes_B1 = np.array(self.microbatch_sizes, dtype=np.float64)[:, None]
        rates_BO = sizes_B1 / self.busy_s_BOU[:, :, whole] / devices_O
        rates_O = np.nan_to_num(rates_BO, nan=0.0).max(axis=0)
        return ((self.used_OC > 0) * rates_O[:, None]).max(axis=0)


def problem(
    terms: LayerCosts,
    *,
    classes: Sequence[DeviceClass],
    options: Sequence[Option],
    microbatch_sizes: Sequence[int],
    global_batch: int,
    max_launch_ahead: int = 16,
    one_replica: bool = False,
) -> Problem:
    """Return the problem whose costs are the sums of `terms` over every range."""
    range_IJ, counts_KU = merged_ranges(terms.kinds)
    busy_s_BOU = terms.busy_s_BOK @ counts_KU
    exists_BOU = ~np.isnan(terms.busy_s_BOK).any(axis=2, keepdims=True)
    sync_OU = terms.sync_bytes_OK @ counts_KU
    sync_s_OU = np.stack([terms.sync_s(o, row) for o, row in enumerate(sync_OU)])
    update_s_BOU = terms.update_s_BOK @ counts_KU
    none_BO = np.zeros(busy_s_BOU.shape[:2])
    stage_s_BO = _given(terms.stage_s_BO, none_BO)
    message_bytes_BO = _given(terms.message_bytes_BO, none_BO)
    left_bytes_BOU = terms.memory_bytes_BO[:, :, None]
    left_bytes_BOU = left_bytes_BOU - terms.static_bytes_BOK @ counts_KU
    if terms.spared_bytes_BOK is not None:
        left_bytes_BOU += terms.spared_bytes_BOK @ (counts_KU == 1)
    saved_bytes_BOU = terms.saved_bytes_BOK @ counts_KU + message_bytes_BO[:, :, None]
    saved_bytes_BOU = np.maximum(saved_bytes_BOU, 1.0)
    if terms.packed_bytes_OK is not None and terms.device_bytes_O is not None:
        packed_bytes_OU = terms.packed_bytes_OK @ counts_KU
        spare_bytes_OU = terms.device_bytes_O[:, None] - packed_bytes_OU
        # the memory check lets packing use the room of one microbatch
        left_bytes_BOU = np.minimum(left_bytes_BOU, spare_bytes_OU + saved_bytes_BOU)
    if terms.updated_bytes is not None and terms.device_bytes_O is not None:
        fits_OU = terms.updated_bytes(counts_KU) <= terms.device_bytes_O[:, None]
        left_bytes_BOU = np.where(fits_OU, left_bytes_BOU, 0.0)
    in_flight_BOU = np.clip(left_bytes_BOU / saved_bytes_BOU, 0, UNLIMITED)
    nothing = np.zeros((len(microbatch_sizes), len(counts_KU), *2 * [len(options)]))
    return Problem(
        classes=tuple(classes),
        options=tuple(options),
        microbatch_sizes=tuple(microbatch_sizes),
        global_batch=global_batch,
        range_IJ=range_IJ,
        kind_J=np.array((0, *terms.kinds)),
        busy_s_BOU=np.where(exists_BOU, busy_s_BOU + stage_s_BO[:, :, None], np.nan),
        stage_s_BO=stage_s_BO,
        most_in_flight_BOU=np.where(exists_BOU, in_flight_BOU, 0).astype(np.int64),
        after_s_ABOU=np.stack(
            [np.broadcast_to(sync_s_OU, update_s_BOU.shape), update_s_BOU]
        ),
        drain_s_BOU=_given(terms.drain_s_BOK, 0 * terms.busy_s_BOK) @ counts_KU,
        exposed=(terms.sync_exposed, "largest"),
        hop_s_BKOO=_given(terms.hop_s_BKOO, nothing),
        link_s_BKOO=_given(terms.link_s_BKOO, nothing),
        send_s_BKOO=_given(terms.send_s_BKOO, nothing),
        return_s_BKOO=_given(terms.return_s_BKOO, nothing),
        last_factor=terms.last_factor,
        long_first_factor=terms.long_first_factor,
        long_from=terms.long_from,
        max_launch_ahead=max_launch_ahead,
        one_replica=one_replica,
    )


def merged_ranges(kinds: Sequence[int]) -> tuple[Ints, Floats]:
    """Return the row of every range, and how often each kind occurs in each row.

    Empty ranges have row -1.
    """
    num_layers = len(kinds)
    is_kind_LK = np.eye(max(kinds) + 1, dtype=np.int64)[list(kinds)]
    before_JK = np.concatenate([0 * is_kind_LK[:1], is_kind_LK.cumsum(axis=0)])
    starts, ends = np.triu_indices(num_layers + 1, k=1)
    counts_UK, rows = np.unique(
        before_JK[ends] - before_JK[starts], axis=0, return_inverse=True
    )
    range_IJ = np.full((num_layers + 1, num_layers + 1), -1)
    range_IJ[starts, ends] = rows.reshape(-1)
    return range_IJ, counts_UK.T.astype(np.float64)


def _given(table: Floats | None, nothing: Floats) -> Floats:
    return nothing if table is None else table
