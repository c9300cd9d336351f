# SPDX-License-Identifier: Apache-2.0
"""The table of launchers: its rows, their files, and that no other file is needed."""

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest

import hetjax
from hetjax.cli.train import parse
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput, RunFailed
from hetjax.launchers.launcher import (
    LauncherFile,
    LaunchRequest,
    RemoteLauncherFile,
    launcher_file,
)
from hetjax.launchers.table import LAUNCHERS, LauncherRow
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.ending import clear_ends
from hetjax.training.launchers import launcher_of
from hetjax.training.layout.hardware import choose_hardware
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import CheckpointConfig
from hetjax.training.settings.presets import PRESETS
from hetjax.training.settings.values import changed_config
from tests.launchers import behind_env
from tests.training.small import but, small_preset

ROOM = Path(hetjax.__path__[0]) / "launchers"
HERE = [name for name, row in LAUNCHERS.items() if row.workers_are_here]


def no_work(settings: Any) -> Any:
    raise AssertionError("nobody asked for a step")


def test_every_row_has_a_file_of_the_room_and_every_launcher_there_a_row():
    text = {path: path.read_text(encoding="utf-8") for path in ROOM.rglob("*.py")}
    files = {path.stem for path in text if "\ndef open_launcher(" in text[path]}
    modules = sorted(row.module.rpartition(".")[2] for row in LAUNCHERS.values())
    assert modules == sorted(files)
    assert all(import_module(row.module) for row in LAUNCHERS.values())


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_file_defines_what_the_protocols_say_of_a_row_like_its_own(name: str):
    row, file = LAUNCHERS[name], import_module(LAUNCHERS[name].module)
    remote = [
        n for n in vars(RemoteLauncherFile) if n in ("find_cluster", "run_on_nodes")
    ]
    assert len(remote) == 2
    for function in remote:
        assert hasattr(file, function) != row.workers_are_here
    for function in ["open_launcher", *([] if row.workers_are_here else remote)]:
        protocol = LauncherFile if function == "open_launcher" else RemoteLauncherFile
        _, *asked = signature(getattr(protocol, function)).parameters.values()
        assert [*signature(getattr(file, function)).parameters.values()] == asked


def test_what_a_row_says_agrees_with_itself():
    for name, row in LAUNCHERS.items():
        assert re.fullmatch("[a-z-]+", name) and row.summary
        assert row.has_worker_processes or row.workers_are_here
        assert row.shares_disk or not row.workers_are_here
        assert bool(row.finder) != row.workers_are_here
        assert row.logs.format(logs="/run/logs").startswith(
            ("the logs in /run/logs", row.finder)
        )


@pytest.mark.parametrize("name", HERE)
def test_who_has_worker_processes_has_connections_to_others(name: str, tmp_path: Path):
    request = LaunchRequest(
        cluster=Cluster(name="box", nodes=(Node(name="a", device="cpu", count=1),)),
        only_cpu=True,
        logs=tmp_path / "logs",
        cache_dir=tmp_path,
        work=no_work,
    )
    with ExitStack() as stack:
        launcher = launcher_file(name).open_launcher(request, stack)
        is_other = launcher.connections.only is None
        assert is_other == LAUNCHERS[name].has_worker_processes != bool(launcher.pids)


def test_command_line_settings_and_help_know_exactly_the_launchers_of_the_table(
    capsys: pytest.CaptureFixture[str],
):
    config = PRESETS["tiny"].config
    for name in LAUNCHERS:
        assert parse(["tiny", "--launcher", name])[0].launcher == name
        assert changed_config(config, {"launcher": name}).launcher == name
    with pytest.raises(BadInput) as told:
        parse(["tiny", "--launcher", "elsewhere"])
    *first, last = LAUNCHERS
    assert told.value.allowed == f"--launcher with {', '.join(first)} or {last}"
    with pytest.raises(BadInput, match=f"one of {', '.join(LAUNCHERS)}"):
        changed_config(config, {"launcher": "elsewhere"})
    with pytest.raises(SystemExit):
        parse(["tiny", "--help"])
    help_ = " ".join(re.sub(r"[^\x20-\x7e]", " ", capsys.readouterr().out).split())
    assert f"--launcher {{{','.join(LAUNCHERS)}}}" in help_
    for name, row in LAUNCHERS.items():
        assert f"{row.summary} ({name})" in help_


def test_a_launcher_from_outside_needs_its_file_and_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = cast(dict[str, LauncherRow], LAUNCHERS)
    monkeypatch.setitem(rows, "behind-env", behind_env.ROW)
    preset = but(small_preset(tmp_path), launcher="behind-env", simulate=False)
    preset = replace(preset, cluster=None)
    config = preset.config
    copies = CheckpointConfig(copies=2)
    check_config(replace(config, reroute=True, checkpoint=copies))  # can be lost
    found = choose_hardware(config, preset)
    assert found.cluster == behind_env.find_cluster(None)
    assert (found.source, found.discovered) == ("the test's", True)
    with ExitStack() as stack:
        launcher = launcher_of(config, found, 0, no_work, stack)
        launcher.start(["far"])
    variables = json.loads(
        (config.run_dir / "logs/far.log").read_text().splitlines()[0]
    )
    assert variables["PLACE"] == "far"
    with pytest.raises(RunFailed, match=f"see the logs in {config.run_dir}/logs"):
        with clear_ends(config):
            raise WorkerLost("far", "ended")
