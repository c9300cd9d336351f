# SPDX-License-Identifier: Apache-2.0
"""HARP's dynamic program against every pipeline of small cases, under its own cost."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planner.baselines.hapt_program import (
    SubCluster,
    Submesh,
    Task,
    cheapest_pipeline,
    least_slowest_s,
)

Choice = tuple[int, int, int, int]  # cluster, submesh, first layer, end


def random_task(seed: int) -> Task:
    rng = np.random.default_rng(seed)
    num_layers, num_clusters = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    clusters = []
    for _ in range(num_clusters):
        per_node = int(rng.integers(1, 4))
        sizes = {1, per_node} | ({2} if per_node > 2 else set())
        clusters.append(
            SubCluster(
                num_groups=per_node * int(rng.integers(1, 3)),
                num_idle=int(rng.choice([0, 0, 1, 9])),
                groups_per_node=per_node,
                straddles=per_node == 3,
                submeshes=tuple(
                    Submesh(
                        num_groups=n, stage_s_KIJ=random_seconds(rng, num_layers, n)
                    )
                    for n in sorted(sizes)
                ),
            )
        )
    hop_s = rng.choice([0.0, 0.2, 0.6, 2.0], (num_clusters, num_clusters, 1))
    return Task(
        clusters=tuple(clusters),
        hop_s_CCJ=np.repeat(hop_s, num_layers + 1, axis=2),
        num_microbatches=int(rng.integers(1, 9)),
    )


def random_seconds(
    rng: np.random.Generator, num_layers: int, num_groups: int
) -> np.ndarray:
    """Return seconds by launch-ahead and layers; more in flight is slower or unfit."""
    ends = np.arange(num_layers + 1)
    lengths_IJ = ends[None, :] - ends[:, None]
    each_s = rng.uniform(0.5, 1.5) / num_groups
    fits_K = rng.integers(1, 9, num_layers + 1)  # by number of layers
    seconds_KIJ = np.full((12, *lengths_IJ.shape), np.inf)
    for ahead in range(12):
        slower = 1.0 if ahead <= 3 else 1.3
        fits_IJ = (lengths_IJ > 0) & (ahead <= fits_K[lengths_IJ.clip(0)])
        seconds_KIJ[ahead] = np.where(fits_IJ, slower * each_s * lengths_IJ, np.inf)
    return seconds_KIJ


def pipelines(task: Task, cluster: int = 0, first: int = 0) -> Iterator[list[Choice]]:
    """Yield every way to assign the layers to submeshes of the clusters in order."""
    if first == task.num_layers:
        yield []
        return
    for c in range(cluster, len(task.clusters)):
        for m in range(len(task.clusters[c].submeshes)):
            for end in range(first + 1, task.num_layers + 1):
                for rest in pipelines(task, c, end):
                    yield [(c, m, first, end), *rest]


def seated(task: Task, stages: list[Choice]) -> bool:
    """Return whether the device count is right and no stage spans two nodes."""
    for c, cluster in enumerate(task.clusters):
        sizes = [cluster.submeshes[m].num_groups for k, m, _, _ in stages if k == c]
        used = sum(sizes)
        if not cluster.num_groups - cluster.num_idle <= used <= cluster.num_groups:
            return False
        if cluster.groups_per_node == 3:
            taken = 0
            for size in reversed(sizes):
                if taken // 3 != (taken + size - 1) // 3:
                    return False
                taken += size
    return True


def cost_s(task: Task, stages: list[Choice], most_s: float) -> float:
    """Return stages and hops plus m - 1 times the limit; inf if the limit is broken."""
    ahead, total_s, after = 1, 0.0, None
    for c, m, first, end in reversed(stages):
        if after is not None:
            hop_s = float(task.hop_s_CCJ[c, after, end])
            if hop_s > most_s:
                return np.inf
            total_s += hop_s
            crossing = c != after
            slow, very_slow = hop_s >= most_s / 10, hop_s >= most_s / 2
            ahead += 1 + (crossing and slow) + (crossing and very_slow)
        stage_s_KIJ = task.clusters[c].submeshes[m].stage_s_KIJ
        if ahead >= len(stage_s_KIJ) or stage_s_KIJ[ahead, first, end] > most_s:
            return np.inf
        total_s += stage_s_KIJ[ahead, first, end]
        after = c
    return total_s + (task.num_microbatches - 1) * most_s


def limits(task: Task) -> list[float]:
    tables = [m.stage_s_KIJ for c in task.clusters for m in c.submeshes]
    values = np.concatenate([table.ravel() for table in [*tables, task.hop_s_CCJ]])
    return sorted(set(values[np.isfinite(values)].tolist()))


@settings(max_examples=150)
@given(st.integers(0, 10**6))
def test_no_pipeline_is_cheaper_by_harps_cost(seed: int) -> None:
    task = random_task(seed)
    possible = [stages for stages in pipelines(task) if seated(task, stages)]
    best = min(
        (
            cost_s(task, stages, most_s)
            for stages in possible
            for most_s in limits(task)
        ),
        default=np.inf,
    )
    least_s = least_slowest_s(task)
    assert np.isinf(least_s) == np.isinf(best)
    if np.isfinite(best):
        assert cheapest_pipeline(task, least_s).step_s == pytest.approx(best)


@settings(max_examples=150)
@given(st.integers(0, 10**6))
def test_the_pipeline_found_costs_what_is_said(seed: int) -> None:
    task = random_task(seed)
    least_s = least_slowest_s(task)
    if np.isinf(least_s):
        return
    found = cheapest_pipeline(task, least_s)
    stages = [(s.cluster, s.submesh, *s.layers) for s in found.stages]
    assert seated(task, stages)
    told = min(cost_s(task, stages, most_s) for most_s in limits(task))
    assert told == pytest.approx(found.step_s)
    assert found.stages[-1].launch_ahead == 1


def test_launch_aheads_and_cost_are_those_of_the_published_run() -> None:
    """Run 1 of HARP's results file: 22 sub-layers on two V100, 28 on one A100."""
    seconds = np.full((2, 4, 3, 3), np.inf)
    seconds[0, :, 0, 1], seconds[1, :, 1, 2] = 0.2143, 0.2202
    hop_s_CCJ = np.full((2, 2, 3), 0.0760)
    task = Task(
        clusters=tuple(
            SubCluster(
                num_groups=1,
                num_idle=0,
                groups_per_node=1,
                straddles=False,
                submeshes=(Submesh(num_groups=1, stage_s_KIJ=seconds[c]),),
            )
            for c in range(2)
        ),
        hop_s_CCJ=hop_s_CCJ,
        num_microbatches=64,
    )
    found = cheapest_pipeline(task, least_slowest_s(task))
    assert [stage.launch_ahead for stage in found.stages] == [3, 1]
    assert found.step_s == pytest.approx(14.3831, abs=1e-4)
