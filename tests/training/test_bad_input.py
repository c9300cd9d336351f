# SPDX-License-Identifier: Apache-2.0
"""Bad input: exit code 2, a message with got, allowed and fix, and no writes."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.checkpoint.reader import Checkpoint
from hetjax.errors import BadInput
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.plans.plan_files import plan_json, read_plan
from hetjax.train import main
from hetjax.training.directory import rundir
from hetjax.training.directory.rundir import locked
from hetjax.training.session import run
from hetjax.training.settings.presets import PRESETS
from tests.training.small import (
    MODEL,
    MODEL_CONFIG,
    SIX,
    TWO_REPLICAS,
    but,
    small_preset,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where `small` is a preset with its run in ./run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)
    monkeypatch.setitem(PRESETS, "small", small_preset(Path(".")))
    return tmp_path


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has done two steps."""
    directory = tmp_path_factory.mktemp("two_steps")
    preset = but(small_preset(directory), stop_after=2)
    assert run(preset.config, preset, MODEL) == 4
    return directory


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command, which must refuse and write nothing; return its message."""
    ignored = {str(folder / "text.txt"), str(folder / "plan.json")}  # of the fixture
    before = contents(folder)
    assert main(arguments) == 2
    text = capsys.readouterr().err
    parts = [line.partition(":")[0] for line in text.splitlines()]
    assert parts == ["hetjax", "got", "allowed", "fix"], text
    after = contents(folder)
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    cached = {path for path in changed if str(folder / "cache") in path}
    held = {path for path in changed if str(folder / "run" / ".lease") in path}
    assert changed - cached - held <= ignored
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smal"], ["preset 'smal'", "tiny", "did you mean 'small'?"]),
        (["small", "--stpes", "3"], ["'--stpes'", "did you mean '--steps'?"]),
        (["small", "3"], ["'3'", "leave '3' out"]),
        (["--steps", "3"], ["'--steps'", "PRESET [options]"]),
        (["small", "--steps", "0"], ["steps = 0", "1 <= steps", "--steps 1"]),
        (["small", "--seed", "-1"], ["seed = -1", "--seed 0"]),
        (
            ["small", "--optimizer.learning-rate", "0"],
            ["optimizer.learning_rate = 0", "--optimizer.learning-rate"],
        ),
        (["small", "--optimizer.beta2", "1"], ["optimizer.beta2 = 1", "<= 0.999999"]),
        (
            ["small", "--optimizer.name", "sophia"],
            [
                "sophia, a rule that needs an estimate of the Hessian",
                "adamw, adafactor",
            ],
        ),
        (
            ["small", "--optimizer.name", "muon", "--optimizer.state-bits", "8"],
            ["--optimizer.state-bits 8 with", "muon", "adamw, lion and sgd"],
        ),
        (["small", "--model", "smal"], ["model preset 'smal'", "small"]),
        (["small", "--plan", "none.json"], ["'none.json'", "No such file"]),
        (["small", "--cluster", "none.toml"], ["'none.toml'", "No such file"]),
        (["small", "--data.path", "none.txt"], ["none.txt", "--data.path"]),
        (
            ["small", "--data.path", "None", "--data.mixture", "none.txt=1"],
            ["no file or folder at none.txt", "fix: correct --data.mixture\n"],
        ),
        (
            ["small", "--data.path", "None", "--data.mixture", "text.txt=0"],
            ["'text.txt=0' in --data.mixture", "a weight above 0"],
        ),
        (
            ["small", "--data.mixture", "text.txt=1"],
            ["--data.path text.txt with --data.mixture", "leave --data.path out"],
        ),
        (["small", "--seq-len", "32", "--run-dir", "x"], ["seq_len = 32", "<= 16"]),
        (["small", "--run-dir", "text.txt"], ["'text.txt'", "--run-dir"]),
        (["small", "--run-dir", "."], ["no config.json", "--run-dir"]),
        (["small", "--run-dir", "x" * 300], ["cannot be used", "File name too long"]),
        (
            ["small", "--steps", "abc"],
            ["got: --steps abc\n", "--steps 10, for example"],
        ),
        (["small", "--steps=1.5"], ["got: --steps 1.5\n", "a whole number"]),
        (["small", "--steps"], ["got: --steps without a value\n", "a whole number"]),
        (
            ["small", "--dtype", "float8"],
            ["got: --dtype float8\n", "bfloat16, float16 or"],
        ),
        (["small", "--loss-scale-init", "1000"], ["= 1000", "2**n", "256"]),
        (
            ["small", "--optimizer.learning_rate", "fast"],
            ["got: --optimizer.learning_rate fast\n", "a number"],
        ),
        (["small", "--optimizer.learning-rate", "inf"], ["learning_rate = inf"]),
        (["small", "--evaluation.prompt", "\udcff"], ["prompt = '\\udcff'", "UTF-8"]),
        (
            ["small", "--recovery", "cloud-only"],
            ["without workers", "--launcher processes"],
        ),
        (["small", "--reroute"], ["without workers", "--launcher processes"]),
        (
            "small --reroute --launcher processes --recovery none".split(),
            ["--reroute with --recovery none", "local-first"],
        ),
        (["small", "--no-simulate"], ["A100-SXM4-80GB", "--simulate"]),
    ],
)
def test_bad_arguments_are_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
):
    text = refused(folder, capsys, *arguments)
    assert all(word in text for word in words), text


def _leave_a_layer_out(plan: dict) -> None:
    plan["replicas"][0]["stages"][1]["layers"] = [2, 4]


def _overlap(plan: dict) -> None:
    plan["replicas"][0]["stages"][1]["layers"] = [0, 4]


def _use_a_device_twice(plan: dict) -> None:
    plan["replicas"][0]["stages"][1]["devices"] = [0]


def _split_heads_in_three(plan: dict) -> None:
    stage = plan["replicas"][1]["stages"][0]
    stage |= {"node": "h20-0", "devices": [0, 1, 2], "mesh": {"tensor": 3}}
    plan["replicas"] = [{**plan["replicas"][1], "num_microbatches": 3}]


def _split_two_sequences_in_three(plan: dict) -> None:
    _split_heads_in_three(plan)
    plan["replicas"][0]["stages"][0]["mesh"] = {"data": 3}


def _train_on_fewer(plan: dict) -> None:
    plan["replicas"] = plan["replicas"][:1]


def _another_batch(plan: dict) -> None:
    plan["replicas"], plan["global_batch"] = plan["replicas"][:1], 4


def _another_model(plan: dict) -> None:
    plan["model"] = "tiny"
    del plan["fingerprint"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_leave_a_layer_out, ["leaves out layer 1", "start", "[0].stages[1].layers"]),
        (_overlap, ["overlaps", "layer 0"]),
        (_use_a_device_twice, ["device 0 of 'h20-0'", "use a free device"]),
        (_split_heads_in_three, ["tensor = 3 does not divide 'heads' of size 4"]),
        (_split_two_sequences_in_three, ["microbatch_size = 2", "a multiple of 3"]),
        (_train_on_fewer, ["global_batch = 6", "2 x 2 = 4"]),
        (_another_batch, ["global_batch = 4", "--global-batch 4"]),
        (_another_model, ["is for model 'tiny'", "--model tiny"]),
    ],
)
def test_bad_plans_are_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[dict], None],
    words: list[str],
):
    plan = json.loads(plan_json(TWO_REPLICAS))
    spoil(plan)
    (folder / "bad.json").write_text(json.dumps(plan))
    text = refused(folder, capsys, "small", "--plan", "bad.json")
    assert "bad.json" in text
    assert all(word in text for word in words), text


def test_broken_json_and_toml_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "bad.json").write_text('{"version": 1,')
    assert "column 15" in refused(folder, capsys, "small", "--plan", "bad.json")
    (folder / "bad.toml").write_text("name = [")
    text = refused(folder, capsys, "small", "--cluster", "bad.toml")
    assert "broken TOML" in text


def test_too_many_simulated_devices_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    node = '[[node]]\nname = "{}"\ndevice = "cpu"\ncount = 2049\n'
    text = 'name = "large"\n' + node.format("a") + node.format("b")
    (folder / "large.toml").write_text(text)
    text = refused(folder, capsys, "small", "--cluster", "large.toml")
    assert "4098 devices" in text and "at most 4096" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 20_000, "nested deeper"),
        ('{"version": ' + "1" * 5_000 + "}", "digits"),
    ],
)
@pytest.mark.parametrize("option", ["--plan", "--cluster"])
def test_texts_that_parsers_give_up_on_are_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    text: str,
    words: str,
):
    is_toml = option == "--cluster"
    (folder / "bad").write_text(f"name = {text}" if is_toml else text)
    if is_toml and "digits" in words:
        (folder / "bad").write_text("name = " + "1" * 5_000)
    assert words in refused(folder, capsys, "small", option, "bad")


def test_simulating_without_a_cluster_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    bare = replace(small_preset(Path(".")), cluster=None)
    monkeypatch.setitem(PRESETS, "bare", bare)
    assert "--cluster FILE" in refused(folder, capsys, "bare")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "7"], ["seed = 7 (was 0)", "--seed 0", "--run-dir"]),
        (["--model", "tiny"], ["model = 'tiny' (was 'small')", "--model small"]),
        (["--seq-len", "8"], ["seq_len = 8 (was 16)"]),
        (["--global-batch", "12"], ["global_batch = 12 (was 6)"]),
        (["--optimizer.state-bits", "8"], ["8 (was 32)", "--optimizer.state-bits"]),
        (["--optimizer.name", "sgd"], ["'sgd' (was 'adamw')", "--optimizer.name"]),
        (["--data.path", "other.txt"], ["different hashes", "text.txt"]),
        (["--cluster", "bad.toml"], ["A100"]),
    ],
)
def test_another_run_in_the_same_directory_is_refused(
    folder: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    (folder / "other.txt").write_text((folder / "text.txt").read_text() * 2)
    shutil.copy(SIX, folder / "bad.toml")
    if "bad.toml" in arguments:
        arguments = [*arguments, "--no-simulate"]
    text = refused(folder, capsys, "small", *arguments)
    assert all(word in text for word in words), text


def test_fewer_steps_than_are_done_are_refused(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    text = refused(folder, capsys, "small", "--steps", "1")
    assert "has done 2" in text and "--steps 2" in text


def test_a_checkpoint_of_another_model_is_refused(
    folder: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    wider = replace(MODEL_CONFIG, inner_size=40)  # a changed model under the same name
    monkeypatch.setitem(MODEL_CONFIGS, "small", wider)
    text = refused(folder, capsys, "small")
    assert (
        "'small' has different layers or shapes" in text and "another --run-dir" in text
    )
    path = folder / "run" / "plan.json"
    plan = json.loads(path.read_text())
    del plan["fingerprint"]  # as in a run from before there were fingerprints
    path.write_text(json.dumps(plan))
    text = refused(folder, capsys, "small")
    assert "is from another model" in text and "[16, 32]" in text and "[16, 40]" in text


@pytest.mark.parametrize("content", [None, '{"stages": ['])
def test_a_run_that_has_lost_its_plan_gets_another(
    folder: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    path = folder / "run" / "plan.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert main(["small", "--steps", "3"]) == 0
    output = capsys.readouterr()
    assert "the run gets a new plan" in output.out + output.err
    assert read_plan(path) == TWO_REPLICAS


@pytest.mark.parametrize("content", ["[]", '{"config": ['])
def test_broken_settings_of_the_run_are_refused(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str], content: str
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    (folder / "run" / "config.json").write_text(content)
    assert "restore the file, or give another" in refused(folder, capsys, "small")


def test_checkpoints_without_the_settings_of_their_run_are_recognised(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    (folder / "run" / "config.json").unlink()
    assert "has checkpoints but no config.json" in refused(folder, capsys, "small")


@pytest.mark.parametrize("name", ["config.json", "cluster.toml"])
def test_a_broken_file_of_the_run_is_refused(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str], name: str
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    (folder / "run" / name).write_text('{"config": [')
    assert name in refused(folder, capsys, "small")


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_damaged_journal_of_the_run_is_refused_with_its_line(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str], name: str
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    path = folder / "run" / name
    whole = '{"step": 1, "event": "saved", "time": "2026-08-01T09:30:00+00:00"}\n'
    path.write_text(whole + '{"step": 2, "lo\n' + whole)
    assert f"{name}, line 2" in refused(folder, capsys, "small")
    path.write_text("[1]\n")
    assert f"{name}, line 1: not a JSON object" in refused(folder, capsys, "small")
    path.unlink()
    path.mkdir()
    assert f"{name}': a folder" in refused(folder, capsys, "small")


def test_a_folder_that_cannot_be_written_to_is_refused(
    folder: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def no_file(**_: object) -> None:  # the user who runs the tests may be root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    monkeypatch.setattr(rundir, "TemporaryFile", no_file)
    text = refused(folder, capsys, "small")
    assert "cannot be used" in text and "Permission denied" in text


def test_checkpoints_that_cannot_be_read_are_refused(
    folder: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def closed(path: Path, **_: object) -> None:
        name = str(path)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    monkeypatch.setattr(Checkpoint, "open", closed)
    text = refused(folder, capsys, "small")
    assert "checkpoints: Permission denied" in text


def test_a_damaged_only_checkpoint_is_refused_and_not_written_over(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    [manifest] = (folder / "run").rglob("manifest.json")
    manifest.write_text(manifest.read_text()[:-20])
    assert "damaged" in refused(folder, capsys, "small")


def test_a_directory_in_use_is_refused(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    lock = folder / "run" / ".lock"
    hold = (
        "import fcntl, os, sys; file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX); print(os.getpid(), file=file, flush=True)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        text = refused(folder, capsys, "small")
    finally:
        holder.communicate()
    assert f"in use by process {holder.pid}" in text and f"kill {holder.pid}" in text


def test_a_second_trainer_is_refused_at_once_until_the_first_is_killed(tmp_path: Path):
    hold = (
        "import sys\nfrom pathlib import Path\n"
        "from hetjax.training.directory.rundir import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(BadInput, match=f"in use by process {holder.pid}"):
            with locked(tmp_path / "run"):
                pass
        holder.kill()
        holder.wait()
        with locked(tmp_path / "run"):
            assert (tmp_path / "run/.lock").read_text() == f"{os.getpid()}\n"
    finally:
        holder.kill()
        holder.communicate()
    assert not (tmp_path / "run").exists()


def test_a_lock_in_a_folder_that_cannot_be_written_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused_file(*, dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    (tmp_path / ".lock").write_text("1\n")
    monkeypatch.setattr("hetjax.training.directory.rundir.TemporaryFile", refused_file)
    with pytest.raises(BadInput, match="Read-only file system"):
        with locked(tmp_path):
            pass
    assert (tmp_path / ".lock").read_text() == "1\n"


def test_the_command_itself_refuses_without_a_traceback(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "hetjax.train", "tiny", "--optimizer.name", "adam"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "'adam'" in done.stderr and "lion" in done.stderr
    assert "did you mean 'adamw'?" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_help_lists_the_presets_and_their_options(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in PRESETS)
    with pytest.raises(SystemExit) as ended:
        main(["tiny", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--optimizer.learning-rate" in text and "Steps in total" in text
