# SPDX-License-Identifier: Apache-2.0
"""Peak memory of programs, against closed forms and workers that run in any order."""

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.costs.costs import Costs, StageMemory
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.programs.action import (
    UNTIED,
    Action,
    Op,
    Programs,
    StageKey,
    parse_program,
)
from hetjax.schedule.programs.check import check
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.memory import check_memory, memory_uses
from hetjax.schedule.simulation.result import Simulation

GIB = 2**30
NOTHING = Simulation(step_time_s=1.0, lanes={}, shares={}, reductions=(), messages={})
FLOWS = {"input_bytes": 3, "output_bytes": 7}


def plan_of(
    num_stages: int, num_microbatches: int, schedule="1f1b", node="n{}", device=0
):
    """Return one stage per node; with `device` None, one per device of one node."""
    stages = tuple(
        Stage(
            node=node.format(s),
            devices=(s if device is None else device,),
            layers=(s, s + 1),
            launch_ahead=min(num_stages - s, num_microbatches),
        )
        for s in range(num_stages)
    )
    replica = Replica(
        num_microbatches=num_microbatches, microbatch_size=1, stages=stages
    )
    return Plan(
        model="m",
        seq_len=1,
        global_batch=num_microbatches,
        schedule=schedule,
        replicas=(replica,),
    )


def peak_memory_bytes(programs: Programs, plan: Plan, costs: Costs) -> dict[str, int]:
    uses = memory_uses(programs, plan, costs)
    return {device: use.total_bytes for device, use in uses.items()}


def costs_of(plan: Plan, has_bytes: float | None = None, **memory: int) -> Costs:
    keys = [(r, s) for r, s, _ in plan.stages()]
    return Costs(
        times={},
        memory={key: StageMemory(**memory) for key in keys},
        memory_bytes={} if has_bytes is None else dict.fromkeys(keys, has_bytes),
    )


@given(st.integers(2, 7), st.integers(1, 12))
def test_1f1b_keeps_as_many_residuals_as_stages_are_left(num_stages, num_microbatches):
    plan = plan_of(num_stages, num_microbatches)
    peaks = peak_memory_bytes(lower(plan), plan, costs_of(plan, saved_bytes=10))
    assert peaks == {
        f"n{s}/0": 10 * min(num_stages - s, num_microbatches) * (s < num_stages - 1)
        for s in range(num_stages)  # the last stage fuses F and B and keeps nothing
    }


@given(st.integers(2, 5), st.integers(1, 9))
def test_gpipe_keeps_the_residuals_of_all_microbatches(num_stages, num_microbatches):
    plan = plan_of(num_stages, num_microbatches, schedule="gpipe")
    uses = memory_uses(lower(plan), plan, costs_of(plan, saved_bytes=10))
    for s in range(num_stages - 1):
        assert uses[f"n{s}/0"].residual_bytes == 10 * num_microbatches
        assert uses[f"n{s}/0"].in_flight == num_microbatches


@given(st.integers(3, 6), st.integers(0, 5))
def test_a_1f1b_stage_keeps_its_inputs_with_the_residuals_and_its_outputs_until_used(
    num_stages, more
):
    plan = plan_of(num_stages, num_stages + more)
    costs = costs_of(plan, saved_bytes=10, static_bytes=1000, **FLOWS)
    peaks = peak_memory_bytes(lower(plan), plan, costs)
    for s in range(1, num_stages - 1):
        kept = num_stages - s
        # All warm-up forwards may end before the next stage starts. A backward holds dy
        # and dx besides the last y and the last dx.
        assert peaks[f"n{s}/0"] == 1000 + kept * 10 + max(kept * 7, 7 + 7 + 3 + 3)
    # FB holds x and dx, and the last dx may not have been received yet
    assert peaks[f"n{num_stages - 1}/0"] == 1000 + 3 + 3 + 3


@given(st.integers(1, 9))
def test_gpipe_parks_all_activations_at_a_fast_stage_and_all_gradients_at_the_last(
    num_microbatches,
):
    plan = plan_of(2, num_microbatches, schedule="gpipe")
    uses = memory_uses(lower(plan), plan, costs_of(plan, saved_bytes=10, **FLOWS))
    # Stage 0 ends all forwards before stage 1 receives any, so M y wait. Stage 1 holds
    # only the x in use, and its M dx wait for stage 0's backwards.
    assert uses["n0/0"].residual_bytes == num_microbatches * 10
    assert uses["n0/0"].activation_bytes == num_microbatches * 7
    assert uses["n1/0"].activation_bytes == 3 + num_microbatches * 3


