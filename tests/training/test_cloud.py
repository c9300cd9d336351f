# SPDX-License-Identifier: Apache-2.0
"""Runs whose checkpoints are copied to a store, and resume from there elsewhere."""

import json
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from hetjax.training.settings.presets import Preset
from tests.checkpoint.fake_gcs import FakeGcs
from tests.checkpoint.fake_s3 import SECRET, FakeS3
from tests.checkpoint.faulty_server import Fault, FaultyServer, Query
from tests.short_runs import draws
from tests.training.small import MODEL, ONE_STAGE, but, losses, small_preset

Cloud = tuple[FaultyServer, str, str | None]
pytestmark = pytest.mark.usefixtures("quickly")


def storing(preset: Preset, cloud: str | None, endpoint: str | None = None) -> Preset:
    store = {"cloud": cloud, "endpoint": endpoint}
    return but(preset, checkpoint=replace(preset.config.checkpoint, **store))


def stored_here(folder: Path, steps: int) -> str:
    """Return the store of a run in `folder`/here; `folder`/there is empty."""
    store = (folder / "store").as_uri()
    for name in ("here", "there"):
        (folder / name).mkdir()
    here = storing(small_preset(folder / "here", ONE_STAGE), store)
    stopping = but(here, stop_after=steps)
    assert run(stopping.config, stopping, MODEL) == 4
    return store


@pytest.fixture(params=draws(["s3", "gcs"], short=1))
def cloud(request: pytest.FixtureRequest) -> Cloud:
    """A server, the URL of a store on it, and the server's URL if a run needs it."""
    server = request.getfixturevalue(request.param)
    endpoint = server.url if request.param == "s3" else None
    return server, f"{server.scheme}://bucket/run", endpoint


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    preset = small_preset(tmp_path_factory.mktemp("reference"), ONE_STAGE)
    assert run(preset.config, preset, MODEL) == 0
    return preset


