# SPDX-License-Identifier: Apache-2.0
"""What short runs of the tests skip, and a message about it; a plugin of pytest.

Tests marked `nightly` run only with `--whole`: slow tests with a similar faster test,
and all but the first few random draws. Hypothesis draws fewer examples, too.
`--without-jax-free-rooms` skips test files that cannot depend on the release of JAX.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.jax_free import jax_free_files

_LEFT_OUT = pytest.StashKey[dict[str, int]]()
_JAX_FREE = pytest.StashKey[frozenset[Path]]()
_OUTPUT = "left_out"  # in what a worker of xdist passes to its controller
_EXAMPLES = 30  # of hypothesis, if a test sets none; 100 with `--whole`

settings.register_profile("whole", deadline=None)
settings.register_profile("short", deadline=None, max_examples=_EXAMPLES)


def draws(values: Iterable[Any], *, short: int) -> list[Any]:
    """Return parameters; a short run takes only the first `short`."""
    return rows_drawn(((value,) for value in values), short=short)


def rows_drawn(rows: Iterable[tuple[Any, ...]], *, short: int) -> list[Any]:
    """Do the same with values of several parameters each."""
    rest = iter(rows)
    first = [pytest.param(*row) for row in islice(rest, short)]
    return [*first, *(pytest.param(*row, marks=pytest.mark.nightly) for row in rest)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="also run tests that are marked nightly"
    )
    parser.addoption(
        "--without-jax-free-rooms",
        action="store_true",
        help="leave out tests that another release of JAX cannot change",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: takes long; runs with --whole alone")
    config.stash[_LEFT_OUT] = {}
    whole = config.getoption("whole")
    settings.load_profile("whole" if whole else "short")
    asked = config.getoption("without_jax_free_rooms")
    config.stash[_JAX_FREE] = jax_free_files() if asked else frozenset()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path in config.stash[_JAX_FREE] else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("whole"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    files = Counter(item.nodeid.partition("::")[0] for item in nightly)
    config.stash[_LEFT_OUT] = {file: files[file] for file in sorted(files)}


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = session.config.stash[_LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    found = getattr(node, "workeroutput", {}).get(_OUTPUT, {})
    node.config.stash[_LEFT_OUT].update(found)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out, jax_free = config.stash[_LEFT_OUT], config.stash[_JAX_FREE]
    if left_out:
        terminalreporter.section("left out: --whole runs them")
    for file, number in left_out.items():
        terminalreporter.write_line(f"{number:4d} of {file}")
    if left_out:
        terminalreporter.write_line(
            f"examples of hypothesis: {_EXAMPLES} where a test does not say how many"
        )
    if jax_free:
        terminalreporter.section("left out: no release of JAX can change them")
    for file in sorted(jax_free):
        terminalreporter.write_line(str(file.relative_to(config.rootpath)))
