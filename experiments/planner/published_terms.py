# SPDX-License-Identifier: Apache-2.0
"""Turns layer profiles and link fits published with Sailor into the planner's terms.

Owns the cost terms under which planners were compared before (fp32, blocking messages,
a ring sum of 16 replicas after the pipeline): layer times as profiled, messages by the
fit for both ends' GPU kinds and counts, 24 bytes per parameter, 2 or 3 GB for the
framework. Does not own the clusters that are compared (`a100_v100.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.planner.model.problem import (
    DeviceClass,
    Floats,
    LayerCosts,
    Option,
    Problem,
    problem,
)

ZONE = "us-central1-a"
MICROBATCH_SIZES = (1, 2, 4, 8)
TENSOR_DEGREES = (1, 2, 4)
FLOAT_BYTES = 4
_BYTES_PER_PARAMETER = 24
_BUCKET_BYTES = 5e8
_RING_SIZE = 16
_LEAST_RATE = 1e6  # the fits are parabolas that leave the sensible range


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Bytes per second by message size: a parabola in log2 of megabytes, capped."""

    parabola: tuple[float, float, float]
    most: float

    def seconds(self, size_bytes: Floats) -> Floats:
        x = np.log2(np.maximum(size_bytes, 1.0) / 1e6)
        rate = np.polyval(self.parabola, x) * 1e9
        return size_bytes / np.clip(rate, _LEAST_RATE, self.most)


