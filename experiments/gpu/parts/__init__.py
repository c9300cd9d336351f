# SPDX-License-Identifier: Apache-2.0
"""Lists the parts of a session, each a module with `measure(setting)`, by worth."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """`limit_s` is its share of a session of `USUAL_S`; a longer session gives more."""

    title: str
    limit_s: float


USUAL_S = 420.0  # less than all parts need: the rest waits for another session
PARTS: Mapping[str, Part] = {
    "runs": Part(title="It runs", limit_s=45),
    "speed": Part(title="Speed beside one jit and beside PyTorch", limit_s=110),
    "priors": Part(title="What the card gives: products, attention, bytes", limit_s=90),
    "transports": Part(title="From process to process", limit_s=15),
    "memory": Part(title="Memory: predicted, compiled, measured", limit_s=75),
    "bits": Part(title="The same bits again", limit_s=100),
    "generation": Part(title="Generating text", limit_s=45),
    "methods": Part(title="LoRA, NF4, offload, float16, packing, resume", limit_s=85),
    "islands": Part(title="Two kinds in one job, and either one lost", limit_s=90),
    "unequal": Part(title="Two unequal cards made of one", limit_s=150),
}
