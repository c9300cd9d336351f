# SPDX-License-Identifier: Apache-2.0
"""Lists all baselines by name and compares their plans by simulation.

Owns the names, the schedule under which each is simulated, and the comparison. Does not
own how a baseline plans (its own file) nor the evaluation (`model/evaluator.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from hetjax.errors import BadInput, NoFeasiblePlan, did_you_mean
from hetjax.planner.baselines.autohet import autohet
from hetjax.planner.baselines.hapt import hapt
from hetjax.planner.baselines.stage_costs import no_plan
from hetjax.planner.baselines.symmetric import megatron, varuna
from hetjax.planner.baselines.uniform_search import uniform_search
from hetjax.planner.baselines.whale import whale
from hetjax.planner.model.evaluator import PlanEvaluator
from hetjax.planner.model.request import PlanRequest
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

_MOST_MEASURED = 6  # plans of a baseline that a user would run before choosing one


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A planner, its authors' name for it, and its publication.

    Its plans run under `schedule`, a name of `schedule/search.py`.
    """

    plans: Callable[[PlanRequest], list[Plan]]
    title: str
    paper: str
    schedule: str = "1f1b"


BASELINES: Mapping[str, Baseline] = {
    "megatron": Baseline(plans=megatron, title="Megatron-LM", paper="arXiv 2104.04473"),
    "whale": Baseline(plans=whale, title="Whale", paper="ATC 2022"),
    "hapt": Baseline(
        plans=hapt, title="Hapt/HARP", paper="arXiv 2509.24859", schedule="harp"
    ),
    "autohet": Baseline(
        plans=autohet, title="AutoHet", paper="arXiv 2512.20953, reconstructed"
    ),
    "varuna": Baseline(plans=varuna, title="Varuna", paper="arXiv 2111.04007"),
    "uniform-search": Baseline(
        plans=uniform_search, title="Sailor", paper="SOSP 2025, as we read it"
    ),
}


def compared(
    request: PlanRequest, names: Iterable[str] = tuple(BASELINES)
) -> dict[str, Predicted | NoFeasiblePlan]:
    """Return each baseline's best plan by simulation, or the error why it has none.

    Raises BadInput for an unknown name.
    """
    return {name: _best(request, name) for name in names}


def _best(request: PlanRequest, name: str) -> Predicted | NoFeasiblePlan:
    if name not in BASELINES:
        raise BadInput(
            got=f"baseline {name!r}",
            allowed=f"one of {', '.join(BASELINES)}",
            fix=did_you_mean(name, tuple(BASELINES)),
        )
    baseline = BASELINES[name]
    evaluate = PlanEvaluator(request, baseline.schedule)
    try:
        judged = map(evaluate, baseline.plans(request))
    except NoFeasiblePlan as error:
        return error
    # a plan over memory fails at once, so trying it costs nothing
    fitting = list(islice((p for p in judged if p is not None), _MOST_MEASURED))
    if not fitting:
        return no_plan(name, request)
    return min(fitting, key=lambda predicted: predicted.simulation.step_time_s)
