# SPDX-License-Identifier: Apache-2.0
"""All kinds of store, for tests that hold for any of them, and both kinds of cloud."""

from pathlib import Path

import pytest

from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import Store
from tests.checkpoint.faulty_server import FaultyServer


@pytest.fixture(params=["file", "gcs", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return FileStore(tmp_path / "store", pause_s=0.001)
    return request.getfixturevalue(request.param).store("run")


@pytest.fixture(params=["gcs", "s3"])
def cloud(request: pytest.FixtureRequest) -> FaultyServer:
    """A server that can inject faults."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def bucket(cloud: FaultyServer) -> Store:
    """Our store there, which retries at once."""
    return cloud.store("run")
