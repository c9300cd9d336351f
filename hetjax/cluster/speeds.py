# SPDX-License-Identifier: Apache-2.0
"""Defines how fast devices are, relative to the time model's figures for their kind.

Owns the named parameters of that model. Does not own their values, which are the priors
(`costs/certainty/priors.py`) and what runs measure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Factors on speeds; 1 is as modelled, 0.5 takes twice as long.

    `products` are matrix products, `attention` is the attention kernel, `memory` is
    everything that memory bandwidth limits, including updates, and `launches` is the
    overhead of a kernel that does nothing. `links` are those between devices of a node,
    `network` is the hosts' network cards. `layers` are times measured by a profile; the
    first four do not apply to these.
    """

    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    launches: float = 1.0
    links: float = 1.0
    network: float = 1.0
    layers: float = 1.0

    def __mul__(self, other: "Speeds") -> "Speeds":
        """Return the speeds with both factors.

        >>> (Speeds(memory=0.5) * Speeds(memory=0.5, links=2.0)).memory
        0.25
        """
        return Speeds(**{n: getattr(self, n) * getattr(other, n) for n in PARAMETERS})

    def scaled(self, factors: Mapping[str, float]) -> "Speeds":
        """Return the speeds times factors by name; the other speeds stay."""
        return self * Speeds(**factors)


PARAMETERS = tuple(field.name for field in fields(Speeds))
AS_MODELLED = Speeds()
