# SPDX-License-Identifier: Apache-2.0
"""A bit flipped on one of several replicas is detected, named and undone."""

from pathlib import Path
from typing import Any

import pytest

from hetjax.errors import RunFailed
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.plans.plan import Plan, Replica
from hetjax.train import main
from hetjax.training.recovery.driver import Driver
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from hetjax.training.settings.presets import Preset
from tests.short_runs import rows_drawn
from tests.training import small, test_workers
from tests.training.flips import Injected
from tests.training.pair import nodes_of, training
from tests.training.small import MODEL, but, events, losses, small_preset, stage

pytestmark = pytest.mark.usefixtures("quick_compiling")

DIGEST_EVERY, SAVE_EVERY = 3, 4
THREE_REPLICAS = small.plan(
    *(
        Replica(
            num_microbatches=1,
            microbatch_size=2,
            stages=(stage(node, (0,), (0, 4), 1),),
        )
        for node in ("a100-0", "v100-0", "h20-0")
    )
)
PLANS = {"two": small.TWO_REPLICAS, "three": THREE_REPLICAS}
ODD = {"two": (0, 1), "three": (1, 0)}  # the stage with the flipped bit
NODES = {"two": [], "three": ["v100-0"]}  # the nodes named as wrong


def preset_of(folder: Path, plan: Plan, **changes: Any) -> Preset:
    folder.mkdir(exist_ok=True)
    checked = {
        "digest_every": DIGEST_EVERY,
        "checkpoint": CheckpointConfig(every=SAVE_EVERY),
    }
    return but(small_preset(folder, plan), **checked | changes)


@pytest.fixture(scope="module")
def unharmed(
    tmp_path_factory: pytest.TempPathFactory, quickly: None
) -> dict[str, dict[int, Any]]:
    """(loss, grad_norm) by step of undisturbed runs."""
    found = {}
    for name, plan in PLANS.items():
        preset = preset_of(tmp_path_factory.mktemp(name), plan)
        assert run(preset.config, preset, MODEL) == 0
        assert not events(preset.config.run_dir, "disagreed")
        found[name] = losses(preset.config.run_dir)
    return found


