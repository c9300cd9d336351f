# SPDX-License-Identifier: Apache-2.0
"""The recipe for S3 in docs/stores.md, as printed except for the server's address."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetjax.__main__ import main as hetjax
from tests.checkpoint.fake_s3 import FakeS3
from tests.docs.test_pages import ROOT, few_devices, words_of_hetjax
from tests.training.small import lines

PAGE = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")
ENDPOINT = "https://minio.example:9000"
BLOCK = re.compile(r"^(<!-- skip: next [^\n]*)?\n+```bash\n(.*?)^```$", re.M | re.S)


def commands() -> Sequence[str]:
    """Return all commands except those that install packages."""
    blocks = [code for skip, code in BLOCK.findall(PAGE) if "installs" not in skip]
    return "".join(blocks).replace("\\\n", " ").splitlines()


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_compiling")
def test_the_recipe_for_s3_can_be_followed(
    s3: FakeS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    few_devices(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    s3.buckets["my-bucket"] = {}
    for command in commands():
        words = [word.replace(ENDPOINT, s3.url) for word in words_of_hetjax(command)]
        if words:
            assert hetjax(words) == (4 if "--stop-after" in words else 0), command
        else:
            subprocess.run(["bash", "-euc", command], check=True)
    assert shlex.split(commands()[0])[1] == "doctor"
    said = re.findall("`(fetched .*?)`", PAGE)
    assert said and said[0] in capsys.readouterr().out
    metrics = lines(tmp_path / "runs/elsewhere/metrics.jsonl")
    assert [line["step"] for line in metrics if "loss" in line] == [5, 6, 7, 8]
