# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.diagnosis.devices`: prints JAX's devices here as a line of JSON.

It is a separate process, because a driver may hang it, and because JAX keeps the
devices that it started with. Owns what it reads of a device. Does not own the process
that waits for it (`gathering.py`).
"""

import json
from collections import Counter
from typing import Any

from hetjax.cluster.discovery import device_name

MARK = "hetjax devices: "  # libraries print, too


def devices_found() -> dict[str, Any]:
    """Return the devices by kind, or the first line of JAX's error."""
    import jax  # the process that waits for this one does not need it

    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        return {"error": (str(error).splitlines() or ["no devices"])[0]}
    firsts = {device_name(device): device for device in reversed(devices)}
    counts = Counter(map(device_name, devices))
    return {"devices": [_seen(n, firsts[n], count) for n, count in counts.items()]}


def _seen(name: str, device: Any, count: int) -> dict[str, Any]:
    from hetjax.profiling.probe import memory_gib_of

    capability = getattr(device, "compute_capability", None)
    return {
        "name": name,
        "platform": device.platform,
        "count": count,
        "memory_gib": memory_gib_of(device) if device.platform != "cpu" else None,
        "compute_capability": None if capability is None else str(capability),
    }


if __name__ == "__main__":
    print(MARK + json.dumps(devices_found()), flush=True)
