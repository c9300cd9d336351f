# SPDX-License-Identifier: Apache-2.0
"""Sets what a worker process sees of its machine: variables set before JAX starts.

Owns the variables that hide devices on each platform, the share of a GPU's memory that
a worker takes, and which of the user's variables go to workers on other machines. All
functions are pure: they take an environment and return additions to it. Does not own
which devices there are (`device_probe.py`), nor who starts the process.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.discovery import assign_devices
from hetjax.cluster.local_devices import VISIBLE, VISIBLE_AMD, LocalDevice, is_one_kind
from hetjax.cluster.memory_budget import GPU_ALLOCATOR_FRACTION
from hetjax.errors import BadInput

_NONE = "-1"  # for CUDA and HIP; HIP treats an empty variable as unset
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTIONS = (_FRACTION, "XLA_CLIENT_MEM_FRACTION")  # JAX refuses to start with both
_CHIPS = "TPU_VISIBLE_CHIPS"
# how the chips of one host are wired, by their number
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}

_PASSED = ("XLA_", "JAX_", "NCCL_", "LIBTPU_", "TPU_")
_ALSO_PASSED = ("PJRT_NPROC", "PYTHONPATH")
# variables that are right on one machine only
_OWN = (
    "JAX_COORDINATOR_",
    "JAX_PROCESS_",
    "TPU_ACCELERATOR_",
    "TPU_CHIPS_",
    "TPU_HOST",
    "TPU_NAME",
    "TPU_PROCESS_",
    "TPU_TOPOLOGY",
    "TPU_VISIBLE_",
    "TPU_WORKER_",
)


def visible_devices(
    devices: Sequence[LocalDevice], here: Sequence[LocalDevice]
) -> dict[str, str]:
    """Return the variables that show a process only `devices` of those `here`.

    The devices are all of one kind. If there are none, no GPU is shown. If the process
    gets all TPUs that are here, libtpu decides: only it knows how a host of a larger
    slice is wired.
    """
    assert is_one_kind(devices), devices
    handles = ",".join(device.handle for device in devices)
    if not devices:
        return {VISIBLE: _NONE, VISIBLE_AMD: _NONE}
    platform = devices[0].platform
    if platform == "tpu":
        return {} if len(devices) == len(here) else _chips(devices)
    return {VISIBLE if platform == "cuda" else VISIBLE_AMD: handles}


def _chips(devices: Sequence[LocalDevice]) -> dict[str, str]:
    """Return the variables for some chips; on older kinds, each core is a device."""
    chips = list(dict.fromkeys(device.handle for device in devices))
    return {
        _CHIPS: ",".join(chips),
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS.get(len(chips), f"{len(chips)},1,1"),
    }


def memory_share(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes JAX take the share of a GPU that plans assume.

    Returns nothing if the user has set one.
    """
    if any(environment.get(name) for name in _FRACTIONS):
        return {}
    return {_FRACTION: f"{GPU_ALLOCATOR_FRACTION:g}"}


def gpu_share(environment: Mapping[str, str]) -> float:
    """Return the share of a GPU that JAX takes in a worker with this environment.

    Raises BadInput if the user's own share is not a number above 0 and up to 1.
    """
    for name in _FRACTIONS:
        said = environment.get(name)
        if not said:
            continue
        with suppress(ValueError):
            if 0 < float(said) <= 1:
                return float(said)
        raise BadInput(
            got=f"{name}={said}",
            allowed="0 < share of a GPU's memory <= 1",
            fix=f"unset it: plans assume {GPU_ALLOCATOR_FRACTION:g}",
        )
    return GPU_ALLOCATOR_FRACTION


def worker_environments(
    cluster: Cluster, here: Sequence[LocalDevice], environment: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the variables to set for each worker on this machine, by its name.

    Nodes take the devices `here` of their kind in file order, their hosts in equal
    parts; CPUs take none. Raises BadInput if there are too few.
    """
    wanted = tuple(n for n in cluster.nodes if canonical_name(n.device) != "cpu")
    held: dict[str, tuple[LocalDevice, ...]] = {}
    if wanted:
        asked = Cluster(name=cluster.name, nodes=wanted)
        held = assign_devices(asked, here, simulate=False)
    found: dict[str, dict[str, str]] = {}
    for node in cluster.nodes:
        devices, each = held.get(node.name, ()), node.devices_per_host
        for host, worker in enumerate(node.workers):
            own = devices[host * each : (host + 1) * each]
            found[worker] = visible_devices(own, here)
            if own and own[0].platform != "tpu":
                found[worker] |= memory_share(environment)
    return found


def hidden_devices(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return the variables to set for workers that get only CPUs."""
    return {w: visible_devices((), ()) for node in cluster.nodes for w in node.workers}


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of the user's variables that apply on every machine of a run.

    They belong to XLA, JAX, NCCL and libtpu, except those that name this machine's
    devices.

    >>> passed_on({"NCCL_DEBUG": "INFO", "TPU_WORKER_ID": "0", "HOME": "/root"})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name in _ALSO_PASSED
        or (name.startswith(_PASSED) and not name.startswith(_OWN))
    }
