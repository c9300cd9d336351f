# SPDX-License-Identifier: Apache-2.0
"""A run in one process whose nodes leave and join gives undisturbed numbers."""

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster_files import load_cluster
from hetjax.data.batches import samples
from hetjax.data.tokens import Tokens
from hetjax.launchers.in_process import InProcessConnections
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import parse_plan, plan_json, read_plan
from hetjax.plans.worker_map import EMBEDDED
from hetjax.preempt import main as preempt
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.state import Read
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.notice_sources import Notice
from hetjax.training.recovery.notices import Watch
from hetjax.training.session import run
from hetjax.training.settings.config import OptimizerConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.worker import BatchPrefetcher, TrainingWork
from tests.training.small import (
    MODEL,
    ONE_REPLICA,
    ONE_STAGE,
    SIX,
    TWO_REPLICAS,
    but,
    events,
    lines,
    losses,
    small_preset,
)

pytestmark = pytest.mark.usefixtures("quickly")

ALL = SIX.read_text()
NODES = ["a100-0", "v100-0", "h20-0"]

Actions = Mapping[int, Callable[[], object]]


def node(name: str) -> str:
    return f'[[node]]\nname = "{name}"\ndevice = "H20"\ncount = 1\nzone = "west"\n'


NEW = node("new")


def without(name: str, text: str = ALL) -> str:
    """Return the cluster's text without this node."""
    first, *nodes = text.split("[[node]]")
    kept = [node for node in nodes if f'name = "{name}"' not in node]
    assert len(kept) < len(nodes)
    return "[[node]]".join([first, *kept])


def on(folder: Path, of: Plan, cluster: str = ALL, **changes: object) -> Preset:
    """Return a run of ten steps on a cluster file that tests may edit."""
    path = folder / "cluster.toml"
    path.write_text(cluster)
    preset = replace(small_preset(folder, of), cluster=path)
    return but(preset, cluster=path, microbatch_size=3, **changes)


def train(preset: Preset) -> int:
    return run(preset.config, preset, MODEL)


def train_with(actions: Actions, preset: Preset, patch: pytest.MonkeyPatch) -> int:
    """Train; before the step of each index in `actions`, call its action."""
    step = Driver.step

    def acting(self: Driver, number: int, *, traced: bool = False):
        actions.get(number, lambda: None)()
        return step(self, number, traced=traced)

    with patch.context() as patched:
        patched.setattr(Driver, "step", acting)
        return train(preset)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set once a run has handled an operator's request."""
    done = threading.Event()

    def watch(hear: Callable[[Notice], None], run_dir: Path | None, *_: Any) -> Watch:
        def telling(notice: Notice) -> None:
            hear(notice)
            done.set()

        return Watch(telling, run_dir, {})

    monkeypatch.setattr("hetjax.training.session.Watch", watch)
    return done


def ask_to_leave(preset: Preset, node: str, heard: threading.Event) -> None:
    assert preempt([str(preset.config.run_dir), "--node", node]) == 0
    assert heard.wait(60)


def validation(preset: Preset) -> dict[int, float]:
    found = lines(preset.config.run_dir / "metrics.jsonl")
    return {line["step"]: line["val_loss"] for line in found if "val_loss" in line}


def nodes_of(preset: Preset) -> set[str]:
    plan = read_plan(preset.config.run_dir / "plan.json")
    return {stage.node for _, _, stage in plan.stages()}


def traced_nodes(preset: Preset) -> set[str]:
    trace = json.loads((preset.config.run_dir / "trace.json").read_text())
    named = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    return {event["args"]["name"] for event in named}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    """An uninterrupted run of ten steps on all nodes."""
    preset = on(tmp_path_factory.mktemp("reference"), ONE_REPLICA)
    assert train(preset) == 0
    return preset


def test_a_node_that_leaves_and_comes_back_changes_no_number(
    reference: Preset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: threading.Event,
):
    preset = on(tmp_path, ONE_REPLICA, trace=True)  # steps 3, 4 and 5
    file, seen = tmp_path / "cluster.toml", dict[int, set[str]]()
    actions: Actions = {
        3: lambda: ask_to_leave(preset, "v100-0", heard),
        4: lambda: seen.update({4: nodes_of(preset)}),
        6: lambda: file.write_text(without("v100-0")),
        7: lambda: file.write_text(ALL),
    }
    stopping = but(preset, stop_after=9)
    assert train_with(actions, stopping, monkeypatch) == 4
    replanned, recovered = (
        events(preset.config.run_dir, "replanned"),
        events(preset.config.run_dir, "recovered"),
    )
    assert [line["step"] for line in replanned] == [3, 7]
    assert [line["step"] for line in recovered if line["bytes"]] == [3, 7]
    assert all(line["bytes"].keys() <= {"memory"} for line in recovered)
    assert seen[4] == {"a100-0", "h20-0"} and nodes_of(preset) == set(NODES)
    assert traced_nodes(preset) == set(NODES)
    kept = load_cluster(preset.config.run_dir / "cluster.toml")
    assert [node.name for node in kept.nodes] == NODES

    assert train(but(preset, trace=False)) == 0  # resume from its checkpoint
    assert events(preset.config.run_dir, "restored")[0]["step"] == 9
    found, expected = losses(preset.config.run_dir), losses(reference.config.run_dir)
    assert list(found) == list(expected) == [*range(1, 11)]
    for step in found:
        assert found[step] == pytest.approx(expected[step], rel=1e-5), step
    assert validation(preset) == pytest.approx(validation(reference), rel=1e-5)


