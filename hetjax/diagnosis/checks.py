# SPDX-License-Identifier: Apache-2.0
"""Turns facts into findings: ok, warning or problem.

Pure functions; each yields the findings of one check. Owns the thresholds and the
texts. Does not own the gathering of facts (`gathering.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from hetjax.cluster.catalogue import (
    best_precision,
    catalogue,
    device_spec,
)
from hetjax.cluster.cluster import Node
from hetjax.diagnosis.facts import (
    ClusterFile,
    Facts,
    Installed,
    Peer,
    Port,
    RunDirectory,
    Seen,
    Started,
    StoreAnswer,
)
from hetjax.mesh.accelerators import NVIDIA, same_release, unusable
from hetjax.plans.attention import EVERYWHERE
from hetjax.report.diagnosis import Diagnosis, Finding, Level

_HIDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# The minimum that wheels need: NVIDIA's driver, and compute capability
_DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
_CAPABILITIES = {"jax-cuda12-plugin": 5.2, "jax-cuda13-plugin": 7.5}
# From 9.11 on cuDNN has no code for cards before 7.5 (seen in its libraries)
_CUDNN, _CUDNN_WITHOUT, _CUDNN_CAPABILITY = "nvidia-cudnn-cu12", (9, 11), 7.5
_LEAST_FREE_GIB = {"problem": 1.0, "warning": 20.0}
_SLOW_DISK_MB_PER_S = 50.0
_CLOCK_S = {"problem": 60.0, "warning": 1.0}  # stores tolerate minutes at most
_STORE_CLOCK_S = 2.0  # S3 reports whole seconds
_SLOW_LINK = 0.5  # of the bandwidth in the cluster file or the catalogue


def diagnosis(facts: Facts) -> Diagnosis:
    """Return all findings, in the order in which a person would fix them."""
    found = [*_versions(facts.installed)]
    found += _wheels(facts.installed)
    found += _devices(facts.installed, facts.started)
    if facts.cluster is not None:
        found += _cluster(facts.cluster, facts.started)
    if facts.run_dir is not None:
        found += _run_dir(facts.run_dir)
    if facts.store is not None:
        found += _store(facts.store)
    found += [finding for port in facts.ports for finding in _port(port)]
    found += [f for peer in facts.peers for f in _peer(peer, facts.cluster)]
    return Diagnosis(tuple(found))


def _versions(installed: Installed) -> Iterator[Finding]:
    """Check that JAX, jaxlib and plugins have the same version."""
    versions = installed.versions
    ours = versions.get("jaxlib")
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    unlike = [
        name
        for name, version in versions.items()
        if name.startswith("jax-") and not same_release(version, ours or "")
    ]
    if versions.get("jax") != ours:
        yield _problem(
            "versions",
            f"jax {versions.get('jax', 'missing')} with jaxlib {ours or 'missing'}",
            f"pip install 'jax=={versions['jax']}' 'jaxlib=={versions['jax']}'"
            if "jax" in versions
            else "pip install hetjax",
        )
    if unlike:
        ignored = ", ".join(f"{name} {versions[name]}" for name in unlike)
        yield _problem(
            "versions",
            f"JAX ignores {ignored}: jaxlib is {ours}",
            f"pip install 'hetjax[{_extra(unlike[0])}]', or pip uninstall "
            f"{' '.join(unlike)}",
        )
    if not unlike and versions.get("jax") == ours:
        yield _ok("versions", f"{listed}; {installed.system}")


def _extra(plugin: str) -> str:
    if "cuda" in plugin:
        return "cuda13" if "cuda13" in plugin else "cuda12"
    return "rocm"


def _wheels(installed: Installed) -> Iterator[Finding]:
    """Check that NVIDIA's driver and cards are new enough for the wheels."""
    plugins = [name for name in NVIDIA.extras if name in installed.versions]
    for card in dict.fromkeys(replace(card, uuid="") for card in installed.cards):
        capability, driver = _number(card.compute_capability), _number(card.driver)
        shown = f"{card.name} (compute capability {card.compute_capability})"
        for plugin in plugins:
            if driver is not None and driver < _DRIVERS[plugin]:
                yield _problem(
                    "driver",
                    f"{plugin} needs NVIDIA's driver {_DRIVERS[plugin]} or newer; this "
                    f"machine has {card.driver}",
                    _other_wheels(plugin, "update the driver"),
                )
            if capability is not None and capability < _CAPABILITIES[plugin]:
                yield _problem(
                    "driver",
                    f"{plugin} needs compute capability {_CAPABILITIES[plugin]}; this "
                    f"machine has {shown}",
                    _other_wheels(plugin, "run with --platform cpu"),
                )
        yield from _cudnn(installed, shown, capability)
        if driver is not None and plugins:
            yield _ok("driver", f"{shown}: driver {card.driver}")


