# SPDX-License-Identifier: Apache-2.0
"""Reads the device catalogue: peaks and prices of one device of each kind.

Owns the reading of `devices.toml`, the names of devices, and how a node's own figures
override it. Does not own which devices are there (`discovery.py`), the price of a
node's devices (`prices.py`), how near a program comes to these peaks, nor routes
between devices (both `costs/`).
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node, Precision
from hetjax.cluster.device_names import meant
from hetjax.cluster.speeds import AS_MODELLED, Speeds
from hetjax.errors import BadInput
from hetjax.files.parsing import toml_table

Backend = Literal["cpu", "gpu", "tpu"]  # XLA's backends, by their targets
# a backend, or the kinds of devices whose programs were seen to differ from its others:
# XLA's kernels that sum rows and use the sums at once need an Ampere GPU or later
Compiler = Backend | Literal["GPU-before-Ampere", "TPU-v6e"]

_FILE = Path(__file__).parent / "devices.toml"
_UNLIKE = 0.1  # of the memory: a larger difference is another card of the same name
_NUM_NEAREST = 3  # suggestions for an unknown name
# words that tell cards of one number apart; these cards also differ in memory
_VARIANTS = {"ti", "super", "laptop", "mobile", "max", "d", "mig", "nvl", "ada"}
_PLAIN = {  # keys without figures
    "aliases",
    "attention",
    "bf16_native",
    "fp16_native",
    "links_span_hosts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """Peaks of one device (one `jax.Device`) and of its links; prices in USD.

    `peak_tflops` is dense bf16, or fp16 if bf16 is not native. `fp16_native` says
    whether matrix units multiply fp16 as fast. `attention` is the device's own kernel
    for attention, if any. `gb` are 1e9 bytes, `gbit` 1e9 bits. Both bandwidths count
    one direction: `intra_node_gb_per_s` of one device, `network_gbit_per_s` of one
    host. `links_span_hosts` says whether the links inside a node also join its hosts.
    `watts` is the board's power, without the host's. `sources` gives the source of
    each figure, by field. `speeds` are those of the node.
    """

    name: str
    peak_tflops: float
    memory_gib: float
    memory_gb_per_s: float
    intra_node_gb_per_s: float
    network_gbit_per_s: float
    fp32_tflops: float | None = None
    price_per_hour: float | None = None
    spot_price_per_hour: float | None = None
    watts: float | None = None
    bf16_native: bool = True
    fp16_native: bool = True
    attention: Literal["cudnn", "splash"] | None = None
    links_span_hosts: bool = False
    speeds: Speeds = AS_MODELLED
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


@cache
def catalogue() -> Mapping[str, DeviceSpec]:
    """Return all known devices by name, in file order."""
    raw = toml_table(_FILE.read_text(encoding="utf-8"))
    specs = {
        name: _spec(name, entry, raw["sources"])
        for name, entry in raw["device"].items()
    }
    return MappingProxyType(specs)


@cache
def canonical_name(device: str) -> str:
    """Return the catalogue's name for a device.

    A name that may mean several devices, or none, is returned as it is.

    >>> canonical_name("RTX 4090"), canonical_name("A100 80GB")
    ('GeForce-RTX-4090', 'A100 80GB')
    """
    if device in _names():
        return _names()[device]
    found = candidates(device)
    return found[0] if len(found) == 1 else device


def candidates(device: str) -> list[str]:
    """Return the catalogue's names that a name, or a part of one, may mean."""
    entries = {name: (name, *spec.aliases) for name, spec in catalogue().items()}
    entries.pop("cpu", None)  # other code uses exactly this name
    return meant(device, entries)


def check_devices(cluster: Cluster) -> None:
    """Raise one BadInput for all devices without figures in the catalogue or nodes."""
    problems: list[BadInput] = []
    for node in cluster.nodes:
        try:
            device_spec(node)
        except BadInput as problem:
            problems.append(problem)
    if problems:
        raise BadInput(
            got="; ".join(problem.got for problem in problems),
            allowed="; ".join(dict.fromkeys(problem.allowed for problem in problems)),
            fix="; ".join(dict.fromkeys(problem.fix for problem in problems)),
        )


def backend_of(device: str) -> Backend:
    """Return which of XLA's backends compiles for devices of this name.

    >>> backend_of("cpu"), backend_of("TPU v5e"), backend_of("some new card")
    ('cpu', 'tpu', 'gpu')
    """
    name = canonical_name(device)
    if name == "cpu":
        return "cpu"
    return "tpu" if name.startswith("TPU") else "gpu"


def compiler_of(device: str) -> Compiler:
    """Return the compiler of the device, of those that memory models distinguish.

    >>> compiler_of("TPU-v5e"), compiler_of("TPU-v6e"), compiler_of("T4")
    ('tpu', 'TPU-v6e', 'GPU-before-Ampere')
    """
    name, backend = canonical_name(device), backend_of(device)
    if name == "TPU-v6e":
        return "TPU-v6e"
    spec = catalogue().get(name)
    is_old = backend == "gpu" and spec is not None and not spec.bf16_native
    return "GPU-before-Ampere" if is_old else backend


def backend_of_compiler(compiler: Compiler) -> Backend:
    """Return the backend to which a compiler belongs."""
    if compiler == "GPU-before-Ampere":
        return "gpu"
    return "tpu" if compiler == "TPU-v6e" else compiler


