# SPDX-License-Identifier: Apache-2.0
"""Describes a plan that was found, in rows of cells and in sentences.

Owns the words, figures and columns that the terminal and the report share. Does not own
how they are laid out (`found.py`, `html/plan_page.py`), nor the description of any
simulated plan (`step_rows.py`).
"""

from collections import defaultdict
from collections.abc import Iterator

from hetjax.cluster.catalogue import (
    Precision,
    best_precision,
    canonical_name,
    device_spec,
    native_precisions,
)
from hetjax.cluster.prices import Price, device_price
from hetjax.costs.utilization import seconds_at_peak
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.objectives import expected_goodput
from hetjax.planner.search.comparison import Planned
from hetjax.planner.search.find import Found
from hetjax.plans.plan import Plan
from hetjax.report.certainty import SAME, distinguishable, how_sure_lines, memory_lines
from hetjax.report.metrics import ms
from hetjax.report.plans.assumed_links import guess_lines, link_lines
from hetjax.report.plans.binding import binding, binding_line
from hetjax.report.plans.step_rows import Row
from hetjax.report.plans.worth_rows import idle_lines
from hetjax.report.prediction import (
    GIB,
    bound_line,
    h1f1b_line,
    headline,
)
from hetjax.schedule.predicted import Predicted

BASELINES: Row = ("planner", "step ms", "hetjax is", "devices", "fullest memory", "")
WISHES: Row = (
    "best by",
    "step ms",
    "tokens/s",
    "USD per M tokens",
    "USD per hour",
    "goodput",
    "devices",
    "gap",
)
CHANGES: Row = ("cluster", "step ms", "tokens/s", "change")


_LOOSE_GAP, _SMALL_MODEL_GAP, _LOW_MFU = 0.5, 0.1, 0.2
_DAYS_FROM_HOURS = 48
_ALIKE = "as fast"  # less than half a per cent apart
_WORTH_HALVING = 0.01  # of a step: a smaller gain is not worth rounding gradients


def sentences(planned: Planned) -> Iterator[str]:
    """Yield lines on the step besides its time."""
    yield from sure_lines(planned)
    yield from goodput_lines(planned)
    yield hours_line(planned)
    yield from search_lines(planned)
    yield binding_line(binding(planned.best))
    yield from idle_lines(planned)
    yield from dtype_lines(planned)
    yield from link_lines(planned.request.cluster)


def sure_lines(planned: Planned) -> Iterator[str]:
    """Yield lines on how sure the step time and the memory are."""
    yield from how_sure_lines(planned.certainty)
    yield from memory_lines(planned.best)


def warning_lines(planned: Planned) -> Iterator[str]:
    """Yield warnings: the plan may be poor, or some of its figures may be guesses."""
    gap, mfu = planned.found.gap, mfu_of(planned)
    if gap is not None and gap > _LOOSE_GAP:
        yield (
            f"warning: the gap to the lower bound is {gap:.0%}, so a much faster "
            f"plan may exist: {_why_gap(planned)}"
        )
    if mfu is not None and mfu < _LOW_MFU:
        yield (
            f"warning: the devices in use compute at {mfu:.1%} of their peak (MFU); "
            "see below for what binds"
        )
    yield from guess_lines(planned.request.cluster)


def _why_gap(planned: Planned) -> str:
    """Return why the gap is wide: the plan may be poor, or the bound too low.

    The planner's own model can tell, because it captures more of a plan than the bound.
    """
    found = planned.found
    if planned.objective.wish != "time":
        return "the plan was not chosen for speed alone"
    if planned.moved is not None:
        return "the plan was also chosen for the state that moves to it"
    if planned.objective.max_usd_per_hour is not None:
        return "the bound does not know the limit of cost, and counts all devices"
    if planned.cut_short:
        return "the search ended early; give it more time"
    model_gap, model_s = found.model_gap, found.model_time_s
    if model_gap is None or model_s is None:
        return "the planner's own model, which would show why, has proposed no plan"
    if found.best_h1f1b.simulation.step_time_s > model_s * (1 + _SMALL_MODEL_GAP):
        return "the plan is slower than the planner's own model expects"
    if model_gap <= _SMALL_MODEL_GAP:
        return (
            "the bound is probably too low: in the planner's own model the plan is "
            f"within {model_gap:.0%} of the best"
        )
    return (
        f"in the planner's own model, too, a plan up to {model_gap:.0%} faster may "
        "exist, but the search has not found it"
    )


def mfu_of(planned: Planned) -> float | None:
    """Return model FLOPs utilization of devices in use; None if a peak is unknown."""
    best, request = planned.best, planned.request
    at_peak_s = seconds_at_peak(best.plan, request.model, request.cluster)
    return None if at_peak_s is None else at_peak_s / best.simulation.step_time_s


