# SPDX-License-Identifier: Apache-2.0
"""Loads a trained model onto the devices of this process, each layer whole on one.

Owns the assignment of layers to devices, and the loading of weights one by one, in the
precision of compute. Does not own the source of weights (a folder or a checkpoint), nor
computation with them (`decoding.py`, `scoring.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from hetjax.errors import BadInput
from hetjax.models.experts.dropless import without_capacity
from hetjax.models.model import (
    Layer,
    Model,
    ModuleSpec,
    Params,
    abstract_params,
)

Read = Callable[[str, tuple[int, ...]], np.ndarray]  # by full path and shape
SHARE = 0.8  # of a device's free memory for weights; the rest is for computing


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A layer's modules, their parameters (tied ones, too) by name, and its device.

    Modules have their names as paths, so that equal layers have equal modules.
    """

    specs: tuple[ModuleSpec, ...]
    params: dict[str, Params]
    device: jax.Device


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All layers, in order; the last module of the last layer is the head."""

    model: Model
    layers: tuple[LoadedLayer, ...]

    @property
    def devices(self) -> list[jax.Device]:
        """The devices that have a layer, in order."""
        return list(dict.fromkeys(layer.device for layer in self.layers))


def load_layers(
    model: Model,
    read: Read,
    dtype: np.dtype,
    devices: Sequence[jax.Device],
    free_bytes: Sequence[float] | None = None,
    loaded: Callable[[int, int], None] = lambda done, of: None,
) -> LoadedModel:
    """Read the model's weights onto the devices.

    The device with the most free memory gets all layers, if they fit; otherwise the
    layers fill the devices in order of free memory, largest first. If `free_bytes` is
    None, the devices report it. Experts drop no token here, even if they did in
    training. `loaded` is called for each layer. Raises BadInput if the devices have no
    room.
    """
    free = [free_memory(d) for d in devices] if free_bytes is None else free_bytes
    sizes = [_layer_bytes(model, layer, dtype) for layer in model.layers]
    places = spread(sizes, free)
    found: list[LoadedLayer] = []
    tied = {path for spec in model.modules for _, path in spec.tied}
    shared: dict[str, jax.Array] = {}
    for number, (layer, place) in enumerate(zip(model.layers, places, strict=True), 1):
        params: dict[str, Params] = {}
        for spec in layer.modules:
            own: Params = {}
            for name, parameter in abstract_params(spec).items():
                path = f"{spec.path}.{name}"
                value = read(path, parameter.shape).astype(dtype, copy=False)
                own[name] = jax.device_put(value, devices[place])
                if path in tied:
                    shared[path] = own[name]
            for name, path in spec.tied:
                own[name] = jax.device_put(shared[path], devices[place])
            params[spec.name] = own
        specs = tuple(without_capacity(_pathless(spec)) for spec in layer.modules)
        found.append(LoadedLayer(specs, params, devices[place]))
        loaded(number, len(model.layers))
    return LoadedModel(model, tuple(found))


def spread(layer_bytes: Sequence[int], free_bytes: Sequence[float]) -> list[int]:
    """Return for each layer the index of its device; raise BadInput if they do not fit.

    >>> spread([5, 5, 5, 5], [10, 30])
    [1, 1, 1, 1]
    >>> spread([5, 5, 5, 5], [13, 20])
    [1, 1, 1, 0]
    """
    order = sorted(range(len(free_bytes)), key=lambda at: -free_bytes[at])
    room = {at: SHARE * free_bytes[at] for at in order}
    found: list[int] = []
    for size in layer_bytes:
        while order and size > room[order[0]]:
            order.pop(0)
        if not order:
            raise _no_room(layer_bytes, free_bytes)
        room[order[0]] -= size
        found.append(order[0])
    return found


def model_bytes(model: Model, dtype: np.dtype) -> int:
    """Return the bytes of the weights of all layers."""
    return sum(_layer_bytes(model, layer, dtype) for layer in model.layers)


def free_memory(device: jax.Device) -> float:
    """Return the free bytes of a device; infinity if it does not report them (CPUs)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return math.inf
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _layer_bytes(model: Model, layer: Layer, dtype: np.dtype) -> int:
    """Return the bytes of all that the layer needs, tied parameters included: their
    owner may be on another device."""
    owned = {
        f"{spec.path}.{name}": parameter.shape
        for spec in model.modules
        for name, parameter in abstract_params(spec).items()
    }
    paths = [
        f"{spec.path}.{name}"
        for spec in layer.modules
        for name in abstract_params(spec)
    ]
    paths += [path for spec in layer.modules for _, path in spec.tied]
    return dtype.itemsize * sum(math.prod(owned[path]) for path in paths)


def _pathless(spec: ModuleSpec) -> ModuleSpec:
    return replace(spec, path=spec.name)


def _no_room(layer_bytes: Sequence[int], free_bytes: Sequence[float]) -> BadInput:
    free = ", ".join(f"{size / 2**30:.1f}" for size in free_bytes)
    return BadInput(
        got=f"weights of {sum(layer_bytes) / 2**30:.1f} GiB for devices that have "
        f"{free} GiB free",
        allowed=f"each layer on one device, in {SHARE:.0%} of its free memory",
        fix="end other processes on the devices, or give --dtype bfloat16 (if it is "
        "float32 now), --platform cpu or, for a run on its own plan, --on plan",
    )
