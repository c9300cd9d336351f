# SPDX-License-Identifier: Apache-2.0
"""Finds the accelerators of this machine without starting JAX in this process.

JAX takes hold of every device that it sees, and it may confuse several kinds in one
process. So this module queries NVIDIA's own command, which takes part of a second. If
the command cannot tell, it queries JAX in a separate process that ends. Every wait has
a timeout. Does not own how the command is run (`hetjax/mesh/driver.py`), which of its
cards CUDA shows (`hetjax/cluster/local_devices.py`), nor which of them a worker gets
(`isolation.py`). `python -m hetjax.launchers.device_probe` prints the accelerators.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import jax

from hetjax.cluster.local_devices import (
    VISIBLE,
    VISIBLE_AMD,
    LocalDevice,
    devices_json,
    nvidia_devices,
    read_devices,
)
from hetjax.mesh.accelerators import amd_nodes, visible_accelerator
from hetjax.mesh.driver import driver_cards

_JAX_S = 120.0  # a TPU takes tens of seconds to start
_ASK_JAX = "from hetjax.launchers.device_probe import print_devices; print_devices()"
# take only the memory that is needed, but report all of it
_WHOLE = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "1",
    "XLA_CLIENT_MEM_FRACTION": "",
}


def accelerators_here(environment: Mapping[str, str]) -> list[LocalDevice]:
    """Return the accelerators that a process with this environment may use.

    Returns an empty list if JAX_PLATFORMS selects the CPU, or if there is no sign of
    any accelerator. If neither the driver nor JAX answers in time, warns and returns an
    empty list.
    """
    if environment.get("JAX_PLATFORMS", "").partition(",")[0] == "cpu":
        return []
    reported = _reported_by_driver(environment)
    if reported is not None:
        return reported
    if visible_accelerator() is None:
        return []
    return _by_jax(environment)


def may_be_unlike(root: Path = Path("/")) -> bool:
    """Return whether the GPUs here may be of several kinds, which a probe can tell."""
    several = len([*root.glob("dev/nvidia[0-9]*")]) > 1
    windows = (root / "dev/dxg").exists()  # one file for any number of GPUs
    return several or windows or len(_amd_kinds(root)) > 1


def print_devices() -> None:
    """Print the accelerators that JAX has in this process, for another to read."""
    devices = [d for d in jax.local_devices() if d.platform != "cpu"]
    cores = 1 + max((getattr(d, "core_on_chip", 0) for d in devices), default=0)
    found = [
        LocalDevice(
            platform=_platform(device),
            device_kind=device.device_kind,
            handle=str(index // cores),  # of a TPU: its chip
            memory_bytes=(device.memory_stats() or {}).get("bytes_limit", 0),
        )
        for index, device in enumerate(devices)
    ]
    print(devices_json(found))


def _platform(device: jax.Device) -> str:
    if device.platform == "tpu":
        return "tpu"
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _reported_by_driver(environment: Mapping[str, str]) -> list[LocalDevice] | None:
    """Return what NVIDIA's command reports; None if it cannot tell, or is missing."""
    cards = driver_cards()
    return nvidia_devices(cards, environment) if cards else None


def _by_jax(environment: Mapping[str, str]) -> list[LocalDevice]:
    """Return what JAX reports.

    Queries AMD cards of several kinds one by one: together, all look like the first.
    """
    shown = environment.get(VISIBLE_AMD) or environment.get(VISIBLE)
    found = _with_handles(_asked(environment), shown)
    if len(_amd_kinds()) < 2 or len(found) < 2 or found[0].platform != "rocm":
        return found
    each = [_asked({**environment, VISIBLE_AMD: device.handle}) for device in found]
    return _with_handles([device for [device] in each], shown)


def _asked(environment: Mapping[str, str]) -> list[LocalDevice]:
    """Return what JAX sees in a separate process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_JAX],
            capture_output=True,
            env={**environment, **_WHOLE},
            text=True,
            timeout=_JAX_S,
            check=True,
        )
        return read_devices(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        warnings.warn(
            f"JAX does not report the accelerators here ({error}): hetjax counts none",
            stacklevel=2,
        )
        return []


def _with_handles(found: Iterable[LocalDevice], shown: str | None) -> list[LocalDevice]:
    """Return devices, in JAX's order, with the names from the user's own variable."""
    devices = list(found)
    if shown is None or (devices and devices[0].platform == "tpu"):
        return devices
    names = [name.strip() for name in shown.split(",")]
    return [replace(d, handle=n) for d, n in zip(devices, names, strict=False)]


def _amd_kinds(root: Path = Path("/")) -> set[str]:
    """Return ids of the kinds of AMD GPUs that the kernel's driver shows."""
    gpus = (node for node in amd_nodes(root) if node.get("simd_count", "0") != "0")
    return {gpu.get("device_id", "") for gpu in gpus}


if __name__ == "__main__":
    print(devices_json(accelerators_here(os.environ)))
