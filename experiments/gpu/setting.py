# SPDX-License-Identifier: Apache-2.0
"""Defines the setting of a part of a session: where it runs, its size, its deadline."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import jax

from hetjax.launchers.isolation import memory_share

Value = TypeVar("Value")


class Skipped(Exception):
    """A part has nothing to do here; the message says why."""


class OutOfTime(Exception):
    """A part did not finish its task in the time it had; the message says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """`quick` is for tests: the same code path at the smallest sizes.

    `ends_s` is on the clock of `time.monotonic`. A part with little time left yields
    what it has and ends, which is better than being killed. `logs` is where the output
    of processes that a part starts is kept; None discards it.
    """

    platform: str = "cuda"
    quick: bool = False
    ends_s: float = float("inf")
    logs: Path | None = None

    @property
    def device(self) -> jax.Device:
        """The first device of the platform; starts JAX."""
        return jax.local_devices(backend=self.platform)[0]

    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def choose(self, usual: Value, quick: Value) -> Value:
        """Return the size for a card, or the one for a test."""
        return quick if self.quick else usual

    def logs_of(self, name: str, scratch: Path) -> Path:
        """Return a directory for the logs of processes, kept if `logs` is set."""
        directory = (self.logs or scratch) / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a temporary directory that is removed after use."""
        with TemporaryDirectory(prefix="hetjax-session-") as directory:
            yield Path(directory)


def share_card() -> None:
    """Let JAX take as much of a card as plans count on, without preallocation: several
    processes of a part share the card."""
    os.environ.update(memory_share(os.environ))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