def _other_wheels(plugin: str, otherwise: str) -> str:
    if plugin == "jax-cuda13-plugin":
        return f"pip uninstall {plugin}; pip install 'hetjax[cuda12]', or {otherwise}"
    return otherwise


def _cudnn(
    installed: Installed, shown: str, capability: float | None
) -> Iterator[Finding]:
    version = installed.versions.get(_CUDNN)
    if version is None or capability is None or capability >= _CUDNN_CAPABILITY:
        return
    if tuple(map(int, version.split(".")[:2])) >= _CUDNN_WITHOUT:
        yield _problem(
            "driver",
            f"{_CUDNN} {version} has no code for {shown}",
            "pip install 'hetjax[cuda12-volta]'",
        )


def _devices(installed: Installed, started: Started) -> Iterator[Finding]:
    """Report the devices that JAX computes on, and what a run would do there."""
    if started.error is not None:
        yield _problem("devices", f"JAX does not start: {started.error}", _JAX_FIX)
        return
    on_cpu = all(seen.platform == "cpu" for seen in started.devices)
    if on_cpu and installed.visible is not None:
        yield _cpu_beside(installed)
    for seen in started.devices:
        yield _kind(seen)
    accelerators = [seen.name for seen in started.devices if seen.platform != "cpu"]
    if len(accelerators) > 1:
        yield _warning(
            "devices",
            f"{' and '.join(accelerators)} in one process; a run needs one kind "
            "per process",
            "start with --launcher processes: each kind is a node of its own",
        )


_JAX_FIX = "correct what JAX reports, or run with --platform cpu"


def _cpu_beside(installed: Installed) -> Finding:
    """Return why JAX has only the CPU beside an accelerator, simplest cause first."""
    there, variables = installed.visible, installed.variables
    assert there is not None
    beside = f"JAX has only the CPU of a machine with {there}"
    for name in _HIDING:
        if name in variables and variables[name].strip() in ("", "-1"):
            return _problem(
                "devices",
                f"{beside}: {name} is set to {variables[name]!r}, which hides it",
                f"unset {name}, or set it to the numbers of the devices",
            )
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        if variables.get(name, "").lower().startswith("cpu"):
            asked = f"{beside}, because of {name}={variables[name]}"
            return _warning("devices", asked, f"unset {name} to use it")
    problem = unusable(there, installed.versions)
    if problem is not None:
        why = problem.got.rpartition("; ")[2]
        return _problem("devices", f"{beside}: {why}", problem.fix)
    return _problem("devices", f"{beside}, although its plugin is installed", _JAX_FIX)


def _kind(seen: Seen) -> Finding:
    memory = "" if seen.memory_gib is None else f", {seen.memory_gib:.1f} GiB each"
    capability = seen.compute_capability
    has = "" if capability is None else f", compute capability {capability}"
    what = f"{seen.count} x {seen.name}{memory}{has}"
    if seen.name not in catalogue():
        return _warning(
            "devices",
            f"{what}: not in the catalogue, so the first run measures it (20 s)",
            "hetjax doctor --probe measures it now",
        )
    spec = device_spec(Node(name="here", device=seen.name, count=1))
    attention = spec.attention or EVERYWHERE
    computes = f"computes in {best_precision(spec)}, attention by {attention}"
    return _ok("devices", f"{what}: {computes}")


def _cluster(file: ClusterFile, started: Started) -> Iterator[Finding]:
    if file.error is not None:
        yield _problem("cluster", file.error, file.fix)
        return
    kinds = ", ".join(f"{count} x {name}" for name, count in file.kinds.items())
    yield _ok("cluster", f"{file.path}: {kinds}")
    for seen in started.devices:
        planned = file.kinds.get(seen.name, 0)
        if seen.platform != "cpu" and planned < seen.count:
            yield _warning(
                "cluster",
                f"this machine has {seen.count} x {seen.name}; {file.path} has "
                f"{planned}",
                "add them to a node of the file to use them",
            )


