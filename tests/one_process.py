# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a file in one process of `pytest -n`; a pytest plugin.

Owns the order of files: those that start runs, and wait for their processes, are spread
evenly among those that compute, so that the cores are busy all the time.
"""

from collections import Counter

import pytest

_WAITING = ("tests/training/", "tests/notebooks/", "tests/launchers/")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file, which share runs, together (`--dist loadgroup`).

    Random plans and requests share nothing: they go last, one by one, to any free
    process.
    """
    placed = places(list(dict.fromkeys(map(_file, items))))
    items.sort(key=lambda item: (_is_random(item), placed[_file(item)]))
    for item in items:
        if not _is_random(item):
            item.add_marker(pytest.mark.xdist_group(_file(item)))


def places(files: list[str]) -> dict[str, float]:
    """Return where each file comes, from 0 to 1, in the order of files like it."""
    sizes, found = Counter(file.startswith(_WAITING) for file in files), {}
    before = Counter[bool]()
    for file in files:
        waits = file.startswith(_WAITING)
        found[file] = (before[waits] + 0.5) / sizes[waits]
        before[waits] += 1
    return found


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _is_random(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return "plan_seed" in names or "bound_request" in names
