# SPDX-License-Identifier: Apache-2.0
"""How fast devices are, beside the figures that the model of time has for their kind.

Owns the named parameters of that model. Does not own their values: what is known before
a run (`costs/certainty/priors.py`), and what a run teaches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Factors on speeds; 1 is as modelled, 0.5 takes twice as long.

    `products` are matrix products, `attention` what a kernel computes it with, `memory`
    everything that memory bandwidth limits, updates included, `launches` what a kernel
    takes that does nothing. `links` are those between devices of a node, `network` is
    the hosts' cards. `layers` are times that a profile has measured: for these the
    first four do not count.
    """

    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    launches: float = 1.0
    links: float = 1.0
    network: float = 1.0
    layers: float = 1.0

    def __mul__(self, other: "Speeds") -> "Speeds":
        """Apply both.

        >>> (Speeds(memory=0.5) * Speeds(memory=0.5, links=2.0)).memory
        0.25
        """
        return Speeds(**{n: getattr(self, n) * getattr(other, n) for n in PARAMETERS})

    def scaled(self, factors: Mapping[str, float]) -> "Speeds":
        """Apply factors by name; others stay."""
        return self * Speeds(**factors)


PARAMETERS = tuple(field.name for field in fields(Speeds))
AS_MODELLED = Speeds()
