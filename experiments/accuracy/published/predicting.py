# SPDX-License-Identifier: Apache-2.0
"""Predicts a published run as the product does, with the prediction's sensitivities.

Owns the path of a user's prediction: `costs_of`, the programs, the simulator. Does not
own the rows (`rows.py`), nor the conclusions from errors (`fitting.py`).
"""

from dataclasses import dataclass, replace

from experiments.accuracy.published.rows import PublishedRun
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.speeds import Speeds
from hetjax.costs.certainty.elasticities import Elasticities, elasticities
from hetjax.costs.costs import Costs
from hetjax.costs.plan_costs import costs_of
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.memory import memory_uses
from hetjax.schedule.simulation.simulator import simulate
from hetjax.stage.partition import tied_holders

_NO_NETWORK = Speeds(links=1e6, network=1e6)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One run, its predicted seconds, and the elasticity of each parameter.

    `peak_bytes` is the predicted memory of the fullest device, where it was measured.
    """

    run: PublishedRun
    time_s: float
    elasticities: Elasticities
    peak_bytes: float | None = None


def predicted(run: PublishedRun) -> Predicted:
    """Predict a run with nothing but the catalogue."""
    cluster = run.cluster
    if run.hides_sums:
        cluster = _at(cluster, _NO_NETWORK)
    return Predicted(
        run=run,
        time_s=_time_s(run, cluster),
        elasticities=elasticities(lambda c: _time_s(run, c), cluster),
        peak_bytes=None if run.measured_bytes is None else _peak_bytes(run, cluster),
    )


def _at(cluster: Cluster, speeds: Speeds) -> Cluster:
    nodes = tuple(replace(node, speeds=speeds) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _costs(run: PublishedRun, cluster: Cluster) -> Costs:
    return costs_of(
        run.plan,
        run.model,
        cluster,
        dtype=run.dtype,
        attention=run.attention,
        halves=False,
    )


def _peak_bytes(run: PublishedRun, cluster: Cluster) -> float:
    programs = lower(run.plan, tied_holders(run.plan, run.model))
    uses = memory_uses(programs, run.plan, _costs(run, cluster)).values()
    return max(use.total_bytes for use in uses)


def _time_s(run: PublishedRun, cluster: Cluster) -> float:
    costs = _costs(run, cluster)
    if run.only_passes:
        return costs.times[0, 0].fused_s
    programs = lower(run.plan, tied_holders(run.plan, run.model))
    return simulate(programs, run.plan, costs).step_time_s
