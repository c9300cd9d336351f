# SPDX-License-Identifier: Apache-2.0
"""`hetjax worker`: what it refuses before it connects."""

import io
import os
import re
from pathlib import Path

import pytest

from hetjax.cli.worker import main as worker

TOKEN = "0123456789abcdef" * 4
FINGERPRINT = f"sha256:{TOKEN}"
GIVEN = {"join": "127.0.0.1:9", "node": "a", "fingerprint": FINGERPRINT}


def words(**given: str | None) -> list[str]:
    found = {**GIVEN, **given}
    options = [(f"--{name.replace('_', '-')}", v) for name, v in found.items() if v]
    return [word for pair in options for word in pair]


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"join": None}, "no --join"),
        ({"node": None}, "no --node"),
        ({"fingerprint": None}, "no --fingerprint"),
        ({"fingerprint": FINGERPRINT.upper()}, "--fingerprint SHA256"),
        ({"fingerprint": FINGERPRINT[:-1]}, "--fingerprint sha256"),
        ({"join": "here"}, "--join here"),
        ({"join": "here:0"}, "--join here:0"),
        ({"join": "here:70000"}, "--join here:70000"),
        ({"join": "0.0.0.0:80"}, "--join 0.0.0.0:80"),
        ({"node": "../a"}, "--node '../a'"),
        ({"allow_model_code": "tiny"}, "--allow-model-code tiny"),
        ({"allow_model_code": "os:abort"}, "standard library"),
        ({}, "no token on standard input"),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(
    given: dict[str, str | None], said: str, capsys: pytest.CaptureFixture[str]
):
    assert worker(words(**given)) == 2
    heard = capsys.readouterr().err
    assert said in heard
    assert all(f"{part}: " in heard for part in ("got", "allowed", "fix"))


def test_a_token_file_is_its_owners_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, mode, said in (
        (file, 0o644, "mode 644"),
        (file, 0o640, "mode 640"),
        (file, 0o602, "mode 602"),
        (pipe, 0o600, "not a regular file"),
        (tmp_path / "none", None, "No such file"),
        (tmp_path, None, "not a regular file"),
    ):
        if mode is not None:
            path.chmod(mode)
        assert worker(words(token_file=str(path))) == 2
        heard = capsys.readouterr().err
        assert said in heard and TOKEN not in heard
        assert ("fix: chmod 600" in heard) is said.startswith("mode")
        assert ("fix: copy the file" in heard) is not said.startswith("mode")
    file.chmod(0o600)
    link = tmp_path / "link"  # as Kubernetes stores secrets
    link.symlink_to(file)
    assert worker(words(token_file=str(link))) == 1  # no listener
    assert "no answer from a run at 127.0.0.1:9" in capsys.readouterr().err


def test_a_file_of_another_user_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert worker(words(token_file=str(file))) == 2
    assert f"owned by user {owner}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "short", f"{TOKEN}0", TOKEN.upper(), "x" * 9999])
def test_what_is_no_token_is_not_shown(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert worker(words()) == 2
    heard = capsys.readouterr().err
    assert "no token on standard input" in heard
    assert not re.search(r"short|x{9}|[0-9A-F]{65}", heard)
