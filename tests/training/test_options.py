# SPDX-License-Identifier: Apache-2.0
"""Unknown options: every command names the nearest ones, and only those."""

from collections.abc import Callable, Sequence

import pytest

from hetjax import plan, preempt, profile, simulate, train

Main = Callable[[Sequence[str] | None], int]
COMMANDS = [
    (train.main, ["tiny", "--stpes", "3"], "--steps", "hetjax.train tiny"),
    (train.main, ["tiny", "--optimiser.name", "sgd"], "--optimizer.name", "train tiny"),
    (plan.main, ["tiny", "--global_bach", "3"], "--global-batch", "hetjax.plan tiny"),
    (plan.main, ["--modle", "tiny"], "--model", "hetjax.plan"),
    (simulate.main, ["tiny", "--scedule", "1f1b"], "--schedule", "hetjax.simulate"),
    (profile.main, ["tiny", "--tensors", "2"], "--tensor", "hetjax.profile tiny"),
    (preempt.main, ["runs/tiny", "--noed", "a"], "--node", "hetjax.preempt"),
]


def refusal(
    main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Return the parts of the command's message on bad input, by name."""
    assert main(arguments) == 2
    _, *lines = capsys.readouterr().err.splitlines()
    return {part: text for part, _, text in (line.partition(": ") for line in lines)}


@pytest.mark.parametrize(("main", "arguments", "meant", "program"), COMMANDS)
def test_an_unknown_option_names_the_three_nearest(
    main: Main,
    arguments: list[str],
    meant: str,
    program: str,
    capsys: pytest.CaptureFixture[str],
):
    said = refusal(main, arguments, capsys)
    named, _, others = said["allowed"].partition(", ...: ")
    assert 1 <= len(named.split(", ")) <= 3 and meant in named.split(", ")
    assert f"{program} --help" in others
    assert said["fix"] == f"did you mean {meant!r}?"


def test_an_option_like_no_other_is_sent_to_the_help(
    capsys: pytest.CaptureFixture[str],
):
    said = refusal(train.main, ["tiny", "--zzzzzzzz", "3"], capsys)
    listed = "python -m hetjax.train tiny --help-all"
    assert said["allowed"] == f"options: {listed} lists them all"
    assert said["fix"] == listed


def test_a_value_of_no_option_is_told_apart(capsys: pytest.CaptureFixture[str]):
    said = refusal(train.main, ["tiny", "3"], capsys)
    assert said["got"] == "'3', which belongs to no option"
    assert "leave '3' out" in said["fix"]
