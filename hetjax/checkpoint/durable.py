# SPDX-License-Identifier: Apache-2.0
"""Writes that survive a power cut. Does not own what is written."""

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Make a file, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file, durably and in one go: it has the old text or the new one."""
    building = path.with_suffix(".part")
    with building.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(building, path)