def dtype_lines(planned: Planned) -> Iterator[str]:
    """Yield the kinds that the plan uses in a precision that they have no units for."""
    found: dict[tuple[Precision, Precision], set[str]] = defaultdict(set)
    for _, _, stage in planned.best.plan.stages():
        spec = device_spec(planned.request.cluster.node(stage.node))
        if stage.precision not in (None, "float32", *native_precisions(spec)):
            found[stage.precision, best_precision(spec)].add(spec.name)
    for (precision, best), kinds in sorted(found.items()):
        yield (
            f"{', '.join(sorted(kinds))}: no {precision} in hardware, estimated at "
            f"the rate of float32; {best} is faster there: plan and train with --dtype "
            "best"
        )


def _wire_lines(planned: Planned) -> Iterator[str]:
    """Yield the gain of sending gradients in fewer bytes, if it is large enough."""
    step_s, smaller_s = planned.best.simulation.step_time_s, planned.bfloat16_step_s
    if smaller_s is not None and smaller_s < step_s * (1 - _WORTH_HALVING):
        yield (
            f"with --gradient-wire bfloat16 this plan takes {ms(smaller_s)} ms, "
            f"{1 - smaller_s / step_s:.1%} less, but gradients are rounded on the way"
        )


def search_lines(planned: Planned) -> Iterator[str]:
    """Yield a plan's bound, gains, prices and source, and what the search left out."""
    found = planned.found
    yield bound_line(found)
    gained = h1f1b_line(found)
    if gained is not None:
        yield gained
    yield from _wire_lines(planned)
    yield from cost_lines(planned)
    model = ""
    if found.model_time_s is not None and found.model_gap is not None:
        in_model = f"{ms(found.model_time_s)} ms (model gap {found.model_gap:.1%}), "
        model = f"model time {in_model}"
    yield f"{model}from {found.source} in {found.search_s:.1f} s"
    if planned.left_out:
        yield f"no time was left for: {', '.join(planned.left_out)}"
    if planned.moved is not None:
        yield (
            "to switch to this plan, nodes fetch "
            f"{planned.moved.moved_bytes / GIB:.2f} GiB in {planned.moved.move_s:.1f} s"
        )


def cost_lines(planned: Planned) -> Iterator[str]:
    """Yield the bound on cost, if cost is the objective, and prices that change.

    These are the spot prices and electricity prices of the plan's nodes. With a price
    of electricity they include other prices of the catalogue, which take precedence.
    """
    found, request = planned.found, planned.request
    if planned.objective.wish == "cost":
        yield cost_bound_line(found)
    prices: dict[str, Price] = {}
    for node in request.cluster.nodes:
        price = device_price(node, request.usd_per_kwh)
        if price and node.name in found.best.plan.nodes:
            prices[f"{price.basis} price of {canonical_name(node.device)}"] = price
    for name, price in prices.items():
        if price.basis in ("spot", "electricity"):
            yield (
                f"{name}: {price.usd_per_hour:.4g} USD an hour for one device "
                f"({price.source})"
            )
        elif price.basis == "on demand" and request.usd_per_kwh is not None:
            yield (
                f"{name}: {price.usd_per_hour:.4g} USD an hour for one device "
                f"({price.source}), without regard to --usd-per-kwh; if the machine is "
                "yours, write price_per_hour = 0 into the cluster file"
            )


def cost_bound_line(found: Found) -> str:
    """Return the bound on cost in a line, or that there is none."""
    least, gap = found.least_usd, found.cost_gap
    if least is None or gap is None:
        return "no bound on cost is known"
    if gap < 0:
        return (
            f"internal error: the plan is cheaper than the bound on cost, {least:.3g} "
            "USD per million tokens, so the bound is false: please report it with "
            "model, cluster and options"
        )
    return (
        f"cost gap {gap:.1%}: no plan of these choices costs less than {least:.3g} USD "
        "per million tokens, the cost of computing alone with each layer where it is "
        "cheapest"
    )


def hours_line(planned: Planned) -> str:
    """Return the hours and the cost of the tokens requested, or of 10^9.

    Assumes that nothing is lost on the way.
    """
    best, tokens = planned.best, planned.objective.tokens or 1e9
    hours = tokens / best.tokens_per_s / 3600
    days = f" ({hours / 24:,.1f} days)" if hours >= _DAYS_FROM_HOURS else ""
    usd = best.usd_per_million_tokens
    cost = "" if usd is None else f", {usd * tokens / 1e6:,.2f} USD"
    return f"{tokens / 1e9:,.6g} billion tokens: {hours:,.2f} hours{days}{cost}"


def goodput_lines(planned: Planned) -> Iterator[str]:
    """Yield what remains of the speed while nodes are lost, if that was the wish."""
    if planned.objective.wish != "goodput":
        return
    share = expected_goodput(planned.best, planned.request.cluster, planned.objective)
    speed = share * planned.best.tokens_per_s
    yield (
        f"expected goodput {share:.2%}: {speed:,.0f} tokens/s while spot nodes come "
        "and go; the hours below assume that nothing is lost"
    )