def ring_s(links: Sequence[Fit], size_bytes: Floats, num_members: int) -> Floats:
    """Return the seconds of a sum over a ring, bucket by bucket; all members wait for
    the slowest link."""
    full, rest = np.divmod(size_bytes, _BUCKET_BYTES)

    def bucket_s(bucket_bytes: Floats) -> Floats:
        messages_s = [link.seconds(bucket_bytes / num_members) for link in links]
        return 2 * (num_members - 1) * np.max(messages_s, axis=0)

    return full * bucket_s(np.full_like(rest, _BUCKET_BYTES)) + bucket_s(rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The published files of one model."""

    profiles: Mapping[str, Any]  # by GPU kind
    layers: Mapping[str, Any]  # by tensor degree
    fits: Mapping[str, Any]
    memory_bytes: Mapping[str, float]


def read_published(folder: Path, model: str, gpus: Sequence[str]) -> Published:
    """Read the published files about a model on some GPU kinds."""
    sailor = folder / "sailor"
    memory = json.loads((sailor / "gpu_memory.json").read_text())
    fits = json.loads((folder / "network/sailor_zone_pair_fits_mixed.json").read_text())
    return Published(
        profiles={
            gpu: json.loads(
                (sailor / f"profiles_referee/{model}/{gpu}.json").read_text()
            )
            for gpu in gpus
        },
        layers=json.loads((sailor / "layer_memory.json").read_text())[model],
        fits=fits[ZONE],
        memory_bytes={gpu: memory[gpu]["mem_per_gpu"] for gpu in gpus},
    )


def published_problem(
    published: Published,
    num_gpus: Mapping[str, int],
    global_batch: int,
    degrees: Sequence[int] = TENSOR_DEGREES,
) -> Problem:
    """Return the comparison's problem on `num_gpus` of each kind."""
    gpus = list(num_gpus)
    options = [
        Option(device_class=g, tensor=tensor)
        for g in range(len(gpus))
        for tensor in degrees
    ]
    times_BO3L = _all_times(published, gpus, options)
    summed = problem(
        _terms(published, gpus, options, times_BO3L),
        classes=[DeviceClass(name=g, num_devices=n) for g, n in num_gpus.items()],
        options=options,
        microbatch_sizes=MICROBATCH_SIZES,
        global_batch=global_batch,
    )
    sync_s_BOU, update_s_BOU = summed.after_s_ABOU.copy()
    for start in range(summed.num_layers):
        # the published terms count the update of one layer only, the largest
        largest_BOL = np.maximum.accumulate(times_BO3L[:, :, 2, start:], axis=2)
        update_s_BOU[:, :, summed.range_IJ[start, start + 1 :]] = largest_BOL
    return replace(summed, after_s_ABOU=np.stack([sync_s_BOU, update_s_BOU]))


def _terms(
    published: Published,
    gpus: Sequence[str],
    options: Sequence[Option],
    times_BO3L: Floats,
) -> LayerCosts:
    params_OL = _floats(published, options, "params_floats")
    saved_OL = _floats(published, options, "act_mem_floats")
    alone = [Option(device_class=0)]
    params_L = parameters_L(published)
    outputs_L = _floats(published, alone, "act_output_floats")[0]
    kinds, firsts = _kinds(times_BO3L, params_OL, saved_OL, outputs_L)
    sizes_B = np.array(MICROBATCH_SIZES, dtype=np.float64)
    message_bytes_BK = FLOAT_BYTES * sizes_B[:, None] * outputs_L[firsts]
    message_s_BKOO = np.zeros((*message_bytes_BK.shape, len(options), len(options)))
    for a, sender in enumerate(options):
        for b, receiver in enumerate(options):
            fit = fit_of(published, gpus, sender, receiver)
            message_s_BKOO[:, :, a, b] = fit.seconds(message_bytes_BK)
    memory_bytes_O = np.array(
        [published.memory_bytes[gpus[o.device_class]] for o in options]
    )
    framework_bytes_O = np.array([2e9 if o.tensor == 1 else 3e9 for o in options])
    rings = [fit_of(published, gpus, one, one) for one in map(on_one_gpu, options)]
    tensor_O1 = np.array([[o.tensor] for o in options])
    return LayerCosts(
        kinds=kinds,
        busy_s_BOK=times_BO3L[:, :, :2].sum(axis=2)[:, :, firsts],
        update_s_BOK=times_BO3L[:, :, 2][:, :, firsts],
        static_bytes_BOK=np.tile(
            _BYTES_PER_PARAMETER * params_OL[:, firsts], (len(sizes_B), 1, 1)
        ),
        saved_bytes_BOK=FLOAT_BYTES * sizes_B[:, None, None] * saved_OL[:, firsts],
        memory_bytes_BO=np.tile(memory_bytes_O - framework_bytes_O, (len(sizes_B), 1)),
        sync_bytes_OK=FLOAT_BYTES * params_L[firsts] / tensor_O1,
        sync_s=lambda o, size_bytes: ring_s([rings[o]], size_bytes, _RING_SIZE),
        send_s_BKOO=message_s_BKOO,
        return_s_BKOO=message_s_BKOO.swapaxes(2, 3),
        last_factor=2.0,
        long_first_factor=2.0,
        long_from=4,
    )


def _all_times(
    published: Published, gpus: Sequence[str], options: Sequence[Option]
) -> Floats:
    by_size = [
        [_times(published.profiles[gpus[o.device_class]], b, o.tensor) for o in options]
        for b in MICROBATCH_SIZES
    ]
    return np.array(by_size)


def _times(profile: Mapping[str, Any], size: int, tensor: int) -> Floats:
    """Return forward, backward and update seconds by layer; NaN if not profiled."""
    some = next(iter(next(iter(profile.values())).values()))
    layers = profile.get(str(size), {}).get(str(tensor))
    if layers is None:
        return np.full((3, len(some)), np.nan)
    return np.array([layers[str(n)] for n in range(len(some))]).T


def _floats(published: Published, options: Sequence[Option], key: str) -> Floats:
    """Return one number per option and layer, as published for the option's degree."""
    tables = [published.layers[str(o.tensor)] for o in options]
    return np.array([[float(t[str(n)][key]) for n in range(len(t))] for t in tables])


def on_one_gpu(option: Option) -> Option:
    return Option(device_class=option.device_class)


def _kinds(*tables: Floats) -> tuple[tuple[int, ...], list[int]]:
    """Number layers by kind (equal in all tables); also return each kind's first."""
    num_layers = tables[0].shape[-1]
    seen: dict[bytes, int] = {}
    firsts: list[int] = []
    kinds = []
    for n in range(num_layers):
        key = b"".join(np.ascontiguousarray(t[..., n]).tobytes() for t in tables)
        if key not in seen:
            seen[key] = len(firsts)
            firsts.append(n)
        kinds.append(seen[key])
    return tuple(kinds), firsts


def parameters_L(published: Published) -> Floats:
    """Return the number of parameters of each layer."""
    return _floats(published, [Option(device_class=0)], "params_floats")[0]


def fit_of(published: Published, gpus: Sequence[str], a: Option, b: Option) -> Fit:
    """Return the fit for messages from one option's GPUs to the other's."""
    table = published.fits[gpus[a.device_class]][str(a.tensor)][ZONE]
    (square, slope, base), most = table[gpus[b.device_class]][str(b.tensor)]
    return Fit(parabola=(square, slope, base), most=most)
