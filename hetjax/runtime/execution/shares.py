# SPDX-License-Identifier: Apache-2.0
"""What a stage tells at NORM: on its devices, on the host, and as bytes for peers.

Owns the form. Does not own what it means (`commit.py`, `checks.py`) nor its way
(`gradient_sync.py`).
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax

from hetjax.mesh.multihost import value_here
from hetjax.plans.plan import Group, StageKey
from hetjax.runtime.execution.checking.checks import Digests
from hetjax.runtime.execution.checking.digests import whole

# replica, stage, squares, whether the weights are finite, whether last, its loss, and
# how many digests follow: the number of a group, and 64 bits
_SHARE, _DIGEST = struct.Struct("<IId??dI"), struct.Struct("<IQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShare:
    """What a stage tells, still on its devices.

    `squares` is of the gradients of groups that it owns, `is_finite` and `digests`
    (arrays of uint32[N, 2], of the `groups`) of the weights that the step began with.
    """

    squares: jax.Array
    is_finite: jax.Array
    groups: Sequence[Group] = ()
    digests: Sequence[jax.Array] = ()

    def read(self) -> "HostShare":
        """Wait for the devices."""
        arrays = self.squares, self.is_finite, *self.digests
        for array in arrays:
            array.copy_to_host_async()
        squares, is_finite, *digests = map(value_here, arrays)
        found = [digest for some in digests for digest in whole(some)]
        return HostShare(
            squares=float(squares),
            is_finite=bool(is_finite),
            digests=dict(zip(self.groups, found, strict=True)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """The same on the host."""

    squares: float
    is_finite: bool
    digests: Digests


def packed_shares(
    shares: Mapping[StageKey, HostShare],
    losses: Mapping[StageKey, float],
    numbers: Mapping[Group, int],
) -> bytes:
    """The shares of stages, with the losses of last stages among them, as bytes."""
    parts = list[bytes]()
    for stage, share in shares.items():
        is_last, digests = stage in losses, share.digests.items()
        own = share.squares, share.is_finite, is_last, losses.get(stage, 0.0)
        parts.append(_SHARE.pack(*stage, *own, len(digests)))
        parts += [_DIGEST.pack(numbers[group], digest) for group, digest in digests]
    return b"".join(parts)


def unpacked_shares(
    packed: Iterable[bytes], groups: Sequence[Group]
) -> tuple[dict[StageKey, HostShare], dict[StageKey, float]]:
    """What several workers have packed, by stage; `groups` in the order of numbers."""
    shares: dict[StageKey, HostShare] = {}
    losses: dict[StageKey, float] = {}
    for data in packed:
        at = 0
        while at < len(data):
            *stage, squares, is_finite, is_last, loss, count = _SHARE.unpack_from(
                data, at
            )
            start = at + _SHARE.size
            at = start + count * _DIGEST.size
            digests = _DIGEST.iter_unpack(data[start:at])
            shares[tuple(stage)] = HostShare(
                squares=squares,
                is_finite=is_finite,
                digests={groups[number]: digest for number, digest in digests},
            )
            if is_last:
                losses[tuple(stage)] = loss
    return shares, losses
