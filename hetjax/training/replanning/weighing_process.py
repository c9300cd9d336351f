# SPDX-License-Identifier: Apache-2.0
"""Weighs, in a separate process, another plan against the current one during a run.

Owns its request and its answer. Does not own the process (`layout/background.py`) nor
the weighing (`weighing.py`). Controllers start it (`python -m
hetjax.training.replanning.weighing_process`); it is not meant to be typed.
"""

import json
from contextlib import suppress

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.costs.certainty.beliefs import CredibleInterval
from hetjax.costs.slowness.known import Slowness, parse_slowness, slowness_json
from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import parse_plan, plan_json
from hetjax.training.layout.background import BackgroundProcess, answering
from hetjax.training.layout.planning_process import asked_of
from hetjax.training.replanning.weighing import Errors, Weighed, weigh
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import config_values


class WeighingProcess:
    """Weighs once; `found` returns the answer when it is there."""

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        current: Plan,
        slow: Slowness,
        errors: Errors,
        horizon_s: float,
    ) -> None:
        request = {
            "config": config_values(config),
            "cluster": cluster_toml(cluster),
            "current": plan_json(current),
            "slow": slowness_json(slow),
            "errors": dict(errors),
            "horizon_s": horizon_s,
        }
        self._process = BackgroundProcess(__name__, request, "weighing a plan")
        self.close = self._process.close

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def found(self) -> Weighed | None:
        """Return the other plan once there is one, else None, without waiting."""
        for answer in self._process.found():
            return Weighed(
                plan=parse_plan(answer["plan"]),
                gain=CredibleInterval(**answer["gain"]),
                present_s=answer["present_s"],
                other_s=answer["other_s"],
                move_s=answer["move_s"],
            )
        return None


def main() -> None:
    """Answer the request on standard input, with a line if there is a better plan."""
    with answering() as (request, answers), suppress(NoFeasiblePlan):
        config, model = asked_of(request)
        found = weigh(
            config,
            model,
            parse_cluster(request["cluster"]),
            parse_plan(request["current"]),
            parse_slowness(request["slow"]),
            request["errors"],
            request["horizon_s"],
        )
        if found is not None:
            gain = found.gain
            answer = {
                "plan": plan_json(found.plan),
                "gain": {"low": gain.low, "median": gain.median, "high": gain.high},
                "present_s": found.present_s,
                "other_s": found.other_s,
                "move_s": found.move_s,
            }
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
