# SPDX-License-Identifier: Apache-2.0
"""Which runs are refused on the CPU of a machine that has a GPU.

The machine is a folder with the GPU's device file. JAX's own setting, which all tests
have, is removed.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from hetjax.api import profiling
from hetjax.api.profiling import measure_model
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.errors import BadInput
from hetjax.mesh.accelerators import (
    check_accelerator_usable,
    check_accelerator_used,
    installed_versions,
)
from hetjax.models.presets import model_preset
from hetjax.plans.plan_files import plan_json
from hetjax.training import worker
from hetjax.training.layout import hardware
from hetjax.training.layout.hardware import choose_hardware
from hetjax.training.settings.presets import PRESETS, Preset, profile_config
from hetjax.training.settings.values import config_values
from tests.training.small import ONE_STAGE, but, small_preset

REFUSED = pytest.raises(BadInput, match=r"got: a run on an NVIDIA GPU \(.*/dev/nvidia0")
CPUS = Cluster(name="cpus", nodes=(Node(name="box", device="cpu", count=2),))
CARD = Cluster(name="card", nodes=(Node(name="box", device="H20", count=1),))


@pytest.fixture(autouse=True)
def unused_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine" / "dev" / "nvidia0"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.delenv("JAX_PLATFORMS")
    for check in (check_accelerator_used, check_accelerator_usable):
        there = partial(check, tmp_path / "machine")
        for module in (hardware, worker):
            monkeypatch.setattr(module, check.__name__, there, raising=False)


@pytest.fixture
def real(tmp_path: Path) -> Preset:
    """A preset without a cluster, for the devices of this machine."""
    return replace(but(small_preset(tmp_path), simulate=False), cluster=None)


def test_a_run_for_the_devices_that_are_here_is_refused(real: Preset):
    with REFUSED:
        choose_hardware(real.config, real)


def test_a_run_that_asks_for_the_cpu_gets_it(real: Preset):
    there = choose_hardware(but(real, platform="cpu").config, real)
    [node] = there.cluster.nodes
    assert (node.device, node.count) == ("cpu", len(jax.local_devices()))


def test_a_cluster_file_asks_for_the_cpu_by_saying_so(real: Preset):
    assert len(choose_hardware(real.config, real, CPUS).devices["box"]) == 2
    with REFUSED:
        choose_hardware(real.config, real, CARD)


def test_simulated_runs_take_the_cpu(tmp_path: Path):
    preset = small_preset(tmp_path)
    for given in (None, CARD):
        there = choose_hardware(preset.config, preset, given)
        used = {d.platform for held in there.devices.values() for d in held}
        assert used == {"cpu"}


def test_a_simulating_preset_asked_for_the_cpu_leaves_accelerators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    preset = but(small_preset(tmp_path), platform="cpu")
    assert choose_hardware(preset.config, preset).source == "the preset's"


def test_a_worker_refuses_too(real: Preset):
    def settings(cluster: Cluster, **changes: Any) -> dict[str, Any]:
        config = but(real, model="tiny", **changes).config
        return {
            "config": config_values(config),
            "cluster": cluster_toml(cluster),
            "plan": plan_json(ONE_STAGE),
        }

    with REFUSED:
        worker.warm_up("box", settings(CARD))
    cards = Cluster(name="cards", nodes=(replace(CARD.nodes[0], count=16),))
    with pytest.raises(BadInput, match=r"wants 16 x H20.*here: 16 x cpu"):
        worker.warm_up("box", settings(cards, platform="cpu"))


@pytest.mark.skipif(
    "jax-cuda12-plugin" in installed_versions(), reason="it may fit this JAX"
)
def test_workers_on_this_machine_are_not_started_where_they_would_refuse(real: Preset):
    workers = but(real, launcher="processes")
    assert choose_hardware(workers.config, real, CPUS).cluster == CPUS
    with pytest.raises(BadInput, match="cannot use it without jax-cuda12-plugin"):
        choose_hardware(workers.config, real, CARD)
    simulated = but(workers, simulate=True)
    assert choose_hardware(simulated.config, real, CARD).cluster == CARD


def test_nothing_is_measured_on_the_cpu_in_place_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clusters: list[Cluster] = []
    monkeypatch.setattr(
        profiling,
        "measured",
        lambda config, model, cluster, *_, **__: clusters.append(cluster),
    )
    preset, model = replace(PRESETS["tiny"], cluster=None), model_preset("tiny")
    config = replace(
        profile_config(preset), simulate=False, output=tmp_path / "profile.json"
    )
    with REFUSED:
        measure_model(config, preset, model)
    measure_model(replace(config, platform="cpu"), preset, model)
    assert [node.device for cluster in clusters for node in cluster.nodes] == ["cpu"]
