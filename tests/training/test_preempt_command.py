# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.preempt`: what a run hears from it, and what is refused."""

import os
from pathlib import Path
from queue import Queue

import pytest

from hetjax.preempt import main
from hetjax.training.recovery.notice_sources import Notice
from hetjax.training.recovery.notices import Watch
from tests.training.small import SIX


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The parts of a `tiny` run's directory that the command reads."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "cluster.toml").write_text(SIX.read_text())
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    out, text = capsys.readouterr()
    parts = [line.partition(":")[0] for line in text.splitlines()]
    assert (parts, out) == (["hetjax", "got", "allowed", "fix"], ""), text
    return text


@pytest.mark.parametrize("node", [None, "h20-0"])
def test_a_run_hears_what_was_asked(
    run_dir: Path, capsys: pytest.CaptureFixture[str], node: str | None
):
    assert main([str(run_dir), *(["--node", node] if node else [])]) == 0
    out = capsys.readouterr().out
    wish = "to stop" if node is None else "to release h20-0"
    assert out.startswith(f"asked the run in {run_dir} {wish} once ")
    assert f"rm {run_dir / 'preempt'}" in out
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, run_dir, {}):
        told = heard.get(timeout=5)
    assert (told.source, told.node) == ("operator", node)
    assert not (run_dir / "preempt").exists()


def test_a_request_that_replaces_one_not_heard_yet_says_so(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(run_dir), "--node", "h20-0"]) == 0
    assert "this replaces" not in capsys.readouterr().out
    assert main([str(run_dir), "--node", "v100-0"]) == 0
    assert "this replaces a pending request" in capsys.readouterr().out
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, run_dir, {}):
        assert heard.get(timeout=5).node == "v100-0"
    assert heard.empty()


@pytest.mark.parametrize("name", ["missing", "empty", "x" * 5000, "a\0b"])
def test_what_is_no_run_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    (tmp_path / "empty").mkdir()
    said = refused(capsys, str(tmp_path / name))
    assert "allowed: the directory of a run" in said
    found = f"no config.json in {str(tmp_path / name)!r}"
    assert len(name) > 4000 or found in said  # else the name is shortened
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_node_that_the_run_does_not_have_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    text = refused(capsys, str(run_dir), "--node", "h20-1")
    assert "got: node h20-1" in text and "did you mean 'h20-0'?" in text
    assert not (run_dir / "preempt").exists()


def test_a_directory_that_cannot_be_written_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    # a folder in place of the temporary file, as permissions would not stop root
    (run_dir / f".preempt.{os.getpid()}.tmp").mkdir()
    assert "cannot be used" in refused(capsys, str(run_dir))


@pytest.mark.parametrize(
    "arguments", [[], ["--nod", "h20-0"], ["{run}", "--when", "1"]]
)
def test_options_that_are_not_there_are_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    given = [word.replace("{run}", str(run_dir)) for word in arguments]
    refused(capsys, *given)
    assert not (run_dir / "preempt").exists()


def test_help_says_what_happens(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "exit code 4" in out and "--node" in out
