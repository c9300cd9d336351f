# SPDX-License-Identifier: Apache-2.0
"""The order of preference for clusters and plans."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml, load_cluster
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import write_plan
from hetjax.training.directory.rundir import Previous
from hetjax.training.layout.hardware import choose_hardware
from hetjax.training.layout.plan_choice import choose_plan
from hetjax.training.settings.presets import Preset
from tests.training.small import (
    MODEL,
    ONE_REPLICA,
    SIX,
    TWO_REPLICAS,
    but,
    small_preset,
)

TINY = load_cluster(SIX)
OTHER = Cluster(name="other", nodes=(Node(name="box", device="V100", count=3),))


@pytest.fixture
def preset(tmp_path: Path) -> Preset:
    return small_preset(tmp_path)


def previous(preset: Preset, plan: Plan, cluster: Cluster = TINY) -> Previous:
    return Previous(
        config=preset.config, dataset=Path(), hashes={}, cluster=cluster, plan=plan
    )


def chosen(preset: Preset, cluster: Cluster, before: Previous | None = None) -> Plan:
    return choose_plan(preset.config, MODEL, cluster, preset, before).plan


def test_a_given_cluster_comes_before_the_presets(preset: Preset, tmp_path: Path):
    path = tmp_path / "other.toml"
    path.write_text(cluster_toml(OTHER))
    assert choose_hardware(preset.config, preset).cluster == TINY
    hardware = choose_hardware(but(preset, cluster=path).config, preset)
    assert hardware.cluster == OTHER
    assert {name: len(held) for name, held in hardware.devices.items()} == {"box": 3}


def test_without_a_cluster_the_devices_that_are_here_are_one(preset: Preset):
    bare = replace(but(preset, simulate=False), cluster=None)
    hardware = choose_hardware(bare.config, bare)
    [node] = hardware.cluster.nodes
    assert (node.device, node.count) == ("cpu", len(jax.local_devices()))


def test_a_preset_cluster_gives_way_where_there_is_an_accelerator(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    hardware = choose_hardware(preset.config, preset)
    assert hardware.source == "the devices that are here"


def test_a_given_plan_comes_first(preset: Preset, tmp_path: Path):
    path = tmp_path / "given.json"
    write_plan(path, ONE_REPLICA)
    given = but(preset, plan=path)
    before = previous(preset, TWO_REPLICAS)
    assert chosen(given, TINY, before) == ONE_REPLICA


def test_the_runs_own_plan_comes_before_the_presets_on_the_same_machines(
    preset: Preset,
):
    assert chosen(preset, TINY, previous(preset, ONE_REPLICA)) == ONE_REPLICA
    renamed = replace(TINY, name="renamed")
    assert chosen(preset, TINY, previous(preset, ONE_REPLICA, renamed)) == ONE_REPLICA
    moved = previous(preset, ONE_REPLICA, OTHER)
    assert chosen(preset, TINY, moved) == TWO_REPLICAS


def test_asking_the_planner_for_something_else_sets_the_runs_plan_aside(
    preset: Preset,
):
    bare = replace(preset, plan=None)
    before = previous(bare, ONE_REPLICA)
    assert chosen(bare, TINY, before) == ONE_REPLICA
    larger = but(bare, microbatch_size=2)
    sizes = {r.microbatch_size for r in chosen(larger, TINY, before).replicas}
    assert sizes == {2}


def test_the_presets_plan_is_for_its_cluster_and_batch_only(preset: Preset):
    assert chosen(preset, TINY) == TWO_REPLICAS
    for plan in (
        chosen(preset, OTHER),
        chosen(but(preset, global_batch=12), TINY),
        chosen(but(preset, seq_len=8), TINY),
    ):
        assert len({len(replica.stages) for replica in plan.replicas}) == 1
        assert plan != TWO_REPLICAS


def test_the_presets_plan_gives_way_to_another_microbatch_size(preset: Preset):
    larger = but(preset, microbatch_size=3)
    plan = choose_plan(larger.config, MODEL, TINY, preset, None).plan
    assert {replica.microbatch_size for replica in plan.replicas} == {3}


def test_a_plan_that_no_longer_fits_is_refused_with_its_source(
    preset: Preset, tmp_path: Path
):
    path = tmp_path / "given.json"
    write_plan(path, ONE_REPLICA)
    with pytest.raises(BadInput, match=r"given\.json.*node = 'v100-0'"):
        chosen(but(preset, plan=path), OTHER)
