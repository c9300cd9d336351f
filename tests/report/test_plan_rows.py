# SPDX-License-Identifier: Apache-2.0
"""What is reported of a found plan: what binds, memory bars, large plans folded."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.catalogue import Precision
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.memory_budget import plan_bytes
from hetjax.costs.graph.flops import forward_flops
from hetjax.costs.measured.layer_profile import Measurement, Profile
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.costing import times_from
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.comparison import Planned
from hetjax.planner.search.find import Found
from hetjax.planner.search.idle import Idle
from hetjax.planner.search.worth import Instead, Worth
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.precision import with_precisions
from hetjax.report.found import FoundPlan, bar_letters
from hetjax.report.html.plan_page import plan_page
from hetjax.report.html.timeline_view import shown_replicas, timeline_view
from hetjax.report.metrics import ms
from hetjax.report.plans.binding import binding, binding_line
from hetjax.report.plans.plan_rows import (
    baseline_rows,
    dtype_lines,
    hours_line,
    num_devices,
    sentences,
    warning_lines,
)
from hetjax.report.plans.step_rows import MemoryBar, memory_bars, stage_rows
from hetjax.report.plans.worth_rows import idle_lines, part_notes, part_rows
from hetjax.schedule.bound import LowerBound
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.memory import MemoryUse
from tests.report.html_page import Page
from tests.training.small import MODEL, stage

EAST, WEST = "east-0", "west-0"
ACTIVATION_BYTES = 16 * 16 * 4  # one sequence: positions, width, float32


def cluster(gbit_per_s: float, memory_gib: float = 80.0) -> Cluster:
    return Cluster(
        name="c",
        nodes=(
            Node(name=EAST, device="H20", count=2, memory_gib=memory_gib),
            Node(name=WEST, device="H20", count=1, memory_gib=memory_gib),
        ),
        links=(Link(between=(EAST, WEST), bandwidth_gbit_per_s=gbit_per_s),),
    )


def profile(seconds: float) -> Profile:
    """Return half the seconds forward and half backward in each half of the model."""
    measured = [
        Measurement(
            device="H20",
            kind=kind,
            tensor=1,
            microbatch_size=1,
            forward_s=seconds * share / 2,
            backward_s=seconds * share / 2,
            update_s=0.0,
        )
        for kind, share in (("embedding", 0.25), ("block", 0.75), ("head", 0.25))
    ]
    return Profile(
        model="small",
        seq_len=16,
        dtype="float32",
        layers=("embedding", "block", "block", "head"),
        measurements=tuple(measured),
    )


def two_stages(num_microbatches: int) -> Plan:
    stages = stage(EAST, (0,), (0, 2), 2), stage(WEST, (0,), (2, 4), 1)
    replica = Replica(
        num_microbatches=num_microbatches, microbatch_size=1, stages=stages
    )
    return Plan(
        model="small", seq_len=16, global_batch=num_microbatches, replicas=(replica,)
    )


def predicted(of: Cluster, plan: Plan, seconds: float = 1.0) -> Predicted:
    request = request_of(of, plan, seconds)
    return evaluate_plan(request, plan, "1f1b")


def request_of(of: Cluster, plan: Plan, seconds: float = 1.0) -> PlanRequest:
    return PlanRequest(
        model=MODEL,
        cluster=of,
        seq_len=16,
        global_batch=plan.global_batch,
        dtype="float32",
        profile=profile(seconds),
    )


def planned(of: Cluster, plan: Plan) -> Planned:
    request = request_of(of, plan)
    best, bound = predicted(of, plan), LowerBound(why="a test")
    found = Found(
        request=request,
        objective=Objective(),
        best=best,
        source="a test",
        bound=bound,
        best_h1f1b=best,
        whole_bound=bound,
        model_time_s=None,
        model_bound_s=None,
        search_s=0.5,
    )
    return Planned(request=request, objective=found.objective, found=found, alone=found)


def test_busy_devices_bind():
    found = binding(predicted(cluster(1e6), two_stages(9)))
    # (S - 1 + M)(F + B) for S = 2 equal stages, each busy for M
    assert found.busy_share == pytest.approx(9 / 10, rel=1e-3)
    assert found.what == "compute" and found.busiest in (f"{EAST}/0", f"{WEST}/0")
    assert binding_line(found).startswith("compute binds: ")


def test_a_slow_link_binds():
    # two seconds a message: the link carries 16 each way in hardly more
    found = binding(predicted(cluster(ACTIVATION_BYTES * 8 / 1e9 / 2), two_stages(16)))
    assert found.what == "link" and found.link in (f"{EAST}>{WEST}", f"{WEST}>{EAST}")
    step_s = predicted(
        cluster(ACTIVATION_BYTES * 8 / 1e9 / 2), two_stages(16)
    ).simulation.step_time_s
    assert found.link_share == pytest.approx(16 * 2 / step_s, rel=1e-3)
    assert binding_line(found).startswith(f"a link binds: link {found.link} carries")


def test_who_waits_for_messages_on_links_that_are_far_from_full_is_told_so():
    found = replace(
        binding(predicted(cluster(1e6), two_stages(9))),
        busy_share=0.6,
        waiting_share=0.3,
        link_share=0.11,
    )
    assert found.what == "messages"
    assert binding_line(found).startswith("waiting for messages binds, though no link")


def test_few_microbatches_leave_pipelines_to_fill_and_drain():
    found = binding(predicted(cluster(1e6), two_stages(1)))
    assert found.what == "fill" and found.busy_share == pytest.approx(1 / 2, rel=1e-3)


def test_devices_that_are_nearly_full_are_counted():
    plan = two_stages(4)
    uses = predicted(cluster(1e6), plan).memory
    most = max(use.total_bytes for use in uses.values())
    full = [d for d, use in uses.items() if use.total_bytes > 0.95 * most * 1.01]
    gib = most * 1.01 / plan_bytes("H20", 1.0)
    found = binding(predicted(cluster(1e6, gib), plan))
    assert set(found.tight_devices) == set(full)
    assert f"{len(full)} of 2 devices are within 5 %" in binding_line(found)


def test_what_is_idle_and_where_a_plan_is_from_is_said():
    told = planned(cluster(1e6), two_stages(4))
    best = told.best
    twice = replace(best.simulation, step_time_s=1.25 * best.simulation.step_time_s)
    idle = Idle(
        node_class="H20",
        devices={EAST: (1,)},
        instead=replace(best, simulation=twice),
        worse=0.25,
    )
    (line,) = idle_lines(replace(told, idle=(idle,)))
    assert line == (
        f"not worth using: {EAST}/1 (1 of 3 devices): the best plan found with more of "
        f"H20 has a step of {ms(twice.step_time_s)} ms, 25.0% longer"
    )
    (line,) = idle_lines(replace(told, idle=(replace(idle, instead=None),)))
    assert line.endswith("no plan with more of H20 was found that fits")
    limited = replace(told.objective, max_usd_per_hour=1.0)
    (line,) = idle_lines(
        replace(told, objective=limited, idle=(replace(idle, instead=None),))
    )
    assert line.endswith("with more of H20 was found that is within your limits")
    early = replace(idle, instead=None, is_searched=False)
    (line,) = idle_lines(replace(told, idle=(early,)))
    assert line == (
        f"not used: {EAST}/1 (1 of 3 devices): no plan with more of H20 was found that "
        "fits before the search ended"
    )
    assert "from a test in 0.5 s" in list(sentences(told))
    assert FoundPlan(told).values()["lower_bound_s"] is None


def test_what_parts_are_worth_is_a_table_with_notes():
    told = planned(cluster(1e6), two_stages(4))
    best = told.best
    twice = replace(best.simulation, step_time_s=1.25 * best.simulation.step_time_s)
    slower = Instead(
        predicted=replace(best, simulation=twice), worse=0.25, is_searched=True
    )
    part = Worth(part="H20", num_devices=3, num_used=2, without=slower, alone=slower)
    cell = f"{ms(twice.step_time_s)} ms (25.0% longer)"
    searched = replace(told, parts=(part,))
    assert part_rows(searched) == [("H20", "3", "2", cell, cell)]
    assert part_notes(searched) == []
    quick = replace(slower, is_searched=False)
    looked = replace(told, parts=(replace(part, without=None, alone=quick),))
    assert part_rows(looked) == [("H20", "3", "2", "none near", f"~{cell}")]
    notes = part_notes(looked)
    assert [note.partition(":")[0] for note in notes] == ["~", "none near"]
    hasty = replace(looked, cut_short=True)
    assert part_rows(hasty) == [("H20", "3", "2", "unknown", f"~{cell}")]
    notes_of_hasty = part_notes(hasty)
    assert [note.partition(":")[0] for note in notes_of_hasty] == ["~", "unknown"]
    lines = str(FoundPlan(looked)).splitlines()
    header = next(n for n, line in enumerate(lines) if line.startswith("part "))
    assert lines[header + 2 : header + 4] == notes
    page = Page(plan_page(looked))
    assert "What each part is worth" in " ".join(page.words)
    (value,) = FoundPlan(looked).values()["parts"]
    assert (value["part"], value["without"]) == ("H20", None)
    assert (value["alone"]["worse"], value["alone"]["searched"]) == (0.25, False)
    other = replace(best, plan=two_stages(5))
    whole = replace(searched.found, best_h1f1b=replace(other, simulation=twice))
    (note,) = part_notes(replace(searched, found=whole))
    told_ms = f"{ms(twice.step_time_s)} ms"
    assert note == f"all of these use h1f1b; the best plan under h1f1b has {told_ms}"


@pytest.mark.parametrize(
    ("tokens", "words"), [(None, "1 billion tokens: "), (3e11, "300 billion tokens: ")]
)
def test_it_is_said_how_long_tokens_take_and_what_they_cost(
    tokens: float | None, words: str
):
    told = planned(cluster(1e6), two_stages(4))
    told = replace(told, objective=Objective(tokens=tokens))
    priced = replace(told.best, usd_per_hour=2.0)
    told = replace(told, found=replace(told.found, best=priced))
    hours = (tokens or 1e9) / (4 * 16 / priced.simulation.step_time_s) / 3600
    line = hours_line(told)
    assert line.startswith(f"{words}{hours:,.2f} hours ({hours / 24:,.1f} days)")
    assert line.endswith(f", {2.0 * hours:,.2f} USD")


def test_a_wide_gap_says_whether_the_bound_or_the_search_is_to_blame():
    told = planned(cluster(1e6), two_stages(4))
    bound = replace(told.found.bound, step_s=told.best.simulation.step_time_s / 2)

    def warned(
        model_bound_s: float,
        *,
        cut_short: bool = False,
        model_times: float = 1.0,
        wish: Wish = "time",
    ) -> str:
        model_s = model_times * told.best.simulation.step_time_s
        found = replace(told.found, bound=bound, model_time_s=model_s)
        found = replace(found, model_bound_s=model_bound_s * model_s)
        changed = replace(told, found=found, cut_short=cut_short)
        changed = replace(changed, objective=Objective(wish=wish))
        return next(line for line in warning_lines(changed) if "gap" in line)

    assert "the bound is probably too low" in warned(1 / 1.05)
    assert "up to 50% faster" in warned(1 / 1.5)
    assert "the search ended early" in warned(1 / 1.05, cut_short=True)
    assert "slower than the planner's own model" in warned(1 / 1.05, model_times=0.8)
    assert "not chosen for speed" in warned(1 / 1.05, wish="cost")


def test_baselines_without_a_plan_say_why_not():
    told = planned(cluster(1e6), two_stages(4))
    twice = predicted(cluster(1e6), two_stages(4), seconds=2.0)
    nothing = NoFeasiblePlan(got="device 'x' is full: of sand", allowed="a", fix="b")
    told = replace(told, baselines={"slow": twice, "none": nothing})
    ours, slow, none = baseline_rows(told)
    assert ours[0] == "hetjax" and slow[2] == "2.00x as fast"
    assert none == ("none", "no plan", "", "", "", "device 'x' is full")
    assert FoundPlan(told).values()["baselines"]["none"]["why"].endswith("of sand")


PARTS = st.tuples(*(st.integers(0, 10**12) for _ in range(4)))


@given(PARTS, st.floats(1.0, 3.0), st.integers(8, 60))
def test_a_bar_is_as_wide_as_asked_and_every_part_as_its_share(
    parts: tuple[int, int, int, int], room: float, width: int
):
    static, residual, activation, workspace = parts
    use = MemoryUse(
        static_bytes=static,
        residual_bytes=residual,
        activation_bytes=activation,
        pass_bytes=workspace,
        in_flight=1,
    )
    capacity = max(use.total_bytes * room, 1.0)
    bar = MemoryBar(kind="k", lanes=(("n", (0,)),), use=use, capacity_bytes=capacity)
    text = bar_letters(bar, width)
    assert len(text) == width
    assert text == "".join(sorted(text, key="#=+-.".index))
    for letter, size in zip("#=+-", parts, strict=True):
        assert abs(text.count(letter) - width * size / capacity) <= 1
    assert "of" in bar.label


def test_memory_that_nobody_knows_is_told_without_a_limit():
    use = MemoryUse(
        static_bytes=2**30,
        residual_bytes=0,
        activation_bytes=0,
        pass_bytes=0,
        in_flight=1,
    )
    bar = MemoryBar(kind="k", lanes=(("n", (0, 1)),), use=use, capacity_bytes=math.inf)
    assert bar.label == "1.00 GiB" and bar_letters(bar, 4) == "####"
    assert bar.name == "n/0,1"


def test_large_plans_are_told_by_what_repeats():
    nodes = tuple(Node(name=f"h-{i}", device="H20", count=1) for i in range(70))
    replicas = [
        Replica(
            num_microbatches=2 if i else 3,
            microbatch_size=1,
            stages=(Stage(node=f"h-{i}", devices=(0,), layers=(0, 4), launch_ahead=1),),
        )
        for i in range(70)
    ]
    plan = Plan(model="small", seq_len=16, global_batch=141, replicas=tuple(replicas))
    told = planned(Cluster(name="many", nodes=nodes), plan)
    first, others = stage_rows(told.best, told.request.cluster)
    assert (first[0], others[0]) == ("0", "1 and 68 like it")
    bars = memory_bars(told.best, told.request.cluster)
    assert sum(len(bar.lanes) for bar in bars) == 70
    assert len(bars) <= 2
    assert shown_replicas(plan, told.request.cluster) == [0, 1]
    assert timeline_view(told.best, told.request.cluster).notes == (
        "drawn: 2 of 70 replicas",
        "r2..69 are like r1",
    )
    assert len(str(FoundPlan(told)).splitlines()) <= 20


def test_replicas_that_are_drawn_stand_for_none_that_are_unlike_them():
    nodes = tuple(Node(name=f"h-{i}", device="H20", count=1) for i in range(60))
    replicas = [
        Replica(
            num_microbatches=i + 1,
            microbatch_size=1,
            stages=(Stage(node=f"h-{i}", devices=(0,), layers=(0, 4), launch_ahead=1),),
        )
        for i in range(60)
    ]
    batch = sum(replica.num_microbatches for replica in replicas)
    plan = Plan(model="small", seq_len=16, global_batch=batch, replicas=(*replicas,))
    told = planned(Cluster(name="many", nodes=nodes), plan)
    shown = shown_replicas(plan, told.request.cluster)
    assert 1 < len(shown) < 60
    assert timeline_view(told.best, told.request.cluster).notes[:2] == (
        f"drawn: {len(shown)} of 60 replicas",
        f"r{len(shown)}..59 are different and not drawn",
    )


def test_what_was_found_without_the_plans_of_others_is_told_beside_what_came_of_them():
    told = planned(cluster(1e6), two_stages(4))
    slower = planned(cluster(1e6), two_stages(8)).found
    others = {"varuna": told.best}
    assert [row[0] for row in baseline_rows(told)] == []
    same = replace(told, baselines=others)
    assert [row[0] for row in baseline_rows(same)] == ["hetjax", "varuna"]
    helped = replace(same, alone=slower, found=replace(told.found, source="varuna"))
    ours, alone, varuna = baseline_rows(helped)
    assert (ours[0], ours[-1]) == ("hetjax", "from varuna")
    assert alone[0] == "hetjax alone" and "before it saw" in alone[-1]
    assert float(alone[2].removesuffix("x as fast")) > 1.0
    assert varuna[2] == "as fast"
    faster = replace(same, found=slower, alone=slower)
    ratio = slower.best.simulation.step_time_s / told.best.simulation.step_time_s
    assert baseline_rows(faster)[1][2] == f"{ratio:.2f}x slower"


def test_what_a_reader_must_know_first_is_said_first():
    told = planned(cluster(1e6), two_stages(4))
    step_s = told.best.simulation.step_time_s
    request = told.request

    def warned(*, bound_s: float, peak_tflops: float) -> list[str]:
        nodes = tuple(
            replace(node, peak_tflops=peak_tflops) for node in request.cluster.nodes
        )
        of = replace(request, cluster=replace(request.cluster, nodes=nodes))
        bound = replace(told.found.bound, step_s=bound_s)
        found = replace(told.found, bound=bound)
        changed = replace(told, request=of, found=found)
        lines = list(warning_lines(changed))
        text = str(FoundPlan(changed)).splitlines()
        assert text[2 : 2 + len(lines)] == lines  # above tables and sentences
        page = Page(plan_page(changed))
        red = [p for p in page.all("p") if "warning" in p.attributes.get("class", "")]
        assert len(red) == len(lines)
        return lines

    flops = 3 * sum(forward_flops(request.model, 16)) * request.global_batch
    peak_of_mfu_1 = flops / step_s / 1e12 / num_devices(told.best.plan)
    good = warned(bound_s=step_s / 1.49, peak_tflops=peak_of_mfu_1 / 0.21)
    assert good == []
    (gap,) = warned(bound_s=step_s / 1.51, peak_tflops=peak_of_mfu_1 / 0.21)
    assert "51%" in gap
    (mfu,) = warned(bound_s=step_s / 1.49, peak_tflops=peak_of_mfu_1 / 0.19)
    assert "19.0%" in mfu


def test_memory_is_told_kind_by_kind():
    best = planned(cluster(1e6), two_stages(4)).best
    (east, west) = cluster(1e6).nodes
    kinds = {east.name: "west-kind", west.name: "east-kind"}
    nodes = tuple(replace(node, device=kinds[node.name]) for node in (west, east))
    bars = memory_bars(best, replace(cluster(1e6), nodes=nodes))
    assert [bar.kind for bar in bars] == ["east-kind", "west-kind"]
    assert [bar.lanes[0][0] for bar in bars] == [west.name, east.name]


def test_kinds_that_compute_in_what_they_have_no_units_for_are_named():
    told = planned(cluster(1e6), two_stages(4))

    def lines(device: str, precision: Precision) -> list[str]:
        (east, west) = told.request.cluster.nodes
        nodes = (replace(east, device=device), west)
        of = replace(told.request.cluster, nodes=nodes)
        plan = with_precisions(two_stages(4), of, precision)
        found = replace(told.found, best=replace(told.best, plan=plan))
        request = replace(told.request, cluster=of)
        return list(dtype_lines(replace(told, request=request, found=found)))

    assert lines("V100-SXM2-16GB", "bfloat16") == [
        "V100-SXM2-16GB: no bfloat16 in hardware, estimated at the rate of float32; "
        "float16 is faster there: plan and train with --dtype best"
    ]
    assert lines("V100-SXM2-16GB", "float16") == lines("H20", "float16") == []
    assert lines("V100-SXM2-16GB", "float32") == lines("H20", "bfloat16") == []


def test_it_is_said_where_figures_of_devices_are_from():
    of = cluster(1e6)
    nodes = tuple(replace(node, memory_gib=None) for node in of.nodes)
    listed = replace(of, nodes=nodes)
    for there, source in (
        (of, "the device catalogue and the cluster file"),
        (listed, "the device catalogue"),
    ):
        told = times_from(two_stages(4), there, "float32", None, None, {})
        assert told == f"estimated from {source}, float32"
