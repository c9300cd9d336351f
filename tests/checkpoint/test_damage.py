# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetjax.checkpoint.format import Entry
from hetjax.checkpoint.reader import Checkpoint, DamagedCheckpoint, newest, steps
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.errors import BadInput
from tests.checkpoint.values import state_of

LEAF = "state/params.block_001.mlp.up.2of8"
CHUNK = f"{LEAF}/c.0.0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with CheckpointWriter(directory, "embedded") as writer:
        for step in (10, 20):
            writer.save(step, state_of(step), host={"step": step})
            writer.wait()
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def part_20(directory: Path) -> Path:
    return directory / "step_00000020/embedded"


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def read_all(checkpoint: Checkpoint) -> None:
    for entry, value in state_of(checkpoint.step):
        np.testing.assert_array_equal(checkpoint.read(entry), value)


@pytest.mark.parametrize("file", [CHUNK, f"{LEAF}/zarr.json"])
@pytest.mark.parametrize("offset", [0, 7, -1])
def test_a_flipped_bit_is_found_before_the_value_is_used(
    directory: Path, file: str, offset: int
) -> None:
    flip(part_20(directory) / file, offset)
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.step == 20
    with pytest.raises(DamagedCheckpoint) as error:
        read_all(checkpoint)
    assert str(part_20(directory) / file) in error.value.got
    assert "crc32c" in error.value.got
    assert "use an earlier step" in error.value.fix


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "what"),
    [(truncate, "bytes, not"), (Path.unlink, "No such file")],
    ids=["truncated", "missing"],
)
def test_a_step_with_a_file_of_the_wrong_size_is_passed_over_with_a_warning(
    directory: Path, damage: Callable[[Path], None], what: str
) -> None:
    chunk = part_20(directory) / CHUNK
    damage(chunk)
    assert steps(directory) == [10]
    with pytest.raises(DamagedCheckpoint) as error:
        Checkpoint.open(directory, 20)
    assert str(chunk) in error.value.got and what in error.value.got
    with pytest.warns(match=f"step_00000020.*{CHUNK}"):
        checkpoint = Checkpoint.open(directory)
    assert checkpoint.step == 10
    read_all(checkpoint)


def test_a_file_that_goes_away_after_opening_is_named(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    (part_20(directory) / CHUNK).unlink()
    with pytest.raises(DamagedCheckpoint, match=CHUNK):
        read_all(checkpoint)


@pytest.mark.parametrize("offset", range(0, 400, 23))
def test_a_flipped_bit_of_the_manifest_is_found(directory: Path, offset: int) -> None:
    flip(part_20(directory) / "manifest.json", offset)
    assert steps(directory) == [10]
    with pytest.raises(DamagedCheckpoint, match="manifest.json"):
        Checkpoint.open(directory, 20)


def test_a_manifest_of_a_later_version_is_refused(directory: Path) -> None:
    path = part_20(directory) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(
        DamagedCheckpoint, match="version 2, but this hetjax reads version 1"
    ):
        Checkpoint.open(directory, 20)


def test_a_step_that_was_renamed_by_hand_is_refused(directory: Path) -> None:
    (directory / "step_00000020").rename(directory / "step_00000030")
    with pytest.raises(DamagedCheckpoint, match="describes step 20, worker embedded"):
        Checkpoint.open(directory, 30)


def test_when_every_step_is_damaged_the_newest_one_is_the_error(
    directory: Path,
) -> None:
    for path in directory.rglob("zarr.json"):
        path.unlink()
    num_steps = len(list(directory.glob("step_*")))
    assert num_steps > 1
    told = f"none of {num_steps} steps can be used; the newest: .*step_00000020"
    with pytest.raises(DamagedCheckpoint, match=told):
        newest(directory)


def test_when_no_step_is_signed_the_advice_is_about_the_key(directory: Path) -> None:
    with pytest.raises(DamagedCheckpoint) as error:
        newest(directory, key=bytes(32))
    assert "is not trusted" in error.value.got
    assert "--checkpoint.key-file" in error.value.fix


def test_a_directory_without_any_committed_step_has_no_newest_one(
    tmp_path: Path,
) -> None:
    assert newest(tmp_path / "nowhere") is None
    (tmp_path / "step_00000001/embedded/state.orbax-checkpoint-tmp").mkdir(parents=True)
    assert newest(tmp_path) is None


def test_a_damaged_step_stays_for_the_user_until_a_newer_save_commits(
    directory: Path,
) -> None:
    flip(part_20(directory) / "manifest.json", 50)
    with CheckpointWriter(directory, "embedded", keep=2) as writer:
        assert part_20(directory).exists()
        writer.save(30, state_of(30), host={})
    assert steps(directory) == [10, 30] and not part_20(directory).exists()


def test_a_damaged_step_can_be_saved_again(directory: Path) -> None:
    truncate(part_20(directory) / "manifest.json")
    truncate(directory / "step_00000010/embedded" / CHUNK)
    with CheckpointWriter(directory, "embedded") as writer:
        for step in (10, 20):
            writer.save(step, state_of(step), host={})
            writer.wait()
    assert steps(directory) == [10, 20]
    read_all(Checkpoint.open(directory, 10))
    read_all(Checkpoint.open(directory, 20))


def test_a_checkpoint_of_another_model_says_what_differs(directory: Path) -> None:
    float32, path = np.dtype(np.float32), directory / "step_00000020"
    asked = [
        Entry("params.block_000.mlp.up", (4, 16), float32, (1, 8)),
        Entry("params.block_001.mlp.up", (4, 8), np.dtype(np.float16), (1, 8)),
        Entry("params.block_002.mlp.up", (4,), float32, (0, 1)),
        Entry("params.block_002.mlp.up", (8,), float32, (0, 1)),
        Entry("params.block_007.mlp.up", (4, 8), float32, (1, 8)),  # not saved here
    ]
    with pytest.raises(BadInput) as error:
        Checkpoint.open(directory).check_same_kind(asked)
    assert str(error.value) == (
        f"got: checkpoint {path} is from another model or optimizer: "
        "params.block_000.mlp.up is float32[4, 8], this run's is float32[4, 16]; "
        "params.block_001.mlp.up is float32[4, 8], this run's is float16[4, 8]; "
        "params.block_002.mlp.up is float32[4, 8], this run's is float32[4]; "
        "and 1 more\n"
        "allowed: a checkpoint with the arrays of this run's model and optimizer: "
        "the same names, shapes and dtypes\n"
        "fix: use the run's original configuration (config.json in its directory), or "
        "start a new run with another --run-dir"
    )


def test_reading_an_entry_of_another_model_says_what_differs(directory: Path) -> None:
    checkpoint, float32 = Checkpoint.open(directory), np.dtype(np.float32)
    with pytest.raises(BadInput, match="params.x.w is missing"):
        checkpoint.read(Entry("params.x.w", (2,), float32, (0, 1)))
    name = "params.block_000.mlp.up"
    with pytest.raises(BadInput, match=r"float32\[4, 8\], this run's is float32\[8\]"):
        checkpoint.read(Entry(name, (8,), float32, (0, 1)))


def test_asking_for_a_step_that_is_not_there_lists_those_that_are(
    directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="(?s)of step 15.*steps there: 10, 20"):
        Checkpoint.open(directory, 15)
    with pytest.raises(BadInput, match="(?s)no complete checkpoint.*there: none"):
        Checkpoint.open(tmp_path / "nowhere")
