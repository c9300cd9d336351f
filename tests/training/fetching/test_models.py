# SPDX-License-Identifier: Apache-2.0
"""Initial weights for a worker on a machine without the controller's folder."""

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hetjax.comm.files.giver import FileGiver
from hetjax.comm.files.pieces import PIECE_BYTES
from hetjax.comm.files.taker import GiverPlace
from hetjax.models.decoders import LlamaConfig
from hetjax.models.hugging_face.hub import local_folder
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import load_named
from hetjax.training.fetching.models import ModelSource, model_sources, use_models
from tests.training.small import small_preset

SECRET = secrets.token_bytes(32)
SIZES = LlamaConfig(
    name="wide",
    vocab_size=8192,
    hidden_size=256,
    inner_size=4096,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=4,
    max_seq_len=16,
)
WEIGHTS = "models/0/model.safetensors"


class There:
    """The controller's folder, and the server that gives its files."""

    def __init__(self, folder: Path, preset_folder: Path) -> None:
        self.folder = folder
        config = replace(
            small_preset(preset_folder).config, model=str(folder), init=str(folder)
        )
        ((self.source, files),) = model_sources(config)
        self.giver = FileGiver("127.0.0.1:0", SECRET, files)

    def use_as(self, name: str, cache: Path, sees_run: bool = False) -> None:
        """Use the folder by this name, as a worker with this cache does."""
        place = GiverPlace(address=self.giver.address, own="left", secret=SECRET)
        told = asdict(replace(self.source, name=name))
        use_models([told], cache, place, sees_run)

    def given(self) -> int:
        """Return the bytes of weights that were sent since the last call."""
        return self.giver.given_bytes.pop(WEIGHTS, 0)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    top, rng = tmp_path_factory.mktemp("there"), np.random.default_rng(0)
    folder = top / "wide"
    folder.mkdir()
    write_model(
        folder,
        SIZES,
        fields_of(SIZES),
        lambda _, shape: rng.standard_normal(shape, np.float32),
        "float32",
    )
    found = There(folder, top)
    yield found
    found.giver.close()


def parameters(folder: Path) -> tuple[np.ndarray, FolderWeights]:
    """Return a parameter of the second block, and the reader of the weights."""
    weights = FolderWeights(folder)
    (path,) = [p for p in weights._parts if p.startswith("block_001") and ".up" in p]
    part = weights._parts[path][0]
    return weights(path, part.ours), weights


def test_only_what_is_read_comes_and_once(there: There, tmp_path: Path):
    name, cache = "/nowhere/wide", tmp_path / "cache"
    there.use_as(name, cache)
    assert load_named(name).name == "wide"  # the folder's own name
    found, _ = parameters(local_folder(name))
    np.testing.assert_array_equal(found, parameters(there.folder)[0])
    whole = (there.folder / "model.safetensors").stat().st_size
    # its own pieces, and the first piece with the header
    assert found.nbytes <= there.given() <= found.nbytes + 3 * PIECE_BYTES < whole / 2
    again = "/nowhere/again/wide"  # as in a later process
    there.use_as(again, cache)
    np.testing.assert_array_equal(parameters(local_folder(again))[0], found)
    assert there.given() == 0


def test_a_copy_under_the_same_path_is_used_where_it_is_the_same(
    there: There, tmp_path: Path
):
    twin = tmp_path / "wide"
    shutil.copytree(there.folder, twin)
    size = (twin / "model.safetensors").stat().st_size
    with (twin / "model.safetensors").open("r+b") as file:
        file.seek(size - 100)  # damage its last piece
        byte = file.read(1)
        file.seek(size - 100)
        file.write(bytes([byte[0] ^ 1]))
    there.use_as(str(twin), tmp_path / "cache")
    here = local_folder(str(twin))
    assert here != twin
    ours, theirs = FolderWeights(here), FolderWeights(there.folder)
    for name in theirs.tensors.places:
        found = ours.tensors.read(name)
        np.testing.assert_array_equal(found, theirs.tensors.read(name))
    assert 0 < there.given() <= PIECE_BYTES


def test_a_machine_that_sees_the_run_uses_its_own_path(there: There, tmp_path: Path):
    own = tmp_path / "wide"
    shutil.copytree(there.folder, own)
    there.use_as(str(own), tmp_path / "cache", sees_run=True)
    assert local_folder(str(own)) == own
    assert not (tmp_path / "cache").exists()


def test_no_name_of_a_file_leads_out_of_the_cache(there: There, tmp_path: Path):
    place = GiverPlace(address=there.giver.address, own="left", secret=SECRET)
    hostile: ModelSource = replace(
        there.source, name="/nowhere/hostile", files={"../../escaped.json": 5}
    )
    with pytest.raises(ValueError, match="escaped"):
        use_models([asdict(hostile)], tmp_path / "a/b", place, sees_run=False)
    assert not [*tmp_path.rglob("escaped*")]