@pytest.fixture(autouse=True)
def no_checkpoint_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for each save, so that none is left out while another is being written."""
    save = Driver.save

    def save_whole(driver: Driver, step: int, *best: Any) -> bool:
        begun = save(driver, step, *best)
        driver.wait_saved()
        return begun

    monkeypatch.setattr(Driver, "save", save_whole)


def assert_found(run_dir: Path, name: str, step: int) -> None:
    """Assert one detection within DIGEST_EVERY steps, and a rollback to a good save."""
    (found,) = events(run_dir, "disagreed")
    assert step <= found["step"] < step + DIGEST_EVERY
    assert found["nodes"] == NODES[name]
    (back,) = events(run_dir, "recovered")
    assert back["step"] == (step - 1) // SAVE_EVERY * SAVE_EVERY
    assert back["bytes"].keys() <= {"disk"}


@pytest.mark.parametrize(
    ("name", "step"),
    rows_drawn([("three", 2), ("three", 8), ("three", 10), ("two", 5)], short=2),
)
def test_a_bit_of_the_weights_of_one_replica_costs_the_steps_since_the_last_checkpoint(
    name: str,
    step: int,
    tmp_path: Path,
    unharmed: dict[str, dict[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
):
    """The steps: after a save, before the first one, right before one, the last one."""
    Injected(monkeypatch, step).in_weights(ODD[name])
    preset = preset_of(tmp_path, PLANS[name])
    assert run(preset.config, preset, MODEL) == 0
    assert losses(preset.config.run_dir) == unharmed[name]
    assert_found(preset.config.run_dir, name, step)


@pytest.mark.parametrize(
    ("name", "step"), rows_drawn([("three", 7), ("two", 6)], short=1)
)
def test_a_bit_of_a_sum_that_one_holder_has_got_is_found_in_its_weights(
    name: str,
    step: int,
    tmp_path: Path,
    unharmed: dict[str, dict[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
):
    Injected(monkeypatch, step).in_summed(ODD[name])
    preset = preset_of(tmp_path, PLANS[name])
    assert run(preset.config, preset, MODEL) == 0
    assert losses(preset.config.run_dir) == unharmed[name]
    assert_found(preset.config.run_dir, name, step)


def test_sums_are_compared_where_unlike_devices_may_round_otherwise(
    tmp_path: Path,
    unharmed: dict[str, dict[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
):
    """Steps with digests compare sums: step 7 starts after 6 finished steps."""
    unlike = lambda config, cluster: {n.name: n.device for n in cluster.nodes}  # noqa: E731
    monkeypatch.setattr("hetjax.training.driver_setup.device_kinds", unlike)
    Injected(monkeypatch, 7).in_summed(ODD["three"])
    preset = preset_of(tmp_path, THREE_REPLICAS)
    assert run(preset.config, preset, MODEL) == 0
    assert losses(preset.config.run_dir) == unharmed["three"]
    (found,) = events(preset.config.run_dir, "disagreed")
    assert found["nodes"] == ["v100-0"]


def test_a_bit_of_what_a_stage_gives_to_a_sum_is_not_seen(
    tmp_path: Path,
    unharmed: dict[str, dict[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
):
    """All holders add the same wrong number, as docs/survive.md explains."""
    injected = Injected(monkeypatch, 5)
    injected.in_contribution(ODD["three"])
    preset = preset_of(tmp_path, THREE_REPLICAS)
    assert run(preset.config, preset, MODEL) == 0
    assert not injected.left and not events(preset.config.run_dir, "disagreed")
    assert losses(preset.config.run_dir) != unharmed["three"]


def test_without_digests_a_flipped_bit_is_not_seen(
    tmp_path: Path,
    unharmed: dict[str, dict[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
):
    Injected(monkeypatch, 5).in_weights(ODD["three"])
    preset = preset_of(tmp_path, THREE_REPLICAS, digest_every=0)
    assert run(preset.config, preset, MODEL) == 0
    assert not events(preset.config.run_dir, "disagreed")
    assert losses(preset.config.run_dir) != unharmed["three"]


def test_a_node_that_is_named_twice_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    injected = Injected(monkeypatch, 5, times=100)
    left = list[str]()
    leave = Driver.leave

    def noted_leave(driver: Driver, node: str) -> bool:
        left.append(node)
        injected.left = 0
        return leave(driver, node)

    monkeypatch.setattr(Driver, "leave", noted_leave)
    injected.in_weights(ODD["three"])
    preset = preset_of(tmp_path, THREE_REPLICAS)
    assert run(preset.config, preset, MODEL) == 0
    assert left == ["v100-0"]
    assert "v100-0" not in nodes_of(preset.config.run_dir)
    assert len(events(preset.config.run_dir, "disagreed")) == 2
    assert losses(preset.config.run_dir).keys() == {*range(1, 11)}


def test_what_nobody_can_name_ends_the_run_with_advice_when_it_comes_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Injected(monkeypatch, 5, times=100).in_weights(ODD["two"])
    preset = preset_of(tmp_path, PLANS["two"])
    with pytest.raises(RunFailed) as error:
        run(preset.config, preset, MODEL)
    assert "(unknown which), again after rolling back" in str(error.value)
    assert "the last checkpoint is of step 4" in str(error.value)
    assert "test the memory" in str(error.value)
    assert len(events(preset.config.run_dir, "disagreed")) == 3


@pytest.mark.usefixtures("environment")
def test_workers_find_a_flipped_bit_and_go_on_as_if_it_had_not_been(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir, once = tmp_path / "run", tmp_path / "once"
    once.touch()
    monkeypatch.setenv("HETJAX_TEST_FLIP", str(once))
    defaults = OnThisMachine.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "module", "tests.training.flips")
    assert main(training(run_dir, cache, "--digest-every", "1")) == 0
    assert not once.exists()
    assert test_workers.losses(run_dir) == whole
    (found,) = events(run_dir, "disagreed")
    assert found["step"] == 3 and found["nodes"] == []
    assert "left and right" in found["reason"]
    (back,) = events(run_dir, "recovered")
    assert back["step"] == 2 and back["bytes"].keys() == {"disk"}
