# SPDX-License-Identifier: Apache-2.0
"""The least that a million tokens can cost, by computing alone.

Owns the bound on cost and its proof. Does not own prices (`cluster/prices.py`), nor who
is in the space that it is about (`certificate.py`).
"""

import numpy as np

from hetjax.cluster.prices import device_price_per_hour
from hetjax.planner.bound.completion import least_work
from hetjax.planner.model.problem import Floats, Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.terms import bound_problem, forward_and_split_s_BOK

_UNPRICED = 1e3  # times the dearest device: whatever it is, the bound holds


def least_usd_per_million_tokens(request: PlanRequest) -> float | None:
    """Return what no plan of known price in the request's space costs less than.

    None where that says nothing: no device has a price, some have one of 0 and can do
    all the work, or some layer fits nowhere.

    Proof. A step of T seconds on a set of nodes costs T times the sum of their prices
    per second, which is at least T times the sum of price_d over the devices d in use,
    a node's price being that of its devices. No device is busy for longer than the
    step, so that this is at least the sum over d of price_d times the seconds for which
    d computes. Every microbatch of B sequences goes through every layer in some stage,
    which takes all devices of the stage for at least the layer's least time there, its
    backward pass whole or split: over
    all layers it costs at least W_B, the sum over layers of the least of (seconds times
    price of the devices) over all ways to run the layer. The microbatches hold G
    sequences, so that a step costs at least G times the least of W_B / B over the sizes
    B, and has G times `seq_len` tokens. Hops, waiting, sums of gradients, updates and
    idle devices only add to that. Ways to run a layer on devices without a price are no
    part of such plans, so that any price for these leaves the bound true.
    """
    prices = [
        device_price_per_hour(nodes.nodes[0], request.usd_per_kwh)
        for nodes in request.classes
    ]
    dearest = max((price for price in prices if price is not None), default=0.0)
    if dearest == 0:
        return None
    price_C = np.array([_UNPRICED * dearest if p is None else p for p in prices])
    _, split_s_BOK, _ = forward_and_split_s_BOK(request, request.degrees)
    problem = bound_problem(request, request.degrees, busy_s_BOK=split_s_BOK)
    usd = _usd_per_sequence(problem, price_C)
    if not 0 < usd < np.inf:
        return None
    return usd / request.seq_len * 1e6


def _usd_per_sequence(p: Problem, price_C: Floats) -> float:
    """W_B / B of the proof, with these USD per hour of a device of each class."""
    price_R = np.concatenate([price_C / 3600, np.zeros(len(p.fragments))])
    return float((least_work(p, price_R) / np.array(p.microbatch_sizes)).min())
