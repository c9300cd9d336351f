# SPDX-License-Identifier: Apache-2.0
"""A run whose workers communicate within TLS is the same run."""

import os
from pathlib import Path

import pytest

from hetjax.train import main
from tests.comm.test_tls import certified, new_key
from tests.training.pair import training
from tests.training.test_workers import command, losses


@pytest.fixture
def tls(tmp_path: Path) -> list[str]:
    new_key(tmp_path, "ca", "-x509", "-days", "2", "-out", "ca.pem")
    own = certified(tmp_path, "machine", "ca")
    return ["--tls.cert", own.cert, "--tls.key", own.key, "--tls.ca", own.ca]


@pytest.mark.usefixtures("environment")
def test_losses_within_tls_are_those_without(
    tmp_path: Path, tls: list[str], cache: Path, whole: list[float]
):
    assert main(training(tmp_path / "run", cache, *tls)) == 0
    assert losses(tmp_path / "run") == whole


def test_a_part_of_tls_is_refused(
    tmp_path: Path, tls: list[str], capsys: pytest.CaptureFixture[str]
):
    os.mkfifo(tmp_path / "fifo")
    for options, words in (
        (tls[:4], "TLS without --tls.ca"),
        ([*tls[:4], "--tls.ca", f"{tmp_path}/fifo"], "fifo': a FIFO"),
        ([*tls[:4], "--tls.ca", tls[3]], "which cannot be used"),
        ([*tls, "--transport", "transfer"], "which is not encrypted"),
    ):
        given = [*options, "--launcher", "processes"]
        assert main(command(tmp_path / "run", tmp_path / "cache", *given)) == 2
        assert words in capsys.readouterr().err
