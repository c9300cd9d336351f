# SPDX-License-Identifier: Apache-2.0
"""The attacks of the notes: complete, stored line by line, resumed where they ended."""

import json
from pathlib import Path

import pytest

from experiments.attacks import __main__ as command
from experiments.attacks.attack import Attack, Outcome

FINDINGS = [f"F{number}" for number in range(1, 18)]


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attacks that do nothing, except for two; the list of those done so far."""
    done = list[str]()

    def attack(finding: str) -> Attack:
        def act(folder: Path) -> Outcome:
            done.append(finding)
            assert folder.is_dir()
            if finding == "F2":
                raise ValueError("it cannot be done here")
            return Outcome(happened="it", wrong=("late",) if finding == "F3" else ())

        return Attack(finding=finding, done="this", expected="that", act=act)

    attacks_ = {finding: attack(finding) for finding in ("F1", "F2", "F3", "F4")}
    monkeypatch.setattr(command, "ATTACKS", attacks_)
    return done


def rows(output: Path) -> dict[str, dict]:
    return {row["finding"]: row for row in map(json.loads, output.open())}


def test_each_finding_of_the_notes_has_its_attack():
    assert [*command.ATTACKS] == FINDINGS


def test_what_is_not_as_expected_or_cannot_be_done_is_wrong(
    acted: list[str], tmp_path: Path
):
    output = tmp_path / "rows"
    assert command.main(["--output", str(output)]) == 1
    found = rows(output)
    assert {name: row["wrong"] for name, row in found.items()} == {
        "F1": [],
        "F2": ["ValueError"],
        "F3": ["late"],
        "F4": [],
    }
    assert [name for name, row in found.items() if row["ok"]] == ["F1", "F4"]


def test_a_second_call_goes_on_with_those_that_the_file_does_not_have(
    acted: list[str], tmp_path: Path
):
    output = tmp_path / "rows"
    assert command.main(["--only", "F1", "--output", str(output)]) == 0
    assert command.main(["--only", "F1", "F4", "--output", str(output)]) == 0
    assert acted == ["F1", "F4"] == [*rows(output)]


def test_the_attacks_on_sockets_are_withstood(tmp_path: Path):
    for finding in ("F4", "F8"):
        row = command.attacked(command.ATTACKS[finding], tmp_path / finding)
        assert row["ok"], row