def step_line(best: Predicted) -> str:
    """Return the step in one line, with its cost if that is known."""
    usd = best.usd_per_million_tokens
    cost = "" if usd is None else f", {usd:.3g} USD per million tokens"
    return headline(best) + cost


def planners(planned: Planned) -> list[tuple[str, Predicted | NoFeasiblePlan, str]]:
    """Return the planners to compare by name, each with its result and a comment.

    Our search continues from the plans of the others. If that helped, its result
    without them has a separate row.
    """
    if planned.baselines is None:
        return []
    ours, alone = planned.found, planned.alone
    rows: list[tuple[str, Predicted | NoFeasiblePlan, str]]
    rows = [("hetjax", ours.best, f"from {ours.source}")]
    if isinstance(alone, NoFeasiblePlan):
        rows.append(("hetjax alone", alone, "before it saw other planners' plans"))
    elif alone.best.plan != ours.best.plan and planned.moved is None:
        comment = f"from {alone.source}, before it saw other planners' plans"
        rows.append(("hetjax alone", alone.best, comment))
    for name, judged in planned.baselines.items():
        infeasible = isinstance(judged, NoFeasiblePlan)
        rows.append((name, judged, judged.got.partition(": ")[0] if infeasible else ""))
    return rows


def baseline_rows(planned: Planned) -> list[Row]:
    """Return a row per planner: how hetjax compares with it."""
    return [planner_row(planned, *found) for found in planners(planned)]


def planner_row(
    planned: Planned, name: str, judged: Predicted | NoFeasiblePlan, comment: str
) -> Row:
    """Return the row of a plan beside ours, under the header `BASELINES`."""
    if isinstance(judged, NoFeasiblePlan):
        return name, "no plan", "", "", "", comment
    step_s = judged.simulation.step_time_s
    change = _comparison(step_s / planned.best.simulation.step_time_s)
    if change != _ALIKE and not _surely_differs(planned, name):
        change = f"{change}, {SAME}"
    size = _size(judged)
    return name, ms(step_s), "" if name == "hetjax" else change, *size, comment


def _surely_differs(planned: Planned, name: str) -> bool:
    """Return whether ours is surely faster or slower; True if that was not computed."""
    other = planned.certainties.get(name)
    return other is None or distinguishable(other.ratio(planned.certainty))


def _comparison(ratio: float) -> str:
    """Return our speed against a plan whose step takes `ratio` times as long.

    >>> _comparison(1.36), _comparison(0.5), _comparison(1.0)
    ('1.36x as fast', '2.00x slower', 'as fast')
    """
    if abs(ratio - 1) < 0.005:
        return _ALIKE
    return f"{ratio:.2f}x as fast" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def wish_rows(planned: Planned) -> list[Row]:
    """Return a row per objective: its best plan, with all figures of that plan."""
    rows = []
    for found in planned.pareto:
        best, wish = found.best, found.objective.wish
        gap = found.cost_gap if wish == "cost" else found.gap
        share = expected_goodput(best, planned.request.cluster, found.objective)
        row = (
            wish,
            ms(best.simulation.step_time_s),
            f"{best.tokens_per_s:,.0f}",
            _figure(best.usd_per_million_tokens, ".3g"),
            _figure(best.usd_per_hour, ".2f"),
            f"{share:.2%}",
            str(num_devices(best.plan)),
            _figure(gap, ".1%"),
        )
        rows.append(row)
    return rows


def change_rows(planned: Planned) -> list[Row]:
    """Return a row per what-if cluster, compared with the first, the present one."""
    rows = []
    for name, best in planned.what_if.items():
        if best is None:
            rows.append((name, "no plan", "", ""))
            continue
        change = f"{best.tokens_per_s / planned.best.tokens_per_s - 1:+.1%}"
        if planned.objective.wish == "cost":
            change += _dearer(best, planned.best)
        speed = f"{best.tokens_per_s:,.0f}"
        rows.append((name, ms(best.simulation.step_time_s), speed, change))
    return rows


def _dearer(best: Predicted, than: Predicted) -> str:
    """Return how much more or less a token costs, if that is known."""
    usd, before = best.usd_per_million_tokens, than.usd_per_million_tokens
    if usd is None or not before or best is than:
        return ""
    change = usd / before - 1
    return f", {abs(change):.1%} {'dearer' if change > 0 else 'cheaper'}"


def num_devices(plan: Plan) -> int:
    """Return how many devices the plan uses."""
    return len(plan.used_devices())


def _size(best: Predicted) -> tuple[str, str]:
    """Return the number of devices in use, and how full the fullest is."""
    full = max(
        use.total_bytes / best.capacity_bytes[device]
        for device, use in best.memory.items()
    )
    return str(num_devices(best.plan)), f"{full:.1%}"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
