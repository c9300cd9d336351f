# SPDX-License-Identifier: Apache-2.0
"""The machine that a result was measured on, in words that go with it."""

import os
import platform
from importlib.metadata import version


def machine(library: str = "jax") -> str:
    """Return the CPU cores, how much else runs on them, and what was measured with."""
    cpus = f"{os.cpu_count()} CPU cores ({platform.machine()}), shared"
    versions = f"Python {platform.python_version()}, {library} {version(library)}"
    return f"{cpus}, load {os.getloadavg()[0]:.0f}; {versions}"
