# SPDX-License-Identifier: Apache-2.0
"""A worker that writes down its compilations and its hits in JAX's cache."""

import os
from pathlib import Path
from typing import Any

import jax

from hetjax.training import worker

FOLDER = "HETJAX_TEST_COMPILED"
COMPILED = "/jax/core/compile/backend_compile_duration"  # also for cache hits
FOUND = "/jax/compilation_cache/cache_hits"


def counts(folder: Path, pid: int) -> tuple[int, int]:
    """Return how many programs this process requested, and how many the cache had."""
    events = (folder / str(pid)).read_text().splitlines()
    return events.count(COMPILED), events.count(FOUND)


def main() -> None:
    def note(event: str, *_: Any, **__: Any) -> None:
        with (Path(os.environ[FOLDER]) / str(os.getpid())).open("a") as file:
            file.write(f"{event}\n")

    jax.monitoring.register_event_listener(note)
    jax.monitoring.register_event_duration_secs_listener(note)
    worker.main()


if __name__ == "__main__":
    main()
