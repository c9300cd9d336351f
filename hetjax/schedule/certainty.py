# SPDX-License-Identifier: Apache-2.0
"""How sure a predicted step is: its interval, and what it rests on.

Owns the simulations at other speeds that an interval takes. Does not own the arithmetic
(`costs/certainty/`) nor the words (`report/`).
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from time import process_time

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, part_of
from hetjax.costs.certainty.beliefs import Beliefs, Interval, prior_beliefs
from hetjax.costs.certainty.elasticities import Elasticities, elasticities
from hetjax.costs.certainty.priors import NOISE, NOISE_OF_PROFILE, PROFILE, source
from hetjax.costs.costs import Costs
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulated import simulated

_LONG_S = 0.1  # of CPU for one prediction: with more, kinds are varied together

# the costs of the plan on the same machines at other speeds
CostsOn = Callable[[Cluster], Costs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Certainty:
    """The interval of a predicted step time; `basis` says what each kind rests on."""

    interval: Interval
    slopes: Elasticities
    beliefs: Beliefs
    basis: dict[str, str]

    def ratio(self, other: "Certainty") -> Interval:
        """Return the interval of this step time over another's, on the same cluster."""
        return self.beliefs.ratio(
            (self.interval.median, self.slopes),
            (other.interval.median, other.slopes),
        )


def certainty_of(
    predicted: Predicted,
    cluster: Cluster,
    costs_on: CostsOn,
    *,
    measured: Set[str] = frozenset(),
    beliefs: Beliefs | None = None,
) -> Certainty:
    """Return how sure a prediction is; `measured` are kinds of device in a profile.

    `costs_on` gives the costs of its plan on a cluster of the plan's nodes. Without
    `beliefs` those that hold before anything ran, of the whole cluster: so that plans
    on other nodes can be compared.
    """
    plan, tied = predicted.plan, predicted.tied
    used = part_of(cluster, plan.nodes)
    kinds = dict.fromkeys(canonical_name(node.device) for node in used.nodes)

    def predict(there: Cluster) -> float:
        return simulated(plan, costs_on(there), tied).step_time_s

    started_s = process_time()
    predict(used)
    is_long = process_time() - started_s > _LONG_S
    slopes = elasticities(predict, used, together=is_long and len(kinds) > 1)
    if beliefs is None:
        noise = NOISE_OF_PROFILE if measured >= kinds.keys() else NOISE
        beliefs = prior_beliefs(cluster, noise)
    return Certainty(
        interval=beliefs.interval(predicted.simulation.step_time_s, slopes),
        slopes=slopes,
        beliefs=beliefs,
        basis={kind: PROFILE if kind in measured else source(kind) for kind in kinds},
    )
