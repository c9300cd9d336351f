# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a file in one process of `pytest -n`; a pytest plugin."""

import pytest


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file, which share runs, together (`--dist loadgroup`).

    Random plans and requests share nothing: they go last, one by one, to any free
    process.
    """
    items.sort(key=_is_random)
    for item in items:
        if not _is_random(item):
            file = item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(file))


def _is_random(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return "plan_seed" in names or "bound_request" in names
