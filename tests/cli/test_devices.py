# SPDX-License-Identifier: Apache-2.0
"""`hetjax devices`: the whole catalogue file, or what a word may mean."""

import json
import tomllib

import pytest

from hetjax.cli import devices
from hetjax.cluster import catalogue
from hetjax.cluster.local_devices import LocalDevice

ENTRIES = tomllib.loads(catalogue._FILE.read_text(encoding="utf-8"))["device"]
CARD = LocalDevice(
    platform="cuda", device_kind="NVIDIA L4", handle="0", memory_bytes=24 << 30
)


@pytest.fixture(autouse=True)
def two_cards_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hetjax.launchers.device_probe.accelerators_here",
        lambda environment: [CARD, CARD],
    )


def test_without_a_word_all_are_listed_and_what_this_machine_has(
    capsys: pytest.CaptureFixture[str],
):
    assert devices.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == list(ENTRIES)
    assert lines[-1] == "this machine: 2 x L4"
    assert devices.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["here"] == {"L4": 2}
    for name, entry in ENTRIES.items():
        for key, value in told["devices"][name].items():
            assert value == entry.get(key, [None])[0], (name, key)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("A100 80GB", ["A100-SXM4-80GB", "A100-80GB-PCIe"]),
        ("rtx 4090", ["GeForce-RTX-4090"]),
        ("tpu-v5", ["TPU-v5e", "TPU-v5p"]),
        ("mi3", [name for name in ENTRIES if "MI3" in name]),
    ],
)
def test_a_word_lists_what_it_may_mean(
    word: str, names: list[str], capsys: pytest.CaptureFixture[str]
):
    assert devices.main([word]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == names


def test_a_word_that_no_device_has_is_refused(capsys: pytest.CaptureFixture[str]):
    assert devices.main(["Abacus"]) == 2
    assert "no device 'Abacus'" in capsys.readouterr().err
