# SPDX-License-Identifier: Apache-2.0
"""A worker that writes down what it compiles, and what it finds in JAX's cache."""

import os
from pathlib import Path
from typing import Any

import jax

from hetjax.training import worker

FOLDER = "HETJAX_TEST_COMPILED"
COMPILED = "/jax/core/compile/backend_compile_duration"  # found in the cache, too
FOUND = "/jax/compilation_cache/cache_hits"


def counts(folder: Path, pid: int) -> tuple[int, int]:
    """How many programs this process has asked for, how many of them were found."""
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
