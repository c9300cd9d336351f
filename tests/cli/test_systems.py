# SPDX-License-Identifier: Apache-2.0
"""Systems other than Linux: the portable way, or a refusal."""

import builtins
import ctypes
import sys
from typing import Any

import pytest

from hetjax.__main__ import main
from hetjax.comm.heart import is_stopped
from hetjax.diagnosis import gathering
from hetjax.mesh.process_setup import keep_freed_memory, malloc_environment


def test_windows_itself_is_refused_in_three_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["train", "tiny"]) == 2
    told = capsys.readouterr().err.splitlines()
    parts = [line.partition(":")[0] for line in told]
    assert parts == ["hetjax", "got", "allowed", "fix"]
    assert "WSL 2" in told[2] and "wsl --install" in told[3]


def test_nothing_of_glibc_is_asked_for_on_macos(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("there is no glibc")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    keep_freed_memory()
    assert malloc_environment() == {}


def test_without_proc_a_process_counts_as_one_that_runs(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(path: Any, *_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(builtins, "open", refuse)
    assert not is_stopped(1)


def test_wsl_is_named(monkeypatch: pytest.MonkeyPatch):
    release = "5.15.153.1-microsoft-standard-WSL2"
    monkeypatch.setattr(gathering.platform, "release", lambda: release)
    assert gathering.installed().system.endswith("Linux (WSL)")
