# SPDX-License-Identifier: Apache-2.0
"""What follows from a plan alone, against brute force over single layers."""

from hypothesis import given

from hetjax.plans.plan import first_sample, segments, segments_of
from tests.plans.strategies import Case, valid_cases


@given(case=valid_cases())
def test_segments_group_the_layers_that_share_their_stage_in_every_replica(case: Case):
    def holders(layer: int) -> list[tuple[int, int]]:
        return [
            (r, s)
            for r, s, stage in case.plan.stages()
            if layer in range(*stage.layers)
        ]

    groups: list[list[int]] = []
    for layer in range(case.num_layers):
        if groups and holders(groups[-1][0]) == holders(layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    assert [list(range(*segment)) for segment in segments(case.plan)] == groups


@given(case=valid_cases())
def test_the_segments_of_a_stage_are_its_layers(case: Case):
    every = segments(case.plan)
    for _, _, stage in case.plan.stages():
        layers = [layer for seg in segments_of(stage, every) for layer in range(*seg)]
        assert layers == list(range(*stage.layers))


@given(case=valid_cases())
def test_replicas_take_consecutive_samples_of_the_global_batch(case: Case):
    plan = case.plan
    samples = [
        (r, m, i)
        for r, replica in enumerate(plan.replicas)
        for m in range(replica.num_microbatches)
        for i in range(replica.microbatch_size)
    ]
    assert len(samples) == plan.global_batch
    for r in range(len(plan.replicas)):
        assert first_sample(plan, r) == samples.index((r, 0, 0))


@given(case=valid_cases())
def test_a_plan_knows_its_number_of_layers_and_all_its_stages(case: Case):
    assert case.plan.num_layers == case.num_layers
    for r, s, stage in case.plan.stages():
        assert case.plan.replicas[r].stages[s] is stage
    assert len(case.plan.stages()) == sum(len(r.stages) for r in case.plan.replicas)