def test_a_run_whose_machine_is_gone_goes_on_from_a_shaky_cloud(
    reference: Preset, cloud: Cloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server, url, endpoint = cloud
    faults = random.Random(1)
    server.fault = lambda *_: 503 if faults.random() < 0.1 else None
    preset = storing(small_preset(tmp_path, ONE_STAGE), url, endpoint)
    stopping = but(preset, stop_after=5)
    assert run(stopping.config, stopping, MODEL) == 4
    shutil.rmtree(preset.config.run_dir / "checkpoints")
    assert run(preset.config, preset, MODEL) == 0
    assert losses(preset.config.run_dir) == losses(reference.config.run_dir)
    assert f"fetched step 5 from {url}" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_killed_run_goes_on_elsewhere_from_s3_alone(
    reference: Preset, s3: FakeS3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The run is killed while it uploads with a fault in one of five requests.

    Its disk is lost.
    """
    dice, kinds = random.Random(1), (500, 503, "reset", "lose reply", ("sleep", 0.05))
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    endpoint = ["s3://bucket/run", s3.url]
    killed = subprocess.Popen(
        [sys.executable, "-m", "tests.training.killed_run", str(here), "", *endpoint],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def fault(method: str, path: str, _: Query) -> Fault:
        committed = [k for k in s3.buckets["bucket"] if k.endswith("/COMMIT")]
        if committed and method == "PUT" and "/step_" in path:
            if committed[0].split("/")[1] not in path:
                killed.kill()
                return "reset"
        return dice.choice(kinds) if dice.random() < 0.2 else None

    s3.fault = fault
    said, _ = killed.communicate(timeout=200)
    assert killed.returncode == -signal.SIGKILL, said
    s3.fault = lambda *_: dice.choice(kinds) if dice.random() < 0.2 else None
    tell_nobody(here, said)
    shutil.rmtree(here)
    kept = CheckpointConfig(every=2, cloud=endpoint[0], endpoint=endpoint[1])
    preset = but(small_preset(there, ONE_STAGE), checkpoint=kept)
    assert run(preset.config, preset, MODEL) == 0
    found, whole = losses(preset.config.run_dir), losses(reference.config.run_dir)
    assert 1 < min(found) < max(found) == 10
    for step in found:  # the killed process had other devices
        assert found[step] == pytest.approx(whole[step], rel=1e-4)
    tell_nobody(there, capsys.readouterr().out)


def tell_nobody(folder: Path, said: str) -> None:
    """Assert that neither the run's files nor its output contain the store's secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(b"s3://bucket/run" in path.read_bytes() for path in files)
    assert SECRET not in said
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_only_files_that_are_damaged_or_missing_are_fetched(
    reference: Preset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store = tmp_path / "store"
    preset = storing(small_preset(tmp_path, ONE_STAGE), store.as_uri())
    stopping = but(preset, stop_after=5)
    assert run(stopping.config, stopping, MODEL) == 4
    own = preset.config.run_dir / "checkpoints/step_00000005/embedded"
    files = json.loads((own / "manifest.json").read_text())["files"]
    flipped, *_, missing = sorted(name for name in files if "/c" in name)
    data = bytearray((own / flipped).read_bytes())
    data[len(data) // 2] ^= 1
    (own / flipped).write_bytes(data)
    (own / missing).unlink()
    assert run(preset.config, preset, MODEL) == 0
    assert losses(preset.config.run_dir) == losses(reference.config.run_dir)
    fetched = files[flipped]["size"] + files[missing]["size"]
    assert f"{fetched:,} bytes in" in capsys.readouterr().out


def test_a_run_elsewhere_needs_nothing_but_the_store(reference: Preset, tmp_path: Path):
    store = stored_here(tmp_path, 5)
    there = storing(small_preset(tmp_path / "there", ONE_STAGE), store)
    assert run(there.config, there, MODEL) == 0
    whole = losses(reference.config.run_dir)
    assert losses(there.config.run_dir) == {s: whole[s] for s in range(6, 11)}


def test_a_bucket_that_is_not_there_is_refused_before_anything_is_written(
    gcs: FakeGcs, tmp_path: Path
):
    preset = storing(small_preset(tmp_path, ONE_STAGE), "gs://none/run")
    with pytest.raises(BadInput, match="none"):
        run(preset.config, preset, MODEL)
    assert not preset.config.run_dir.exists()


@pytest.mark.parametrize(
    ("url", "endpoint", "words"),
    [
        ("s3://key:hidden@bucket/run", None, "an invalid bucket name"),
        ("s3://bucket/run", "https://key:hidden@host", "name or password"),
        ("gs://bucket/run", "https://host", "with the store gs://bucket/run"),
        (None, "https://host", "alone"),
    ],
)
def test_a_store_that_names_no_place_is_refused_before_anything_is_written(
    tmp_path: Path, url: str | None, endpoint: str | None, words: str
):
    preset = storing(small_preset(tmp_path, ONE_STAGE), url, endpoint)
    with pytest.raises(BadInput, match=words) as caught:
        run(preset.config, preset, MODEL)
    assert "hidden" not in str(caught.value)
    assert not preset.config.run_dir.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 3}, r"seed = 0 \(here 3\)"),
        ({"global_batch": 12}, r"global_batch = 6 \(here 12\)"),
        ({"text": "Another text has another tokenizer. " * 400}, "tokenizer.json = "),
    ],
)
def test_a_store_of_another_run_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict, words: str
):
    store = stored_here(tmp_path, 1)
    there = storing(small_preset(tmp_path / "there", even(changes)), store)
    if text := changes.pop("text", None):
        (tmp_path / "there/text.txt").write_text(text)
    there = but(there, **changes)
    with pytest.raises(BadInput, match=words):
        run(there.config, there, MODEL)
    assert not (there.config.run_dir / "config.json").exists()


def even(changes: dict) -> Plan:
    """Return a plan for the global batch, which `changes` may set."""
    times = changes.get("global_batch", 6) // 6
    one = ONE_STAGE.replicas[0]
    longer = replace(one, num_microbatches=one.num_microbatches * times)
    batch = ONE_STAGE.global_batch * times
    return replace(ONE_STAGE, global_batch=batch, replicas=(longer,))
