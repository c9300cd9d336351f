# SPDX-License-Identifier: Apache-2.0
"""Describes the machine that a result was measured on."""

import os
import platform
from importlib.metadata import version


def machine(library: str = "jax") -> str:
    """Return the CPU cores, the load on them, and the versions that were used."""
    cpus = f"{os.cpu_count()} CPU cores ({platform.machine()}), shared"
    versions = f"Python {platform.python_version()}, {library} {version(library)}"
    return f"{cpus}, load {os.getloadavg()[0]:.0f}; {versions}"