@pytest.mark.nightly
def test_utilization_is_of_the_devices_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    peak_tflops, text = {"a100-0": 4.0, "v100-0": 2.0, "h20-0": 1.0}, ALL
    for name, peak in peak_tflops.items():
        kind = rf'(name = "{name}"\n)device = .*'
        text = re.sub(kind, rf'\1device = "cpu"\npeak_tflops = {peak}', text)
    preset = on(tmp_path, ONE_REPLICA, text, simulate=False, steps=6)
    file, plans = tmp_path / "cluster.toml", [ONE_REPLICA]
    left = without("v100-0", text)
    assert train_with({3: lambda: file.write_text(left)}, preset, monkeypatch) == 0
    plans.append(read_plan(preset.config.run_dir / "plan.json"))
    first, after = (
        sum(peak_tflops[x.node] * len(x.devices) for _, _, x in plan.stages())
        for plan in plans
    )
    assert first != after
    steps = lines(preset.config.run_dir / "metrics.jsonl")
    tflop = [
        step["mfu"] * step["step_time_s"] * (first if step["step"] <= 3 else after)
        for step in steps
        if "loss" in step
    ]
    assert tflop == pytest.approx([tflop[0]] * 6)


def test_what_this_process_has_no_devices_for_changes_nothing(
    reference: Preset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    preset, file = on(tmp_path, ONE_REPLICA), tmp_path / "cluster.toml"
    actions: Actions = {
        2: lambda: file.write_text(ALL + NEW),
        4: lambda: file.write_text(ALL.replace("count = 3", "count = 4") + NEW),
        6: lambda: file.write_text(f'name = "six"\n{NEW}'),
        8: lambda: file.write_text(ALL),
    }
    assert train_with(actions, preset, monkeypatch) == 0
    told = capsys.readouterr().out
    for words in (
        "node 'new' (1 x H20) is not used: this process",
        "node 'h20-0' (4 x H20) is used as 3 x H20: this process",
        "the run keeps its plan on a100-0, v100-0, h20-0",
    ):
        assert told.count(words) == 1, words
    assert losses(preset.config.run_dir) == losses(reference.config.run_dir)
    assert not events(preset.config.run_dir, "replanned") and not events(
        preset.config.run_dir, "recovered"
    )


def test_without_recovery_the_plan_stays_and_a_leaving_node_ends_the_run(
    reference: Preset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: threading.Event,
):
    preset = on(tmp_path, ONE_REPLICA, recovery="none")
    actions: Actions = {
        2: lambda: (tmp_path / "cluster.toml").write_text(without("v100-0")),
        5: lambda: ask_to_leave(preset, "v100-0", heard),
    }
    assert train_with(actions, preset, monkeypatch) == 4
    expected = losses(reference.config.run_dir)
    assert losses(preset.config.run_dir) == {n: expected[n] for n in range(1, 7)}
    assert nodes_of(preset) == set(NODES) and not events(
        preset.config.run_dir, "replanned"
    )
    assert events(preset.config.run_dir, "saved")[-1]["step"] == 6


def test_where_the_rest_has_no_plan_an_edit_is_refused_and_a_request_stops_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    heard: threading.Event,
):
    small = f"{NEW}memory_gib = 1e-6\n"  # too small for the model
    both = f'name = "pair"\n{node("h20-0")}{small}'
    preset, file = on(tmp_path, ONE_STAGE, both), tmp_path / "cluster.toml"
    actions: Actions = {
        2: lambda: file.write_text(f'name = "pair"\n{small}'),
        4: lambda: file.write_text(both),
        6: lambda: ask_to_leave(preset, "h20-0", heard),
    }
    assert train_with(actions, preset, monkeypatch) == 4
    # once for the edit and once for the request
    assert (
        capsys.readouterr().out.count("warning: no plan for the nodes new: device") == 2
    )
    assert events(preset.config.run_dir, "preempted")[-1]["step"] == 7
    assert not events(preset.config.run_dir, "replanned")
    assert [*losses(preset.config.run_dir)] == [*range(1, 8)]


def feed() -> BatchPrefetcher:
    text_T = np.arange(4_000, dtype=np.uint16) % MODEL.vocab_size
    found = samples([Tokens(text_T)], TWO_REPLICAS.seq_len, 0)
    return BatchPrefetcher(found, TWO_REPLICAS.global_batch)


def test_state_that_is_taken_over_is_the_same_and_is_nowhere_twice(tmp_path: Path):
    devices = jax.devices()
    nodes = {"a100-0": devices[:2], "v100-0": devices[2:3], "h20-0": devices[3:6]}
    built: list[StageRuntime] = []

    def make(settings: Mapping[str, Any]) -> TrainingWork:
        rule, plan = optimizer(OptimizerConfig(), 10), parse_plan(settings["plan"])
        built.append(StageRuntime(plan, MODEL, nodes, rule))
        return TrainingWork(runtime=built[-1], feed=feed(), held_out=())

    controller = Controller(TWO_REPLICAS, InProcessConnections(EMBEDDED, make))
    controller.build({"plan": plan_json(TWO_REPLICAS)})
    controller.initialise(0)
    controller.step(0)
    expected = {entry.name: value for entry, value in built[0].entries()}
    held = recovery.in_memory(controller, controller.workers)
    controller.adopt(ONE_REPLICA)
    controller.build({"plan": plan_json(ONE_REPLICA)})
    old, new = built
    place, had = new.restore, list[bool]()

    def restore(read: Read) -> None:
        had.extend(bool(s.masters or s.params) for s in old.stages.values())
        place(read)

    new.restore = restore
    restored = recovery.restore(
        controller, held, CheckpointStorage(directory=str(tmp_path))
    )
    assert restored is not None and restored.step == 1
    assert had == [False] * len(old.stages)
    found = {entry.name: value for entry, value in new.entries()}
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in found)
