# SPDX-License-Identifier: Apache-2.0
"""Defines a stage's share in NORM: on its devices, on the host, and as bytes for peers.

Owns the form. Does not own the meaning (`commit.py`, `checks.py`) nor the transfer
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
# the number of digests that follow, each the number of a group and 64 bits
_SHARE, _DIGEST = struct.Struct("<IId??dI"), struct.Struct("<IQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShare:
    """A stage's share, still on its devices.

    `squares` is of the gradients of groups that the stage owns. `is_finite` and
    `digests` (arrays of uint32[N, 2], of the `groups`) are of the weights before the
    step.
    """

    squares: jax.Array
    is_finite: jax.Array
    groups: Sequence[Group] = ()
    digests: Sequence[jax.Array] = ()

    def read(self) -> "HostShare":
        """Return the share on the host; wait for the devices."""
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
    """A stage's share on the host."""

    squares: float
    is_finite: bool
    digests: Digests


def packed_shares(
    shares: Mapping[StageKey, HostShare],
    losses: Mapping[StageKey, float],
    numbers: Mapping[Group, int],
) -> bytes:
    """Return the shares of stages, and the losses of last stages, as bytes."""
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
    """Return the shares and losses of several workers, by stage.

    `groups` are in the order of their numbers.
    """
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
