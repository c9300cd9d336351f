# SPDX-License-Identifier: Apache-2.0
"""Lower bound on the cost of a million tokens, from computing alone.

Owns the bound on cost and its proof. Does not own prices (`cluster/prices.py`), nor the
space of plans that it covers (`certificate.py`).
"""

import numpy as np

from hetjax.cluster.prices import device_price_per_hour
from hetjax.planner.bound.completion import least_work
from hetjax.planner.model.problem import Floats, Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.terms import bound_problem, forward_and_split_s_BOK

_UNPRICED = 1e3  # times the dearest device; the bound holds for any value


def least_usd_per_million_tokens(request: PlanRequest) -> float | None:
    """Return a lower bound on the cost of plans of known price in the request's space.

    None if there is no useful bound: no device has a price, devices with price 0 can do
    all the work, or some layer fits nowhere.

    Proof. A step of T seconds on a set of nodes costs T times the sum of their prices
    per second. A node's price is that of its devices, so this is at least T times the
    sum of price_d over the devices d in use. No device is busy for longer than the
    step, so this is at least the sum over d of price_d times the seconds for which d
    computes. Every microbatch of B sequences passes every layer in some stage. That
    takes all devices of the stage for at least the layer's least time there, whether
    its backward pass is whole or split. So over all layers it costs at least W_B, the
    sum over layers of the least of (seconds times price of the devices) over all ways
    to run the layer. The microbatches hold G sequences, so a step costs at least G
    times the least of W_B / B over the sizes B. It has G times `seq_len` tokens. Hops,
    waiting, sums of gradients, updates and idle devices only add to that. Plans of
    known price use no devices without a price, so the bound holds whatever price those
    are given.
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
    """Return the least W_B / B of the proof, for USD per device-hour of each class."""
    price_R = np.concatenate([price_C / 3600, np.zeros(len(p.fragments))])
    return float((least_work(p, price_R) / np.array(p.microbatch_sizes)).min())