def _run_dir(found: RunDirectory) -> Iterator[Finding]:
    if found.error is not None:
        yield _problem("run directory", found.error, found.fix)
        return
    free = f"{found.path}: {found.free_gib:.1f} GiB free"
    level = _level(_LEAST_FREE_GIB, lambda least: found.free_gib < least)
    if level != "ok":
        fix = f"make room for checkpoints on the disk of {found.path}, or give another "
        yield _finding("run directory", level, free, f"{fix}--run-dir")
    speed = f"{found.path}: writes {found.write_mb_per_s:.0f} MB/s"
    if found.write_mb_per_s < _SLOW_DISK_MB_PER_S:
        fix = "give --checkpoint.local a folder on a faster disk of each machine"
        yield _warning("run directory", speed, fix)
    elif level == "ok":
        yield _ok(
            "run directory", f"{speed}; {found.free_gib:.1f} GiB free; not in use"
        )
    yield from clock_off(
        f"the clock of the file server of {found.path}", found.clock_ahead_s
    )


def _store(found: StoreAnswer) -> Iterator[Finding]:
    if found.error is not None:
        yield _problem("store", found.error, found.fix)
    else:
        can = "lists, creates once, reads and deletes"
        yield _ok("store", f"{found.url}: {can}, {found.seconds:.1f} s")
        if abs(found.clock_ahead_s) > _STORE_CLOCK_S:
            yield from clock_off(f"the clock of {found.url}", found.clock_ahead_s)


def _port(found: Port) -> Iterator[Finding]:
    if found.error is None:
        yield _ok("ports", f"{found.number} is free")
        return
    yield _problem(
        "ports",
        f"cannot listen on port {found.number}: {found.error}",
        f"end the program that uses it (ss -ltnp 'sport = :{found.number}'), or use "
        "another port",
    )


def _peer(peer: Peer, cluster: ClusterFile | None) -> Iterator[Finding]:
    if peer.error is not None:
        port = peer.address.rpartition(":")[2]
        yield _problem(
            "links",
            f"{peer.address} cannot be reached: {peer.error}",
            f"type there: hetjax doctor --listen {port}; and open firewalls "
            "between the machines",
        )
        return
    found = f"{peer.address}: {peer.gbit_per_s:.3g} Gbit/s, {peer.latency_ms:.2f} ms"
    promised = cluster and cluster.network_gbit_per_s
    if promised and peer.gbit_per_s < _SLOW_LINK * promised:
        yield _warning(
            "links",
            f"{found}; plans count on {promised:g} Gbit/s",
            "write the link into the cluster file: bandwidth_gbit_per_s = "
            f"{peer.gbit_per_s:.3g}, latency_ms = {peer.latency_ms:.2g}",
        )
    else:
        yield _ok("links", found)
    yield from clock_off(f"the clock of {peer.address}", peer.clock_ahead_s)


def clock_off(clock: str, ahead_s: float) -> Iterator[Finding]:
    """Yield a finding if `clock`, as text, differs from this machine's."""
    level = _level(_CLOCK_S, lambda most: abs(ahead_s) > most)
    if level != "ok":
        way = "ahead of" if ahead_s > 0 else "behind"
        yield _finding(
            "clocks",
            level,
            f"{clock} is {abs(ahead_s):.1f} s {way} this machine's",
            "synchronise both clocks: timedatectl set-ntp true",
        )


def _level(limits: dict[str, float], is_past: Callable[[float], bool]) -> Level:
    if is_past(limits["problem"]):
        return "problem"
    return "warning" if is_past(limits["warning"]) else "ok"


def _number(version: str | None) -> float | None:
    """Return the first two parts of a version: 550.54 of 550.54.15."""
    parts = (version or "").split(".")[:2]
    return float(".".join(parts)) if all(part.isdigit() for part in parts) else None


def _finding(check: str, level: Level, found: str, fix: str = "") -> Finding:
    return Finding(check=check, level=level, found=found, fix=fix)


def _ok(check: str, found: str) -> Finding:
    return _finding(check, "ok", found)


def _warning(check: str, found: str, fix: str) -> Finding:
    return _finding(check, "warning", found, fix)


def _problem(check: str, found: str, fix: str) -> Finding:
    return _finding(check, "problem", found, fix)
