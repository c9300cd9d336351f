# SPDX-License-Identifier: Apache-2.0
"""A function is called as a model only if a person named it, never for a file."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hetjax
from hetjax.api.planning import find_plan
from hetjax.api.simulating import simulate_plan
from hetjax.api.trained_model import TrainedModel
from hetjax.errors import BadInput
from hetjax.eval import main as evaluate
from hetjax.export import main as export
from hetjax.models.named import TypedName, load_named
from hetjax.plan import main as plan
from hetjax.plans.plan_files import plan_json, write_plan
from hetjax.sample import main as sample
from hetjax.simulate import main as simulate
from hetjax.train import main as train
from hetjax.training.observers.run_reports import report_of
from hetjax.training.worker import warm_up, work_of
from tests.training.small import LICENCE, ONE_REPLICA, SIX

NAME = "somebodys_model:model"
MODULE = """
import functools, os
from os import abort
from pathlib import Path
from tests.training.small import MODEL

Path({!r}).open("a").write("imported ")
ends = functools.partial(os._exit, 3)

def model():
    Path({!r}).open("a").write("called ")
    return MODEL

def needs_more(size):
    return MODEL

made = functools.partial(lambda given: given, MODEL)
nothing = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module, the file in which it records calls, and a run."""
    folder = tmp_path_factory.mktemp("code")
    code = MODULE.format(*[str(folder / "did.txt")] * 2)
    (folder / "somebodys_model.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        shutil.copyfile(LICENCE, folder / "text.txt")
        write_plan(folder / "plan.json", replace(ONE_REPLICA, model=NAME))
        assert train(training(folder)) == 0  # a person typed its name
        yield folder
    sys.modules.pop("somebodys_model", None)


def training(folder: Path, *more: str) -> list[str]:
    text, cache = folder / "text.txt", folder / "cache"
    words = f"{NAME} --run-dir {folder / 'run'} --steps 1 --seq-len 16 --global-batch "
    words += f"6 --cluster {SIX} --planner even --microbatch-size 2 --simulate "
    words += f"--data.path {text} --data.cache-dir {cache} --dtype float32 "
    words += "--evaluation.sample-tokens 0 --evaluation.num-batches 1"
    return [*words.split(), *more]


@pytest.fixture
def did(folder: Path) -> Callable[[], str]:
    """A function that returns what the module has done in this test."""
    sys.modules.pop("somebodys_model", None)
    path = folder / "did.txt"
    path.unlink(missing_ok=True)
    return lambda: path.read_text() if path.exists() else ""


COMMANDS: dict[str, Callable[[Path], int]] = {
    "simulate": lambda f: simulate([f"{f}/plan.json", "--cluster", str(SIX)]),
    "plan": lambda f: plan(["--from", f"{f}/plan.json", "--cluster", str(SIX)]),
    "sample": lambda f: sample([f"{f}/run", "--tokens", "1"]),
    "sample on plan": lambda f: sample([f"{f}/run", "--on", "plan"]),
    "eval": lambda f: evaluate([f"{f}/run", "--data", f"{f}/text.txt"]),
    "export": lambda f: export([f"{f}/run", "--to", f"{f}/exported"]),
}
CALLS: dict[str, Callable[[Path], object]] = {
    "simulate_plan": lambda f: simulate_plan(f / "plan.json", cluster=SIX, quiet=True),
    "find_plan": lambda f: find_plan(current=f / "plan.json", cluster=SIX, quiet=True),
    "TrainedModel": lambda f: TrainedModel(f / "run"),
    "on plan": lambda f: TrainedModel(f / "run", on="plan"),
    "load_named": lambda f: load_named(NAME),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_calls_what_a_file_names(
    command: str,
    folder: Path,
    did: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
):
    assert COMMANDS[command](folder) == 2
    heard = capsys.readouterr().err
    assert NAME in heard and all(f"{p}: " in heard for p in ("got", "allowed", "fix"))
    assert command == "export" or f"--allow-model-code {NAME}" in heard
    assert did() == ""


@pytest.mark.parametrize("call", CALLS)
def test_no_function_calls_what_a_file_names(
    call: str, folder: Path, did: Callable[[], str]
):
    with pytest.raises(BadInput, match="a function that a file names"):
        CALLS[call](folder)
    assert did() == ""


def test_a_report_of_such_a_run_says_why_it_predicts_nothing(
    folder: Path, did: Callable[[], str]
):
    assert "a function that a file names" in repr(report_of(folder / "run"))
    assert did() == ""
    report = report_of(folder / "run", allow_model_code=NAME)
    assert "a function" not in repr(report) and did().startswith("imported called ")


@pytest.mark.parametrize("command", ["simulate", "sample"])
def test_what_is_allowed_by_its_name_is_called(
    command: str, folder: Path, did: Callable[[], str]
):
    arguments = {
        "simulate": [f"{folder}/plan.json", "--cluster", str(SIX)],
        "sample": [f"{folder}/run", "--tokens", "1"],
    }[command]
    main = {"simulate": simulate, "sample": sample}[command]
    assert main([*arguments, "--allow-model-code", "somebodys_model:other"]) == 2
    assert did() == ""
    assert main([*arguments, "--allow-model-code", NAME]) == 0
    assert did().startswith("imported called ")


def test_typed_names_are_called_and_a_run_resumes_when_its_model_is_typed_again(
    folder: Path, did: Callable[[], str]
):
    assert train(training(folder, "--steps", "2")) == 0
    assert did().startswith("imported called ")
    for call in (
        lambda: hetjax.load_model(NAME),
        lambda: simulate_plan(ONE_REPLICA, model=NAME, cluster=SIX, quiet=True),
    ):
        before = did()
        call()
        assert did() == before + "called "


@pytest.mark.parametrize(
    "name",
    [
        "os:abort",
        "builtins:exit",
        "signal:pause",
        "time:sleep",
        "posix:abort",
        "os.path:exists",
        "somebodys_model:abort",
        "somebodys_model:ends",
    ],
)
def test_functions_of_the_standard_library_are_refused_even_if_typed(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(BadInput, match="standard library"):
        load_named(TypedName(name))
    of_file = json.loads(plan_json(ONE_REPLICA)) | {"model": name}
    (tmp_path / "plan.json").write_text(json.dumps(of_file))
    words = [str(tmp_path / "plan.json"), "--cluster", str(SIX)]
    assert simulate([*words, "--allow-model-code", name]) == 2
    assert simulate([*words, "--model", name]) == 2
    assert train([name, "--run-dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("standard library") == 3
    assert os.getpid()  # nothing was aborted


@pytest.mark.parametrize("name", ["needs_more", "made", "nothing", "not_there"])
def test_what_gives_no_model_is_refused(name: str, folder: Path):
    load = load_named
    if name == "made":
        assert load(TypedName(f"somebodys_model:{name}")).name == "small"
        return
    with pytest.raises(BadInput, match=f"somebodys_model:{name}"):
        load(TypedName(f"somebodys_model:{name}"))


@pytest.mark.parametrize("only_code", ["", "somebodys_model:other"])
def test_a_worker_that_was_told_so_calls_no_function_that_its_controller_names(
    only_code: str, folder: Path, did: Callable[[], str]
):
    """The worker has joined by itself and gets the settings of the run."""
    run_dir = folder / "run"
    told = {
        "config": json.loads((run_dir / "config.json").read_text())["config"],
        "cluster": (run_dir / "cluster.toml").read_text(),
        "plan": (run_dir / "plan.json").read_text(),
        "dataset": "",
        "sha256": {},
    }
    node = next(iter(ONE_REPLICA.nodes))
    for make in (work_of, warm_up):
        with pytest.raises(BadInput, match="a function that a file names"):
            make(node, told, only_code)
    assert did() == ""
