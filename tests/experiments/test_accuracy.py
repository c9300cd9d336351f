# SPDX-License-Identifier: Apache-2.0
"""The accuracy study on measured runs, on made-up inputs with known answers."""

import pytest

from experiments.accuracy.folds import fit
from experiments.accuracy.referee import (
    Constants,
    GroundTruth,
    Run,
    predicted_bytes,
    predicted_s,
    ring_s,
)
from hetjax.costs.profile import Measurement, Profile
from hetjax.costs.sailor import LayerBytes
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh

# forward, backward, update seconds per sequence; parameter, saved and output bytes
TIMES = {
    "embedding": (1.0, 1.0, 1.0),
    "block": (2.0, 4.0, 1.0),
    "head": (3.0, 5.0, 1.0),
}
BYTES = {"embedding": (10, 20, 4000000), "block": (30, 40, 50), "head": (50, 60, 70)}
LAYERS = ("embedding", "block", "block", "head")
CONSTANTS = Constants(
    timing_s=0.25,
    message_share=0.5,
    sync_share=0.25,
    framework_bytes=1000.0,
    saved_factor=1.5,
)


def truth() -> GroundTruth:
    return GroundTruth(
        profile=Profile(
            model="OPT-350",
            seq_len=2048,
            dtype="float32",
            layers=LAYERS,
            measurements=tuple(
                Measurement(
                    device="GH-96",
                    kind=kind,
                    tensor=4,
                    microbatch_size=size,
                    forward_s=size * forward,
                    backward_s=size * backward,
                    update_s=update,
                )
                for kind, (forward, backward, update) in TIMES.items()
                for size in (1, 2)
            ),
        ),
        layers=tuple(
            LayerBytes(params_bytes=params, saved_bytes=saved, output_bytes=output)
            for params, saved, output in map(BYTES.__getitem__, LAYERS)
        ),
        link=(0.0, 0.0, 0.01),  # 1e7 bytes/s at any size
        link_bytes_per_s=10.0,
    )


def run(cuts: list[tuple[int, int]], replicas: int, microbatches: int) -> Run:
    depth = len(cuts)
    return Run(
        name="made up",
        plan=Plan(
            model="OPT-350",
            seq_len=2048,
            global_batch=replicas * microbatches,
            replicas=tuple(
                Replica(
                    num_microbatches=microbatches,
                    microbatch_size=1,
                    stages=tuple(
                        Stage(
                            node=f"n{r}-{s}",
                            devices=(0, 1, 2, 3),
                            mesh=StageMesh(tensor=4),
                            layers=layers,
                            launch_ahead=min(depth - s, microbatches),
                        )
                        for s, layers in enumerate(cuts)
                    ),
                )
                for r in range(replicas)
            ),
        ),
        measured_s=1.0,
        measured_sync_s=1.0,
        measured_bytes=1,
    )


def test_one_stage_takes_its_microbatches_its_gradient_sum_and_its_update() -> None:
    # passes: 22 - 8 x 0.25; sum: 2 x 2/3 x 120 bytes at a quarter of 10; update: 4 - 1
    alone, three = run([(0, 4)], 1, 5), run([(0, 4)], 3, 5)
    assert predicted_s(alone, truth(), CONSTANTS) == pytest.approx(5 * 20.0 + 3.0)
    assert predicted_s(three, truth(), CONSTANTS) == pytest.approx(103.0 + 64.0)
    assert ring_s(three, truth()) == pytest.approx(16.0)


def test_messages_hold_both_stages() -> None:
    # 4e6 bytes take 400000 s at the link's greatest rate of 10 bytes/s, 800000 s at
    # half of it; each of two stages sends once and receives once per microbatch
    assert truth().message_s(4e6) == pytest.approx(400000.0)
    both = predicted_s(run([(0, 2), (2, 4)], 1, 1), truth(), CONSTANTS)
    passes_s, update_s = 22 - 8 * 0.25, 1.5
    assert both == pytest.approx(passes_s + update_s + 4 * 800000.0)


def test_the_fullest_device_is_that_of_the_memory_model() -> None:
    # stage 0: 4 x 40, twice 1.5 x 60 saved and 50 sent; stage 1: 4 x 80, 1.5 x 100
    # while it runs, an input of 50, its gradient and the last one, not yet received
    two = run([(0, 2), (2, 4)], 1, 4)
    assert predicted_bytes(two, truth(), CONSTANTS) == 1000 + 320 + 150 + 3 * 50
    deep = run([(0, 3), (3, 4)], 1, 4)
    # stage 0: 4 x 70, twice 1.5 x 100 saved and 50 sent
    assert predicted_bytes(deep, truth(), CONSTANTS) == 1000 + 280 + 2 * (150 + 50)
    alone = run([(0, 4)], 1, 4)
    assert predicted_bytes(alone, truth(), CONSTANTS) == 1000 + 4 * 120 + 1.5 * 160


def test_exact_runs_give_back_the_constants_that_made_them() -> None:
    constants = Constants(
        timing_s=2e-4,
        message_share=0.7,
        sync_share=0.4,
        framework_bytes=4e9,
        saved_factor=1.2,
    )
    scaled = scaled_truth()
    layouts = [
        run([(0, 4)], 1, 1),
        run([(0, 4)], 2, 8),
        run([(0, 2), (2, 4)], 2, 8),
        run([(0, 2), (2, 4)], 1, 4),
    ]
    exact = [
        Run(
            name=made.name,
            plan=made.plan,
            measured_s=predicted_s(made, scaled, constants),
            measured_sync_s=ring_s(made, scaled) / constants.sync_share,
            measured_bytes=round(predicted_bytes(made, scaled, constants)),
        )
        for made in layouts
    ]
    found = fit(exact, scaled)
    for name in Constants.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(
            getattr(constants, name), rel=1e-3
        ), name


def scaled_truth() -> GroundTruth:
    """Milliseconds, gigabytes and a link to match."""
    small = truth()
    return GroundTruth(
        profile=Profile(
            model="OPT-350",
            seq_len=2048,
            dtype="float32",
            layers=LAYERS,
            measurements=tuple(
                Measurement(
                    device=m.device,
                    kind=m.kind,
                    tensor=m.tensor,
                    microbatch_size=m.microbatch_size,
                    forward_s=m.forward_s * 1e-3,
                    backward_s=m.backward_s * 1e-3,
                    update_s=m.update_s * 1e-3,
                )
                for m in small.profile.measurements
            ),
        ),
        layers=tuple(
            LayerBytes(
                params_bytes=layer.params_bytes * 10**6,
                saved_bytes=layer.saved_bytes * 10**8,
                output_bytes=8 * 10**6,
            )
            for layer in small.layers
        ),
        link=(0.0, 0.0, 10.0),
        link_bytes_per_s=2e10,
    )