def test_a_longer_launch_ahead_lets_as_many_more_outputs_wait():
    # K = [5, 1]: dy_m proves that y_0 .. y_m were received, so that 4 remain at B
    plan = plan_of(2, 12)
    stages = tuple(
        replace(stage, launch_ahead=ahead)
        for stage, ahead in zip(plan.replicas[0].stages, (5, 1), strict=True)
    )
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=stages),))
    uses = memory_uses(lower(plan), plan, costs_of(plan, output_bytes=7))
    assert uses["n0/0"].activation_bytes == 5 * 7  # 5 y at F; 4 y and a dy at B
    late = memory_uses(lower(plan), plan, costs_of(plan, input_bytes=3))
    # x_m proves that dx_0 .. dx_(m - 5) were used: 4 wait, besides x and the next dx
    assert late["n1/0"].activation_bytes == (4 + 1 + 1) * 3


@pytest.mark.parametrize(("sender", "receiver"), [(1, 2), (2, 1), (2, 2)])
def test_a_batch_split_over_more_devices_is_cut_and_one_over_fewer_is_joined(
    sender, receiver
):
    plan = plan_of(2, 1)
    stages = tuple(
        replace(stage, devices=tuple(range(data)), mesh=StageMesh(data=data))
        for stage, data in zip(plan.replicas[0].stages, (sender, receiver), strict=True)
    )
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=stages),))
    programs = {
        "n0": parse_program("r0.s0.F0\nr0.s0.SEND_F0>s1\nr0.s0.FREE_y0\n"),
        "n1": parse_program("r0.s1.RECV_F0<s0\nr0.s1.FREE_x0\n"),
    }
    uses = memory_uses(programs, plan, costs_of(plan, **FLOWS))
    assert uses["n0/0"].activation_bytes == 7 * (2 if sender < receiver else 1)
    assert uses["n1/0"].activation_bytes == 3 * (2 if sender > receiver else 1)


