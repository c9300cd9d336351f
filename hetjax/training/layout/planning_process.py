# SPDX-License-Identifier: Apache-2.0
"""Plans, in a separate process, for clusters which a run may have next.

Owns its request and its answers. Does not own the process (`background.py`), which
clusters those are (`training/recovery/standby_plans.py`) nor how plans are made
(`plan_choice.py`). Controllers start it (`python -m
hetjax.training.layout.planning_process`); it is not meant to be typed.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.errors import NoFeasiblePlan
from hetjax.models.model import Model
from hetjax.models.named import TypedName
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import parse_plan, plan_json
from hetjax.training.layout.background import BackgroundProcess, answering
from hetjax.training.layout.plan_choice import next_plan, read_run_slowness
from hetjax.training.run_model import run_model
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import config_values, read_config


class Planning:
    """A process that plans for each of these clusters, in place of `current`."""

    def __init__(
        self, config: RunConfig, clusters: Sequence[Cluster], current: Plan
    ) -> None:
        self._clusters = clusters
        request = {
            "config": config_values(config),
            "clusters": [*map(cluster_toml, clusters)],
            "current": plan_json(current),
        }
        self._process = BackgroundProcess(__name__, request, "planning ahead")
        self.close = self._process.close

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def found(self) -> list[tuple[Cluster, Plan]]:
        """Return the plans since the last call, each with its cluster; do not wait."""
        answers = self._process.found()
        return [(self._clusters[n], parse_plan(text)) for n, text in answers]


def asked_of(request: Mapping[str, Any]) -> tuple[RunConfig, Model]:
    """Return the settings and the model of a request, which our own controller made."""
    config = read_config(request["config"], "settings")
    config = replace(config, model=TypedName(config.model))
    return config, run_model(config)


def main() -> None:
    """Answer the request on standard input, a line for each plan."""
    with answering() as (request, answers):
        config, model = asked_of(request)
        current, slow = parse_plan(request["current"]), read_run_slowness(config)
        for number, text in enumerate(request["clusters"]):
            with suppress(NoFeasiblePlan):  # then there is no plan to prepare
                plan = next_plan(config, model, parse_cluster(text), current, slow)
                print(json.dumps([number, plan_json(plan)]), file=answers, flush=True)


if __name__ == "__main__":
    main()
