# SPDX-License-Identifier: Apache-2.0
"""Computes the order of a pipeline's actions by list scheduling with given times.

Owns the greedy rule. A free lane takes a ready action: a forward before a backward
before a weight gradient. It takes a forward only while its stage has fewer than
`launch_ahead` microbatches between F and B (or I), and fewer than `kept` between F and
the end of B (or W). If several stages share a lane (interleaving), ready actions of
earlier groups of microbatches come first; a group is as large as the number of lanes.
With `rounds` (`generate.py`), forwards keep that order even if they have to wait, and
the lane has a limit for all its stages. With split backwards this is zero-bubble
scheduling for arbitrarily unlike stages. For equal stages and F = I = W it reaches the
lower bound (S - 1) F + M (F + I + W) with launch-ahead S - s and S kept (tested; our
derivation).

The rule ignores shared links and memory in bytes. Does not own the simulation, which
decides between orders (`simulation/simulator.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hetjax.schedule.programs.action import Op

Slot = tuple[int, Op, int]  # (stage, op, microbatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One replica: seconds by stage, and of the hop from each stage to the next.

    `lanes` numbers the devices of every stage; stages with equal numbers share them.
    The backward of a stage's last `num_cut` microbatches is split into I and W. For
    earlier microbatches it is B, which the last stage fuses with F. Two halves cost
    more than a whole backward; they only serve to fill the end.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_gradient_s: Sequence[float]
    weight_gradient_s: Sequence[float]
    hop_s: Sequence[float]
    lanes: Sequence[int]
    num_microbatches: int
    num_cut: Sequence[int]

    def is_whole(self, stage: int, microbatch: int) -> bool:
        return microbatch < self.num_microbatches - self.num_cut[stage]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchRounds:
    """The microbatches of a round, and by lane the forwards that may be in flight."""

    size: int
    most_in_flight: tuple[int, ...]


def list_schedule(
    pipeline: Pipeline,
    launch_ahead: Sequence[int],
    kept: Sequence[int],
    rounds: MicrobatchRounds | None = None,
) -> list[list[Slot]]:
    """Return the compute order of every lane; both limits are by stage, 1 or more."""
    return _Run(pipeline, launch_ahead, kept, rounds).orders()


class _Run:
    def __init__(
        self,
        pipeline: Pipeline,
        launch_ahead: Sequence[int],
        kept: Sequence[int],
        rounds: MicrobatchRounds | None,
    ) -> None:
        assert min(*launch_ahead, *kept) >= 1
        num_stages, m = len(pipeline.forward_s), pipeline.num_microbatches
        self.pipeline, self.launch_ahead, self.kept = pipeline, launch_ahead, kept
        num_lanes = max(pipeline.lanes) + 1
        self.rounds, self.group_size = rounds, rounds.size if rounds else num_lanes
        self.stages_of: list[list[int]] = [[] for _ in range(num_lanes)]
        for stage, lane in enumerate(pipeline.lanes):
            self.stages_of[lane].append(stage)
        never = float("inf")
        self.last = num_stages - 1
        self.x_s = [[0.0 if s == 0 else never] * m for s in range(num_stages)]
        self.dy_s = [[never] * m for _ in range(num_stages)]
        self.forwards, self.backwards, self.weights = (
            [0] * num_stages for _ in range(3)
        )
        self.free_s = [0.0] * num_lanes
        self.order: list[list[Slot]] = [[] for _ in range(num_lanes)]
        self.events = [(0.0, lane) for lane in range(num_lanes)]

    def orders(self) -> list[list[Slot]]:
        while self.events:
            now, lane = heappop(self.events)
            if self.free_s[lane] > now:
                continue
            slot = self._choice(now, lane)
            if slot is not None:
                self._do(now, lane, slot)
        done = self.pipeline.num_microbatches
        assert all(count == done for count in self.weights), "the run is blocked"
        return self.order

    def _choice(self, now: float, lane: int) -> Slot | None:
        """Return the lane's next action, of the first kind that is ready."""
        for kind in (self._forward, self._backward, self._weight):
            ready = [kind(now, stage) for stage in self.stages_of[lane]]
            found = [slot for slot in ready if slot is not None]
            if found:
                return min(found, key=self._rank)
        return None

    def _rank(self, slot: Slot) -> tuple[int, int, int]:
        """Return the sort key: group of microbatches, then depth (B and I: deepest)."""
        stage, op, m = slot
        depth = -stage if op in (Op.B, Op.I) else stage
        return m // self.group_size, depth, m

    def _is_next(self, stage: int) -> bool:
        """Return whether the lane may run a forward, and the next is this stage's."""
        if self.rounds is None:
            return True
        lane = self.pipeline.lanes[stage]
        stages = self.stages_of[lane]
        in_flight = sum(self.forwards[s] - self.backwards[s] for s in stages)
        if in_flight >= self.rounds.most_in_flight[lane]:
            return False
        left = [s for s in stages if self.forwards[s] < self.pipeline.num_microbatches]
        turns = {s: self._rank((s, Op.F, self.forwards[s])) for s in left}
        return stage == min(left, key=turns.__getitem__)

    def _forward(self, now: float, stage: int) -> Slot | None:
        m = self.forwards[stage]
        ahead, kept = m - self.backwards[stage], m - self.weights[stage]
        full = ahead >= self.launch_ahead[stage] or kept >= self.kept[stage]
        if full or m == self.pipeline.num_microbatches or not self._is_next(stage):
            return None
        fused = stage == self.last and self.pipeline.is_whole(stage, m)
        op = Op.FB if fused else Op.F
        return (stage, op, m) if self.x_s[stage][m] <= now else None

    def _backward(self, now: float, stage: int) -> Slot | None:
        m = self.backwards[stage]
        if m == self.forwards[stage] or self.dy_s[stage][m] > now:
            return None
        return stage, Op.B if self.pipeline.is_whole(stage, m) else Op.I, m

    def _weight(self, now: float, stage: int) -> Slot | None:
        m = self.weights[stage]
        return (stage, Op.W, m) if m < self.backwards[stage] else None

    def _do(self, now: float, lane: int, slot: Slot) -> None:
        stage, op, m = slot
        end_s = now + self._seconds(stage, op)
        self.order[lane].append(slot)
        self.free_s[lane] = end_s
        heappush(self.events, (end_s, lane))
        if op in (Op.F, Op.FB):
            self.forwards[stage] += 1
            if stage == self.last:
                self.dy_s[stage][m] = end_s
            else:
                self._deliver(self.x_s, stage + 1, m, end_s + self._hop_s(stage))
        if op in (Op.B, Op.FB, Op.I):
            self.backwards[stage] += 1
            if stage > 0:
                back_s = end_s + self._hop_s(stage - 1)
                self._deliver(self.dy_s, stage - 1, m, back_s)
        if op in (Op.B, Op.FB, Op.W):
            self.weights[stage] += 1

    def _deliver(
        self, arrivals: list[list[float]], stage: int, m: int, time_s: float
    ) -> None:
        arrivals[stage][m] = time_s
        heappush(self.events, (time_s, self.pipeline.lanes[stage]))

    def _hop_s(self, stage: int) -> float:
        """Return the time from a stage to the next, or back; 0 within one lane."""
        lanes = self.pipeline.lanes
        same = lanes[stage] == lanes[stage + 1]
        return 0.0 if same else self.pipeline.hop_s[stage]

    def _seconds(self, stage: int, op: Op) -> float:
        p = self.pipeline
        return {
            Op.F: p.forward_s[stage],
            Op.B: p.backward_s[stage],
            Op.FB: p.forward_s[stage] + p.backward_s[stage],
            Op.I: p.input_gradient_s[stage],
            Op.W: p.weight_gradient_s[stage],
        }[op]