@given(st.integers(0, 10**6))
def test_the_peak_holds_in_any_order_of_the_workers_and_one_order_reaches_it(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    sizes, programs = random_sizes(rng, plan), lower(plan)
    bound = peak_memory_bytes(programs, plan, Costs(times={}, memory=sizes))
    seen = run_peaks(programs, plan, sizes, rng.choice)
    assert all(seen[device] <= bound[device] for device in bound)
    for node in programs:
        # all other nodes advance only while this one waits for them
        peaks = eager_peaks(programs, plan, sizes, node)
        for _, _, stage in plan.stages():
            if stage.node == node:
                device = f"{node}/{stage.devices[0]}"
                assert peaks[device] == bound[device]


@given(st.integers(0, 10**6))
def test_the_peak_of_programs_that_somebody_wrote_holds_in_any_order(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    sizes = random_sizes(rng, plan)
    programs = with_earlier_receives(rng, lower(plan), plan)
    bound = peak_memory_bytes(programs, plan, Costs(times={}, memory=sizes))
    for peaks in (
        run_peaks(programs, plan, sizes, rng.choice),
        *(eager_peaks(programs, plan, sizes, node) for node in programs),
    ):
        assert all(peaks[device] <= bound[device] for device in peaks)


def random_sizes(rng: random.Random, plan: Plan) -> dict[StageKey, StageMemory]:
    return {
        (r, s): StageMemory(
            saved_bytes=rng.choice([0, 40, 90]),
            half_saved_bytes=rng.choice([10, 30]),
            input_bytes=rng.randint(1, 20),
            output_bytes=rng.randint(1, 20),
        )
        for r, s, _ in plan.stages()
    }


def with_earlier_receives(
    rng: random.Random, programs: Programs, plan: Plan
) -> Programs:
    """Return programs with some RECVs a little earlier, as a user might write them."""
    found = dict(programs)
    for node, program in programs.items():
        for at in range(1, len(program)):
            if program[at].op is Op.RECV and rng.random() < 0.3:
                was = list(found[node])
                was[at - 1 : at + 1] = was[at], was[at - 1]
                with suppress(BadInput):
                    check(found | {node: tuple(was)}, plan)
                    found[node] = tuple(was)
    return found


def random_plan(rng: random.Random) -> Plan:
    """Return a pipeline under any schedule, sometimes with several stages on a node."""
    num_stages, count = rng.randint(2, 5), rng.randint(1, 8)
    schedule = rng.choice(["1f1b", "gpipe", "h1f1b", "zero-bubble", "interleaved"])
    plan = plan_of(num_stages, count, schedule)
    nodes = rng.randint(1, num_stages)
    aheads = sorted((rng.randint(1, count) for _ in range(num_stages)), reverse=True)
    stages = []
    for s, stage in enumerate(plan.replicas[0].stages):
        shared = schedule == "interleaved" and num_stages % nodes == 0
        place = (s % nodes, 0) if shared else (s * nodes // num_stages, s)
        launch = {"launch_ahead": aheads[s]} if schedule == "h1f1b" else {}
        node, device = place
        stages.append(replace(stage, node=f"n{node}", devices=(device,), **launch))
    return replace(plan, replicas=(replace(plan.replicas[0], stages=tuple(stages)),))


class Runner:
    """Workers that really run their programs, but without the arrays."""

    def __init__(self, programs: Programs, plan: Plan, sizes) -> None:
        self.programs, self.sizes = programs, sizes
        self.device = {
            (r, s): f"{stage.node}/{stage.devices[0]}" for r, s, stage in plan.stages()
        }
        self.last = len(plan.replicas[0].stages) - 1
        self.position = dict.fromkeys(programs, 0)
        self.mailbox: set[tuple] = set()
        self.live: dict[str, dict[tuple, int]] = defaultdict(dict)
        self.peaks: dict[str, int] = defaultdict(int)

    def head(self, node: str) -> Action | None:
        program, at = self.programs[node], self.position[node]
        return program[at] if at < len(program) else None

    def blocked_by(self, node: str) -> tuple | None:
        head = self.head(node)
        if head is None or head.op is not Op.RECV or head.message in self.mailbox:
            return None
        return head.message

    def step(self, node: str) -> None:
        action = self.head(node)
        assert action is not None and self.blocked_by(node) is None
        self.position[node] += 1
        (r, s), m, op = action.key, action.microbatch, action.op
        memory, live = self.sizes[r, s], self.live[self.device[r, s]]
        x = {} if s == 0 else {"x": memory.input_bytes}
        dx = {} if s == 0 else {"dx": memory.input_bytes}
        y = {} if s == self.last else {"y": memory.output_bytes}
        saved = max(memory.saved_bytes - sum(x.values()), 0)
        made = {
            Op.F: {"saved": saved, **y},
            Op.B: dx,
            Op.FB: dx,
            Op.I: {"half": memory.half_saved_bytes, **dx},
        }.get(op, {})
        if op is Op.SEND:
            self.mailbox.add(action.message)
            live["sent", *action.message] = live.pop((action.buffer, s, m))
        if op is Op.RECV:
            made = x if action.buffer == "x" else {"dy": memory.output_bytes}
        for name, size in made.items():
            live[name, s, m] = size
        if op is Op.FREE:
            live.pop((action.buffer, s, m), None)
        self.note()
        if op is Op.RECV:
            self.mailbox.remove(action.message)
            sender = self.device[action.message[:2]]
            del self.live[sender]["sent", *action.message]

    def note(self) -> None:
        for device, live in self.live.items():
            self.peaks[device] = max(self.peaks[device], sum(live.values()))


def run_peaks(
    programs: Programs, plan: Plan, sizes, choose: Callable[[list[str]], str]
) -> dict[str, int]:
    """Return the peaks of one run in which `choose` picks the next node."""
    runner = Runner(programs, plan, sizes)
    while ready := [n for n in programs if runner.head(n) and not runner.blocked_by(n)]:
        runner.step(choose(ready))
    return runner.peaks


def eager_peaks(programs: Programs, plan: Plan, sizes, node: str) -> dict[str, int]:
    """Return the peaks of a run in which other nodes only do what `node` waits for."""
    runner = Runner(programs, plan, sizes)
    senders = {
        action.message: name
        for name, program in programs.items()
        for action in program
        if action.op is Op.SEND
    }
    while runner.head(node):
        at = node
        while (message := runner.blocked_by(at)) is not None:
            at = senders[message]
        runner.step(at)
    return runner.peaks


def test_static_bytes_and_workspace_stand_on_top():
    plan = plan_of(2, 4)
    costs = costs_of(plan, static_bytes=100, workspace_bytes=20, saved_bytes=1)
    use = memory_uses(lower(plan), plan, costs)["n0/0"]
    assert (use.static_bytes, use.residual_bytes, use.workspace_bytes) == (100, 2, 20)
    assert use.total_bytes == 122


@pytest.mark.parametrize(("update_bytes", "total"), [(22, 122), (23, 123)])
def test_an_update_has_the_room_of_all_that_was_in_flight(
    update_bytes: int, total: int
):
    plan = plan_of(2, 4)
    sizes = {"static_bytes": 100, "workspace_bytes": 20, "saved_bytes": 1}
    costs = costs_of(plan, update_bytes=update_bytes, **sizes)
    use = memory_uses(lower(plan), plan, costs)["n0/0"]
    assert use.residual_bytes == 2
    assert use.total_bytes == total


def test_stages_that_share_a_device_are_summed_with_the_larger_workspace():
    text = (
        "r0.s0.F0 r0.s0.SEND_F0>s1 r0.s0.FREE_y0 r0.s1.RECV_F0<s0 r0.s1.FB0 "
        "r0.s1.FREE_x0 r0.s1.SEND_B0>s0 r0.s1.FREE_dx0 r0.s0.RECV_B0<s1 r0.s0.B0 "
        "r0.s0.FREE_saved0 r0.s0.FREE_dy0"
    )
    plan = plan_of(2, 1, node="a")
    memory = {
        (0, 0): StageMemory(static_bytes=100, saved_bytes=10, workspace_bytes=5),
        (0, 1): StageMemory(static_bytes=200, input_bytes=4, workspace_bytes=9),
    }
    programs = {"a": parse_program(text.replace(" ", "\n"))}
    peaks = peak_memory_bytes(programs, plan, Costs(times={}, memory=memory))
    assert peaks == {"a/0": 300 + 10 + 4 + 4 + 9}  # residuals of s0, x and dx of s1


@pytest.mark.parametrize(
    ("compiled", "is_certain"),
    [((), False), ((0,), False), ((1,), False), ((0, 1), True)],
)
def test_memory_is_certain_if_the_compiler_reported_all_stages_of_a_device(
    compiled: tuple[int, ...], is_certain: bool
):
    plan = plan_of(2, 2, schedule="interleaved", node="a")
    costs = replace(
        costs_of(plan, 1e4, static_bytes=100, workspace_bytes=50, **FLOWS),
        devices={(0, 0): "H20", (0, 1): "H20"},
        compiled=frozenset((0, stage) for stage in compiled),
    )
    found = Predicted(
        plan=plan, costs=costs, simulation=NOTHING, tied=UNTIED, times_from=""
    ).memory_certainty["a/0"]
    assert (found.backend is None) == is_certain
    assert (found.low_bytes == found.high_bytes) == is_certain
    if is_certain:
        use = memory_uses(lower(plan), plan, costs)["a/0"]
        assert found.low_bytes == use.total_bytes
        assert use.workspace_bytes == 50


def test_a_cut_backward_keeps_its_half_until_the_weight_gradient():
    text = (
        "r0.s0.F0 r0.s0.F1 r0.s0.I0 r0.s0.FREE_saved0 r0.s0.I1 r0.s0.FREE_saved1 "
        "r0.s0.W0 r0.s0.FREE_half0 r0.s0.W1 r0.s0.FREE_half1"
    )
    plan = plan_of(1, 2)
    programs = {"n0": parse_program(text.replace(" ", "\n"))}
    costs = costs_of(plan, saved_bytes=10, half_saved_bytes=6)
    use = memory_uses(programs, plan, costs)["n0/0"]
    assert use.residual_bytes == 10 + 10 + 6  # both residuals, and the half of I0
    assert use.in_flight == 2


def test_every_device_of_a_stage_has_its_own_entry():
    stage = Stage(node="a", devices=(2, 0), layers=(0, 1), launch_ahead=1)
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=(stage,))
    plan = Plan(model="m", seq_len=1, global_batch=1, replicas=(replica,))
    peaks = peak_memory_bytes(lower(plan), plan, costs_of(plan, static_bytes=8))
    assert peaks == {"a/2": 8, "a/0": 8}


@pytest.mark.parametrize(
    ("schedule", "memory", "words"),
    [
        ("1f1b", {"static_bytes": 3 * GIB}, ["3.00 GiB weights", "fewer layers"]),
        (
            "1f1b",
            {"workspace_bytes": 3 * GIB},
            ["3.00 GiB workspace", "microbatch_size"],
        ),
        (
            "1f1b",
            {"saved_bytes": GIB},
            ["4.00 GiB residuals of 4", '"launch_ahead" to 2'],
        ),
        ("1f1b", {"saved_bytes": 3 * GIB}, ["12.00 GiB residuals", '"full", or lower']),
        ("gpipe", {"saved_bytes": GIB}, ["8.00 GiB residuals of 8", '"1f1b"']),
        ("1f1b", {"output_bytes": 3 * GIB}, ["between stages", "microbatch_size"]),
    ],
)
def test_a_plan_over_memory_is_refused_with_the_part_that_binds(
    schedule, memory, words
):
    plan = plan_of(4, 8, schedule)
    costs = costs_of(plan, has_bytes=2 * GIB, **memory)
    with pytest.raises(NoFeasiblePlan) as refusal:
        check_memory(memory_uses(lower(plan), plan, costs), plan, costs)
    text = str(refusal.value)
    assert refusal.value.exit_code == 3
    assert "device 'n0/0' needs" in text and f"at most the {2 * GIB} bytes" in text
    assert all(word in text for word in words), text


def test_a_plan_that_fits_exactly_or_whose_memory_is_unknown_passes():
    plan = plan_of(2, 2)
    for has_bytes in (None, 5.0):
        costs = costs_of(plan, has_bytes, static_bytes=5)
        check_memory(memory_uses(lower(plan), plan, costs), plan, costs)
