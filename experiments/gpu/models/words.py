# SPDX-License-Identifier: Apache-2.0
"""Describes a plan in few words, for the note of a row."""

from hetjax.plans.plan import Plan


def in_words(plan: Plan) -> str:
    """Return each replica's microbatches and the layers of its stages."""
    return "; ".join(
        f"{replica.num_microbatches} x {replica.microbatch_size}: "
        + ", ".join(f"{s.node} {s.layers[0]}-{s.layers[1]}" for s in replica.stages)
        for replica in plan.replicas
    )
