# SPDX-License-Identifier: Apache-2.0
"""The run's text on a machine without the controller's files."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetjax.comm.files.giver import FileGiver
from hetjax.comm.files.taker import GiverPlace
from hetjax.data.dataset import Dataset, prepare
from hetjax.data.settings import Ingredients
from hetjax.errors import BadInput
from hetjax.training.fetching.text import text_files, text_here
from tests.training.small import LICENCE

SECRET = secrets.token_bytes(32)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("there")
    text = folder / "text.txt"
    text.write_text(LICENCE.read_text())
    return prepare(folder / "cache", Ingredients(path=text), 320)


@pytest.fixture
def giver(there: Dataset) -> Iterator[FileGiver]:
    giver = FileGiver("127.0.0.1:0", SECRET, text_files(there))
    yield giver
    giver.close()


def place(giver: FileGiver) -> GiverPlace:
    return GiverPlace(address=giver.address, own="left", secret=SECRET)


def test_a_text_is_fetched_once_and_kept(
    there: Dataset, giver: FileGiver, tmp_path: Path
):
    nowhere, cache = tmp_path / "nowhere", tmp_path / "cache"
    found = text_here(nowhere, there.hashes, cache, place(giver))
    for one, other in zip(found.trains, there.trains, strict=True):
        np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
    assert found.bytes_per_token == there.bytes_per_token
    given = dict(giver.given_bytes)
    assert sum(given.values()) == sum(
        p.stat().st_size for p in text_files(there).values()
    )
    assert text_here(nowhere, there.hashes, cache, place(giver)).hashes == there.hashes
    assert giver.given_bytes == given


def test_a_damaged_copy_is_fetched_again(
    there: Dataset, giver: FileGiver, tmp_path: Path
):
    found = text_here(tmp_path / "nowhere", there.hashes, tmp_path, place(giver))
    file = found.directory / "train.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="fetching it again"):
        found = text_here(tmp_path / "nowhere", there.hashes, tmp_path, place(giver))
    np.testing.assert_array_equal(found.trains[0].tokens_T, there.trains[0].tokens_T)


def test_another_text_under_the_same_path_is_not_used(
    there: Dataset, giver: FileGiver, tmp_path: Path
):
    other = tmp_path / "other.txt"
    other.write_text("another text, as long as it has to be. " * 300)
    own = prepare(tmp_path / "own", Ingredients(path=other), 320)
    found = text_here(own.directory, there.hashes, tmp_path / "cache", place(giver))
    assert found.hashes == there.hashes != own.hashes
    with pytest.raises(BadInput, match="the text in .* differs from the"):
        text_here(own.directory, there.hashes, tmp_path / "cache", None)


def test_where_nobody_gives_it_people_are_told_what_to_copy(
    there: Dataset, tmp_path: Path
):
    with pytest.raises(BadInput, match="copy .*nowhere to the same place"):
        text_here(tmp_path / "nowhere", there.hashes, tmp_path, None)
    assert text_here(there.directory, there.hashes, tmp_path, None).hashes
