# SPDX-License-Identifier: Apache-2.0
"""The parts of a session, each a module with `measure(setting)`, in order of worth."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """`limit_s` is its share of a session of `USUAL_S`; a longer session has more."""

    title: str
    limit_s: float


USUAL_S = 420.0
PARTS: Mapping[str, Part] = {
    "runs": Part(title="It runs", limit_s=40),
    "speed": Part(title="Speed beside one jit and beside PyTorch", limit_s=120),
    "priors": Part(title="What the card gives: products, attention, bytes", limit_s=90),
    "memory": Part(title="Memory: predicted, compiled, measured", limit_s=40),
    "bits": Part(title="The same bits again", limit_s=30),
    "islands": Part(title="Two kinds in one job, and either one lost", limit_s=40),
    "unequal": Part(title="Two unequal cards made of one", limit_s=40),
    "methods": Part(title="LoRA, NF4, offload, float16, packing, resume", limit_s=40),
    "transports": Part(title="From process to process", limit_s=20),
    "generation": Part(title="Generating text", limit_s=30),
}