def device_spec(node: Node) -> DeviceSpec:
    """Return the figures of each device of the node; the node's own take precedence.

    Raises BadInput for a device that neither the catalogue nor the node describes in
    full.
    """
    own = {key: getattr(node, key) for key in DEVICE_FIGURES}
    given = {key: value for key, value in own.items() if value is not None}
    native = _native(node.precision)
    sources = dict.fromkeys(given, "the cluster file")
    known = catalogue().get(canonical_name(node.device))
    if known:
        sources = {**known.sources, **sources}
        spec = replace(known, **given, **native, sources=sources)
    elif len(given) < len(DEVICE_FIGURES):
        raise _unknown(node, [key for key in DEVICE_FIGURES if key not in given])
    else:
        spec = DeviceSpec(name=node.device, sources=sources, **{**given, **native})
    return spec if node.speeds == AS_MODELLED else _at_speeds(spec, node.speeds)


def _at_speeds(spec: DeviceSpec, speeds: Speeds) -> DeviceSpec:
    """Return the figures with scaled links; the estimates of kernels apply the other
    speeds."""
    return replace(
        spec,
        intra_node_gb_per_s=spec.intra_node_gb_per_s * speeds.links,
        network_gbit_per_s=spec.network_gbit_per_s * speeds.network,
        speeds=speeds,
    )


def _native(best: Precision | None) -> dict[str, Any]:
    """Return the native precisions of a device that computes best in `best`."""
    if best is None:
        return {}
    return {"bf16_native": best == "bfloat16", "fp16_native": best == "float16"}


def best_precision(spec: DeviceSpec) -> Precision:
    """Return the best precision of a device for a model: bf16 on matrix units,
    otherwise fp16 on them (which needs loss scaling), otherwise fp32."""
    native = native_precisions(spec)
    return native[0] if native else "float32"


def native_precisions(spec: DeviceSpec) -> tuple[Precision, ...]:
    """Return the precisions that matrix units multiply at the device's peak, the best
    first."""
    native: dict[Precision, bool] = {
        "bfloat16": spec.bf16_native,
        "float16": spec.fp16_native,
    }
    return tuple(precision for precision, has in native.items() if has)


def unlike_memory_gib(device: str, reported_gib: float) -> float | None:
    """Return the memory that a device reports, rounded.

    Returns None if the catalogue has nearly the same figure: it then means this card.
    """
    known = catalogue().get(canonical_name(device))
    if known and abs(reported_gib - known.memory_gib) <= _UNLIKE * known.memory_gib:
        return None
    return round(reported_gib, 2)


def _spec(name: str, entry: dict[str, Any], sources: dict[str, str]) -> DeviceSpec:
    cited = {key: pair for key, pair in entry.items() if key not in _PLAIN}
    plain = {key: value for key, value in entry.items() if key in _PLAIN}
    return DeviceSpec(
        name=name,
        aliases=tuple(plain.pop("aliases", ())),
        sources={key: sources[source] for key, (_, source) in cited.items()},
        **plain,
        **{key: value for key, (value, _) in cited.items()},
    )


@cache
def _names() -> Mapping[str, str]:
    return {
        word: name
        for name, spec in catalogue().items()
        for word in (name, *spec.aliases)
    }


def _unknown(node: Node, missing: list[str]) -> BadInput:
    keys = ", ".join(f"{key} = ..." for key in missing)
    several = candidates(node.device)
    if several:
        least = min(several, key=lambda name: catalogue()[name].memory_gib)
        return BadInput(
            got=f"node {node.name!r}: device {node.device!r} may be any of "
            f"{len(several)} devices of the catalogue",
            allowed=f"{', '.join(several)}; or a device with figures of its own",
            fix=f'write device = "{least}", or add to the node: {keys}',
        )
    holding, alike = _holding(node.device), _alike(node.device)
    near = list(dict.fromkeys([*holding, *alike]))
    spelled = [name for name in holding or alike if _is_spelling_of(name, node.device)]
    # of several possible devices the one with the least memory, so that plans fit
    least = min(spelled, key=lambda name: catalogue()[name].memory_gib, default=None)
    named = f'write device = "{least}", or ' if least else ""
    return BadInput(
        got=f"node {node.name!r}: device {node.device!r} is not in the device catalogue"
        f" and the node gives no {', '.join(missing)}",
        allowed=f"{'close matches' if near else 'devices'}: "
        f"{', '.join(near[:_NUM_NEAREST] or catalogue())}; or a device with figures of "
        "its own",
        fix=f"{named}add to the node: {keys}; on a machine that has it, hetjax doctor "
        "--probe measures and prints them",
    )


def _is_spelling_of(name: str, device: str) -> bool:
    """Return whether `device` may mean `name`. Another number or another variant is
    another card."""
    ours, said = (re.findall(r"\d+|[a-z]+", word.lower()) for word in (name, device))
    numbers = {word for word in said if word.isdigit()}
    return numbers <= {*ours} and _VARIANTS & {*ours} == _VARIANTS & {*said}


def _holding(device: str) -> list[str]:
    """Return the names that contain the word."""
    word = _word(device)
    return [name for other, name in _words().items() if word and word in other]


def _alike(device: str) -> list[str]:
    """Return the names that are similar to the word, the nearest first."""
    words = _words()
    return [words[o] for o in difflib.get_close_matches(_word(device), list(words))]


def _words() -> dict[str, str]:
    return {_word(other): name for other, name in _names().items()}


def _word(device: str) -> str:
    return "-".join(device.lower().split())
