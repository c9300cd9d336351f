# SPDX-License-Identifier: Apache-2.0
"""What a run is refused for before a plan is searched, which may take minutes."""

import socket
from pathlib import Path

import pytest

from hetjax.train import main
from hetjax.training import start

CLUSTER = """
name = "one"
[[node]]
name = "box"
device = "A100-SXM4-80GB"
count = 2
"""


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a run that needs a plan, which is never searched."""

    def search(*args: object, **named: object) -> None:
        raise AssertionError("a plan is searched")

    monkeypatch.setattr(start, "choose_plan", search)
    cluster = tmp_path / "one.toml"
    cluster.write_text(CLUSTER)
    run_dir = tmp_path / "run"
    words = ["tiny", "--cluster", str(cluster), "--simulate"]
    return [*words, "--run-dir", str(run_dir), "--steps", "3"]


def test_the_search_is_what_would_follow(typed: list[str]):
    with pytest.raises(AssertionError, match="a plan is searched"):
        main(typed)


def test_a_missing_tokenizer(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*typed, "--data.tokenizer", str(tmp_path / "none")]) == 2
    assert "none/tokenizer.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_foreign", [True, False])
def test_an_address_at_which_machines_cannot_join(
    is_foreign: bool, typed: list[str], capsys: pytest.CaptureFixture[str]
):
    joins = [*typed, "--launcher", "join", "--join.address"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        address = "192.0.2.1:7411" if is_foreign else f"127.0.0.1:{port}"
        assert main([*joins, address]) == 2
    said = capsys.readouterr().err
    assert f"got: --join.address {address}: " in said
    assert ("Cannot assign" if is_foreign else "already in use") in said
