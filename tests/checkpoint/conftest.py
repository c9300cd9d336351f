# SPDX-License-Identifier: Apache-2.0
"""Both kinds of store, for tests that hold for either; the test gives its `bucket`."""

from pathlib import Path

import pytest

from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import Store


@pytest.fixture(params=["file", "gcs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "gcs":
        return request.getfixturevalue("bucket")
    return FileStore(tmp_path / "store", pause_s=0.001)
