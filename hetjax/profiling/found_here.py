# SPDX-License-Identifier: Apache-2.0
"""Completes clusters with figures that local devices report or that are measured.

Owns which nodes need measuring, and the cache folder of measured kinds: one file per
device kind, driver and release of JAX. Does not own the measuring (`probe.py`) nor
which devices are here (`cluster/discovery.py`).
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from hetjax.cluster import ranges
from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.discovery import D, assign_devices, discover, node_stem
from hetjax.cluster.reported_memory import with_reported_memory
from hetjax.errors import BadInput, placed
from hetjax.files.parsing import json_value, parsed, read_file
from hetjax.files.tables import Kind, read_fields, read_record
from hetjax.files.user_cache import expanded
from hetjax.files.writing import write_whole
from hetjax.profiling.probe import PRECISIONS, Probe, memory_gib_of, probe

CACHE_DIR = Path("~/.cache/hetjax")
_FOLDER = "devices"
_ALLOWED, _FIX = "the file as hetjax wrote it", "remove it"
_RATES: dict[str, Kind] = dict.fromkeys(PRECISIONS, "a number")
_LEAST_GIB = 4.0  # assumed for a device whose memory is unknown

Measure = Callable[[Sequence[Any], float], Probe]


def cluster_here(
    here: Sequence[D], cache_dir: Path = CACHE_DIR
) -> tuple[Cluster, dict[str, tuple[D, ...]]]:
    """Return the cluster that these devices form, and the devices by node name."""
    cluster = discover(here)
    devices = assign_devices(cluster, here, simulate=False)
    return as_found(cluster, devices, cache_dir=cache_dir), devices


def measured_here(here: Sequence[Any], measure: Measure = probe) -> Cluster:
    """Return the cluster that these devices form, with every node measured now."""
    cluster = discover(here)
    devices = assign_devices(cluster, here, simulate=False)
    probes = {
        name: measure(mine, min(_memories_gib(mine), default=_LEAST_GIB))
        for name, mine in devices.items()
    }
    nodes = tuple(replace(n, **probes[n.name].figures()) for n in cluster.nodes)
    return replace(cluster, nodes=nodes)


def as_found(
    cluster: Cluster,
    devices: Mapping[str, Sequence[Any]],
    *,
    cache_dir: Path = CACHE_DIR,
    measure: Measure = probe,
) -> Cluster:
    """Return the cluster with the figures of its local `devices`, by node name.

    A kind that neither the catalogue nor the node describes is measured, and cached for
    later starts. A warning names the result and the cache file. The devices' reports of
    their memory are used; of several, the least (`reported_memory.py`). Raises BadInput
    if a kind cannot be measured.
    """
    nodes = tuple(
        _as_found(node, devices.get(node.name, ()), expanded(cache_dir), measure)
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _as_found(
    node: Node, devices: Sequence[Any], cache_dir: Path, measure: Measure
) -> Node:
    if not devices:
        return node
    lacking = [key for key in DEVICE_FIGURES if getattr(node, key) is None]
    is_known = canonical_name(node.device) in catalogue()
    if lacking and not is_known:
        with placed(f"node {node.name!r}: device {node.device!r}"):
            figures = _figures(node.device, devices, cache_dir, measure)
        lacking = [*lacking, *(["precision"] if node.precision is None else [])]
        node = replace(node, **{key: figures[key] for key in lacking})
    return with_reported_memory(node, _memories_gib(devices))


def _memories_gib(devices: Sequence[Any]) -> list[float]:
    """Return the memory of each device that reports it, without CPUs.

    CPUs stand in for other devices, or share the machine's memory.
    """
    cards = (device for device in devices if device.platform != "cpu")
    return [gib for gib in map(memory_gib_of, cards) if gib]


def _figures(
    name: str, devices: Sequence[Any], cache_dir: Path, measure: Measure
) -> dict[str, Any]:
    """Return the figures of a kind that the catalogue lacks.

    They come from the cache; if it lacks them, they are measured and cached.
    """
    path = cache_dir / _FOLDER / _file(devices[0])
    kept = _read(path)
    memory_gib = min(_memories_gib(devices), default=None)
    if kept is not None and (kept.link_gb_per_s is not None or len(devices) < 2):
        # the measured card of this kind may have had a different memory
        return replace(kept, memory_gib=memory_gib or kept.memory_gib).figures()
    found = measure(devices, memory_gib or _LEAST_GIB)
    parts = [f"{name}: not in the catalogue", str(found), _keep(path, found)]
    if memory_gib is None:
        parts.append(f"its memory is unknown: {_LEAST_GIB:g} GiB are assumed")
    warnings.warn("; ".join(parts), stacklevel=2)
    return found.figures()


def _file(device: Any) -> str:
    """Return the name of the cache file.

    It depends on the driver and the release of JAX, as results may depend on them.
    """
    driver = getattr(getattr(device, "client", None), "platform_version", "")
    key = json.dumps([device.device_kind, driver, jax.__version__])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return f"{node_stem(device.device_kind)}-{digest}.json"


def _keep(path: Path, found: Probe) -> str:
    """Write the file; return a message that says where, or why it was not written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            key: value for key, value in asdict(found).items() if value is not None
        }
        write_whole(path, json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        return f"not kept: {error.filename}: {error.strerror}"
    return f"kept in {path}"


def _read(path: Path) -> Probe | None:
    """Return the content of the file; None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        return read_file(path, _parse, what="measured device")
    except BadInput as damaged:
        warnings.warn(f"{damaged.got}: it is measured again", stacklevel=2)
        return None


def _parse(text: str) -> Probe:
    raw = parsed(text, json_value, what="JSON", allowed=_ALLOWED, fix=_FIX)
    values = read_fields(raw, Probe, where="")
    values["tflops"] = read_record(
        values["tflops"], where="tflops", required={}, optional=_RATES
    )
    numbers = [
        *values["tflops"].values(),
        *(values[key] for key in values.keys() - {"tflops"}),
    ]
    if not values["tflops"] or not all(map(ranges.RATE.has, numbers)):
        raise BadInput(got=f"numbers {numbers}", allowed=_ALLOWED, fix=_FIX)
    return Probe(**values)
