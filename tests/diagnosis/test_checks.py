# SPDX-License-Identifier: Apache-2.0
"""From facts to findings: each cause is named, with the command that helps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.diagnosis.checks import diagnosis
from hetjax.diagnosis.facts import (
    ClusterFile,
    Facts,
    Installed,
    Peer,
    RunDirectory,
    Seen,
    Started,
)
from hetjax.mesh.accelerators import NVIDIA, Visible
from hetjax.mesh.driver import Card, read_cards
from hetjax.report.diagnosis import Diagnosis, Finding

CARD = Visible(accelerator=NVIDIA, file=Path("/dev/nvidia0"))
CPU = Seen(name="cpu", platform="cpu", count=8)
T4 = Seen(name="T4", platform="gpu", count=2, memory_gib=14.7, compute_capability="7.5")
MACHINE = Installed(
    system="Python 3.12.4, Linux",
    versions={"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-cuda12-plugin": "0.12.0.1"},
    visible=CARD,
    cards=(
        Card(
            uuid="GPU-1",
            name="Tesla T4",
            memory_gib=15.0,
            is_cut=False,
            compute_capability="7.5",
            driver="550.54.15",
        ),
    ),
)
WELL = Facts(installed=MACHINE, started=Started(devices=(T4,)))


def bad(facts: Facts) -> list[Finding]:
    return [f for f in diagnosis(facts).findings if f.level != "ok"]


def installed(**changes) -> Facts:
    return replace(WELL, installed=replace(MACHINE, **changes))


def test_a_machine_that_is_well_has_only_good_findings():
    found = diagnosis(WELL)
    assert found.problems == 0 and not bad(WELL)
    told = str(found)
    assert "2 x T4, 14.7 GiB each, compute capability 7.5: computes in float16" in told
    assert told.endswith("no problem found")


@pytest.mark.parametrize(
    ("plugin", "capability", "driver", "said"),
    [
        (
            "cuda12",
            "8.6",
            "520.61.05",
            "driver 525 or newer; this machine has 520.61.05",
        ),
        ("cuda13", "8.6", "550.54.15", "driver 580 or newer"),
        ("cuda13", "7.0", "580.65.06", "compute capability 7.5; this machine has"),
        ("cuda12", "5.0", "535.10", "compute capability 5.2"),
    ],
)
def test_too_old_a_driver_or_card_is_told_with_other_wheels(
    plugin: str, capability: str, driver: str, said: str
):
    versions = {"jax": "0.12", "jaxlib": "0.12", f"jax-{plugin}-plugin": "0.12"}
    card = replace(MACHINE.cards[0], compute_capability=capability, driver=driver)
    (found,) = bad(installed(versions=versions, cards=(card,)))
    assert (found.check, found.level) == ("driver", "problem") and said in found.found
    assert ("hetjax[cuda12]" in found.fix) == (plugin == "cuda13")


@pytest.mark.parametrize(
    ("cudnn", "capability", "fits"),
    [
        ("9.10.2.21", "7.0", True),
        ("9.11.0.98", "7.0", False),
        ("9.28.0.42", "6.0", False),
        ("9.28.0.42", "7.5", True),
        ("10.0.0.1", "7.0", False),
    ],
)
def test_cudnn_has_no_code_for_old_cards(cudnn: str, capability: str, fits: bool):
    card = replace(MACHINE.cards[0], compute_capability=capability)
    versions = {**MACHINE.versions, "nvidia-cudnn-cu12": cudnn}
    found = bad(installed(versions=versions, cards=(card,)))
    assert [f.fix for f in found] == ["pip install 'hetjax[cuda12-volta]'"] * (not fits)


@pytest.mark.parametrize(
    ("variables", "level", "cause", "fix"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "problem",
            "CUDA_VISIBLE_DEVICES is set to ''",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "problem", "set to '-1'", "unset CUDA"),
        (
            {"JAX_PLATFORMS": "cpu"},
            "warning",
            "because of JAX_PLATFORMS=cpu",
            "unset JAX_PL",
        ),
        ({}, "problem", "although its plugin is installed", "correct what JAX reports"),
        (
            {"CUDA_VISIBLE_DEVICES": "0"},
            "problem",
            "its plugin is installed",
            "correct what",
        ),
    ],
)
def test_why_jax_has_only_the_cpu_beside_a_card(variables, level, cause, fix):
    facts = replace(installed(variables=variables), started=Started(devices=(CPU,)))
    (found,) = bad(facts)
    assert (found.check, found.level) == ("devices", level)
    assert cause in found.found and "an NVIDIA GPU (/dev/nvidia0)" in found.found
    assert found.fix.startswith(fix)


def test_two_kinds_in_a_process_and_a_kind_that_nobody_knows():
    other = replace(T4, name="RTX-9999", count=1)
    found = bad(replace(WELL, started=Started(devices=(T4, other))))
    assert [f.level for f in found] == ["warning", "warning"]
    assert "not in the catalogue" in found[0].found
    assert "--probe" in found[0].fix and "--launcher processes" in found[1].fix


@pytest.mark.parametrize(
    ("seconds", "level"),
    [(0.2, []), (-1.5, ["warning"]), (90.0, ["problem"]), (-90.0, ["problem"])],
)
def test_clocks_may_differ_by_a_second(seconds: float, level: list[str]):
    peer = Peer(address="b:7431", gbit_per_s=9.0, clock_ahead_s=seconds)
    found = bad(replace(WELL, peers=(peer,)))
    assert [f.level for f in found] == level
    way = "ahead of" if seconds > 0 else "behind"
    assert all(f"b:7431 is {abs(seconds):.1f} s {way} this" in f.found for f in found)


def test_a_link_that_is_slower_than_plans_count_on_says_what_to_write():
    file = ClusterFile(path="mine.toml", kinds={"T4": 2}, network_gbit_per_s=10.0)
    slow = Peer(address="b:7431", gbit_per_s=0.94, latency_ms=0.2)
    (found,) = bad(replace(WELL, cluster=file, peers=(slow,)))
    assert found.check == "links" and "plans count on 10 Gbit/s" in found.found
    assert "bandwidth_gbit_per_s = 0.94, latency_ms = 0.2" in found.fix
    fast = replace(slow, gbit_per_s=5.1)
    assert not bad(replace(WELL, cluster=file, peers=(fast,)))


def test_a_cluster_file_without_what_is_here_is_told():
    file = ClusterFile(path="mine.toml", kinds={"T4": 1})
    (found,) = bad(replace(WELL, cluster=file))
    assert found.found == "this machine has 2 x T4; mine.toml has 1"


@pytest.mark.parametrize(
    ("free_gib", "speed", "levels"),
    [
        (100.0, 500.0, []),
        (5.0, 500.0, ["warning"]),
        (0.5, 500.0, ["problem"]),
        (100.0, 20.0, ["warning"]),
    ],
)
def test_room_and_speed_of_the_disk_are_judged(free_gib, speed, levels):
    found = RunDirectory(path="runs/x", free_gib=free_gib, write_mb_per_s=speed)
    assert [f.level for f in bad(replace(WELL, run_dir=found))] == levels


def test_cards_are_read_as_the_driver_tells_them():
    told = "GPU-1, Tesla V100-SXM2-16GB, 16384, [N/A], 7.0, 535.183.01\nnone other\n"
    (card,) = read_cards(told)
    assert (card.uuid, card.is_cut) == ("GPU-1", False)
    assert read_cards(told.replace("16384", "[N/A]"))[0].memory_gib == 0
    assert read_cards(told.replace("[N/A]", "Enabled"))[0].is_cut
    assert (card.memory_gib, card.compute_capability) == (16.0, "7.0")
    assert (card.name, card.driver) == ("Tesla V100-SXM2-16GB", "535.183.01")


def test_cards_of_one_kind_are_told_of_once():
    (card,) = MACHINE.cards
    both = replace(MACHINE, cards=(card, replace(card, uuid="GPU-2")))
    assert diagnosis(replace(WELL, installed=both)) == diagnosis(WELL)


def test_json_and_html_have_every_finding():
    found = Diagnosis((Finding(check="a", level="problem", found="b", fix="c"),))
    assert json.loads(found.json()) == {
        "problems": 1,
        "findings": [{"check": "a", "level": "problem", "found": "b", "fix": "c"}],
    }
    page = found._repr_html_()
    assert "<td>b</td><td>c</td>" in page and "1 problem found" in page
