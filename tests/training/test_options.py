# SPDX-License-Identifier: Apache-2.0
"""Unknown options, wrong and missing values: what the errors of commands say."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import pytest

from hetjax.cli import (
    demo,
    devices,
    doctor,
    eval,
    export,
    launch,
    plan,
    preempt,
    profile,
    sample,
    simulate,
    train,
    worker,
)
from hetjax.cli.options.invalid import allowed_values

Main = Callable[[Sequence[str] | None], int]
COMMANDS = [
    (train.main, ["tiny", "--stpes", "3"], "--steps", "hetjax.train tiny"),
    (train.main, ["tiny", "--optimiser.name", "sgd"], "--optimizer.name", "train tiny"),
    (plan.main, ["tiny", "--global_bach", "3"], "--global-batch", "hetjax.plan tiny"),
    (plan.main, ["--modle", "tiny"], "--model", "hetjax.plan"),
    (simulate.main, ["tiny", "--scedule", "1f1b"], "--schedule", "hetjax.simulate"),
    (profile.main, ["tiny", "--tensors", "2"], "--tensor", "hetjax.profile tiny"),
    (preempt.main, ["runs/tiny", "--noed", "a"], "--node", "hetjax.preempt"),
    (eval.main, ["runs/tiny", "--data.path", "a"], "--data", "hetjax.eval"),
    (train.main, ["tiny", "--run", "a"], "--run-dir", "train tiny"),
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


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (["--to", "out"], "hetjax.export RUN_DIR --to out"),
        (["--to", "out", "--run-dir", "runs/a b"], "export 'runs/a b' --to out"),
        (["--run-dir=runs/a", "--to", "out"], "hetjax.export runs/a --to out"),
    ],
)
def test_a_missing_positional_argument_goes_before_what_was_typed(
    typed: list[str], fix: str, capsys: pytest.CaptureFixture[str]
):
    said = refusal(export.main, typed, capsys)
    assert said["got"] == "no RUN_DIR"
    assert said["allowed"] == "python -m hetjax.export RUN_DIR [options]"
    assert said["fix"].endswith(fix)


WRONG = [
    (["--steps", "ten"], "--steps ten", "--steps with a whole number"),
    (["--steps=1.5"], "--steps 1.5", "--steps with a whole number"),
    (
        ["--optimizer.beta1", "x"],
        "--optimizer.beta1 x",
        "--optimizer.beta1 with a ",
    ),
    (["--replan", "yes"], "--replan yes", "--replan with say, auto or never"),
    (["--data.pack", "maybe"], "--data.pack maybe", "--data.pack with True or False"),
    (["--plan"], "--plan without a value", "--plan with a path"),
    (["--observer"], "--observer without a value", "--observer with text; repeat"),
]


@pytest.mark.parametrize(("typed", "got", "allowed"), WRONG)
def test_a_wrong_or_missing_value_says_what_its_type_allows(
    typed: list[str], got: str, allowed: str, capsys: pytest.CaptureFixture[str]
):
    said = refusal(train.main, ["tiny", *typed], capsys)
    assert said["got"] == got and said["allowed"].startswith(allowed)


@pytest.mark.parametrize(
    ("main", "typed", "fix"),
    [
        (train.main, ["tiny", "--steps", "ten"], "--steps 160, for example"),
        (train.main, ["tiny", "--evaluation.prompt"], "'Return the', for example"),
        (train.main, ["tiny", "--recovery", "local"], "did you mean 'local-first'?"),
        (plan.main, ["tiny", "--remat", "none,ful"], "did you mean 'full'?"),
        (plan.main, ["tiny", "--lora.frozen", "nf5"], "did you mean 'nf4'?"),
        (eval.main, ["runs/tiny", "--step", "x"], "--help-all describes --step"),
    ],
)
def test_what_to_type_is_meant_or_an_example(
    main: Main, typed: list[str], fix: str, capsys: pytest.CaptureFixture[str]
):
    assert refusal(main, typed, capsys)["fix"].endswith(fix)


@pytest.mark.parametrize("name", ["--tokens", "--max-tokens", "--max-new-tokens"])
def test_a_wrong_value_is_shown_after_the_name_that_was_typed(
    name: str, capsys: pytest.CaptureFixture[str]
):
    said = refusal(sample.main, ["runs/tiny", name, "many"], capsys)
    assert said["got"] == f"{name} many"
    assert said["allowed"] == "--tokens with a whole number"


@pytest.mark.parametrize(
    ("main", "typed", "fix"),
    [
        (train.main, ["--simulate", "False"], "--no-simulate"),
        (train.main, ["--simulate=no"], "--no-simulate"),
        (train.main, ["--no-simulate", "true"], "--no-simulate"),
        (train.main, ["--no_simulate=0"], "--simulate"),
        (train.main, ["--trace", "no"], "leave --trace out"),
        (train.main, ["--trace", "yes"], "--trace"),
        (plan.main, ["--pareto", "yes"], "--pareto"),
        (plan.main, ["--pareto", "no"], "leave --pareto out"),
    ],
)
def test_a_switch_with_a_value_says_how_to_type_it(
    main: Main, typed: list[str], fix: str, capsys: pytest.CaptureFixture[str]
):
    said = refusal(main, ["tiny", *typed], capsys)
    assert said["allowed"].endswith(" without a value")
    assert said["fix"] == fix


def kinds_of(settings: type) -> Iterator[tuple[str, Any]]:
    """Yield the names and types of all fields, including those of groups."""
    for name, kind in get_type_hints(settings).items():
        is_group = isinstance(kind, type) and is_dataclass(kind)
        yield from kinds_of(kind) if is_group else [(name, kind)]


@pytest.mark.parametrize(
    "options",
    [
        *(demo.DemoOptions, devices.DevicesOptions, doctor.DoctorOptions),
        *(eval.EvalOptions, export.ExportOptions, launch.SlurmOptions),
        *(plan.PlanOptions, preempt.PreemptOptions, profile.ProfileOptions),
        *(sample.SampleOptions, simulate.SimulateOptions, train.TrainOptions),
        worker.WorkerOptions,
    ],
)
def test_every_option_has_words_for_its_values(options: type):
    kinds = dict(kinds_of(options))
    assert kinds
    assert not {n: k for n, k in kinds.items() if allowed_values(k) is None}
