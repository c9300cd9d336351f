# SPDX-License-Identifier: Apache-2.0
"""Refuses a run on the CPU if the machine has an accelerator that JAX does not use.

Owns the files that show an accelerator, what JAX needs for it, and the errors if that
is missing or does not fit. Does not own which runs are refused: those that are not
simulated and did not request the CPU (`training/layout/hardware.py`,
`training/worker.py`).
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from hetjax.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A family of devices; `name` has its article, `platform` is JAX's word for it.

    `extras` maps each distribution that lets JAX use it to the extra of hetjax that
    installs the distribution. The first is the one to install if there is none.
    """

    name: str
    platform: str
    extras: Mapping[str, str]


NVIDIA = Accelerator(
    name="an NVIDIA GPU",
    platform="cuda",
    # CUDA 12 first: its wheels run on every driver that those of CUDA 13 run on
    extras={"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"},
)
TPU = Accelerator(name="a TPU", platform="tpu", extras={"libtpu": "tpu"})

AMD = Accelerator(
    name="an AMD GPU", platform="rocm", extras={"jax-rocm7-plugin": "rocm"}
)

# The GPUs that JAX's ROCm wheels are built for, as the kernel's driver writes them:
# gfx908, 90a, 942, 950, 1030, 1100, 1101, 1200, 1201. No GPUs inside processors
_GFX = {
    *("90008", "90010", "90402", "90500"),
    *("100300", "110000", "110001", "120000", "120001"),
}
_GOOGLE = "0x1ae0"  # a PCI vendor; its network cards have other device ids
_TPU_IDS = {  # those that JAX 0.12 looks for
    *("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f"),
    *("0x0076", "0x0083", "0x007c"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Visible:
    """An accelerator that this process may use, and a file that shows it."""

    accelerator: Accelerator
    file: Path

    def __str__(self) -> str:
        return f"{self.accelerator.name} ({self.file})"


def visible_accelerator(root: Path = Path("/")) -> Visible | None:
    """Return the accelerator that this process may use, if there is one.

    Device files decide: a container has those that it was given, while /proc and /sys
    show what its host has. `root` is the root of the file system.
    """
    dev = root / "dev"
    cards = [*sorted(dev.glob("nvidia[0-9]*")), *_cards_of_wsl(root)]
    if cards:
        return Visible(accelerator=NVIDIA, file=cards[0])
    amd = dev / "kfd"
    if amd.exists() and _has_rocm_gpu(root):
        return Visible(accelerator=AMD, file=amd)
    chips = [*sorted(dev.glob("accel[0-9]*")), *sorted(dev.glob("vfio/[0-9]*"))]
    if chips and _has_tpu(root):  # other devices have such files, too
        return Visible(accelerator=TPU, file=chips[0])
    return None


def _cards_of_wsl(root: Path) -> list[Path]:
    """Return Windows' device file, which any GPU has, if NVIDIA's driver is there."""
    card, driver = root / "dev/dxg", root / "usr/lib/wsl/lib/libcuda.so.1"
    return [card] if card.exists() and driver.exists() else []


def _has_rocm_gpu(root: Path) -> bool:
    return any(node.get("gfx_target_version") in _GFX for node in amd_nodes(root))


def amd_nodes(root: Path = Path("/")) -> list[dict[str, str]]:
    """Return what the kernel's driver for AMD says of each processor and GPU."""
    texts = map(_text_of, root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"))
    lines = ([line.split() for line in text.splitlines()] for text in texts)
    return [dict(pair for pair in node if len(pair) == 2) for node in lines]


def _has_tpu(root: Path) -> bool:
    return any(
        _text_of(pci / "vendor") == _GOOGLE and _text_of(pci / "device") in _TPU_IDS
        for pci in root.glob("sys/bus/pci/devices/*")
    )


def _text_of(file: Path) -> str:
    """Return the text of a system file; empty if a container hides the file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def installed_versions() -> dict[str, str]:
    """Return the versions of jaxlib and of the plugins that use accelerators."""
    found: dict[str, str] = {}
    for name in ("jaxlib", *NVIDIA.extras, *AMD.extras, *TPU.extras):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def unusable(there: Visible, versions: Mapping[str, str]) -> BadInput | None:
    """Return what to raise if JAX cannot use `there`, as far as versions tell.

    `versions` are those of installed distributions.
    """
    plugin = _plugin(there, versions)
    if plugin not in versions:
        return _cpu_instead(there, versions, f"JAX cannot use it without {plugin}")
    if _fits(plugin, versions):
        return None
    why = f"JAX ignores {plugin} {versions[plugin]}: jaxlib is {versions['jaxlib']}"
    return _cpu_instead(there, versions, why)


def not_started(there: Visible, versions: Mapping[str, str], answer: str) -> BadInput:
    """Return what to raise if JAX could use `there`, and does not.

    `answer` is what JAX says to a request for it.
    """
    plugin = _plugin(there, versions)
    why = f"it did not start with {plugin} {versions[plugin]} ({answer})"
    first = "correct what JAX reports about it, or "
    return _cpu_instead(there, versions, why, first)


def _plugin(there: Visible, versions: Mapping[str, str]) -> str:
    """Return a plugin that is installed and fits, else an installed or known plugin."""
    known = list(there.accelerator.extras)
    installed = [name for name in known if name in versions]
    fitting = [name for name in installed if _fits(name, versions)]
    return (fitting or installed or known)[0]


def _fits(plugin: str, versions: Mapping[str, str]) -> bool:
    return plugin in TPU.extras or same_release(versions[plugin], versions["jaxlib"])


def same_release(plugin: str, jaxlib: str) -> bool:
    """Whether JAX accepts the plugin; ROCm's are released again as .post1.

    >>> same_release("0.12.0.post1", "0.12.0"), same_release("0.12.0", "0.12.0.1")
    (True, False)
    """
    return plugin.partition(".post")[0] == jaxlib


def _cpu_instead(
    there: Visible, versions: Mapping[str, str], why: str, first: str = ""
) -> BadInput:
    extra = there.accelerator.extras[_plugin(there, versions)]
    return BadInput(
        got=f"a run on the CPU of a machine that has {there}; {why}",
        allowed="a run on the accelerator, or an explicit request for the CPU",
        fix=f"{first}pip install 'hetjax[{extra}]', and start again (in a notebook: "
        "restart the kernel); or add --platform cpu",
    )


def kept_from(there: Visible) -> BadInput:
    """Return what to raise if JAX was set to the CPU alone before this run."""
    return BadInput(
        got=f"a run on {there} in a process where JAX was restricted to the CPU, as by "
        "a simulated run",
        allowed="only one of the two in a process",
        fix="start a new process (in a notebook: restart the kernel), or add "
        "--platform cpu",
    )


def start_jax() -> list[jax.Device]:
    """Start JAX, and return the local devices that it computes on by default.

    Raises BadInput if it does not start, or lacks the CPU, on which weights are drawn.
    """
    try:
        jax.devices("cpu")
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter: no platform is left
        why = (str(error).splitlines() or ["none of these is available"])[0]
        asked = os.environ.get("JAX_PLATFORMS")
        raise BadInput(
            got=f"{f'JAX_PLATFORMS={asked}' if asked else 'JAX does not start'}: {why}",
            allowed="available platforms, including the CPU",
            fix=f"{'unset JAX_PLATFORMS' if asked else 'correct what JAX reports'}, or "
            "set JAX_PLATFORMS=cpu",
        ) from error


def check_accelerator_used(root: Path = Path("/")) -> None:
    """Raise BadInput if JAX has only the CPU of a machine that has an accelerator.

    Starts JAX, with the errors of `start_jax`. JAX_PLATFORMS=cpu, JAX's own setting,
    also requests the CPU. `root` is the root of the file system.
    """
    start_jax()
    if jax.default_backend() != "cpu" or _asked_for_cpu():
        return
    there = visible_accelerator(root)
    if there is None:
        return
    if jax.config.values["jax_platforms"] == "cpu":
        raise kept_from(there)
    versions = installed_versions()
    answer = _answer_of_jax(there.accelerator.platform)
    raise unusable(there, versions) or not_started(there, versions, answer)


def check_accelerator_usable(root: Path = Path("/")) -> None:
    """Raise the same BadInput if that is known without JAX, which is not started."""
    there = visible_accelerator(root)
    problem = there and unusable(there, installed_versions())
    if problem and not _asked_for_cpu():
        raise problem


def _asked_for_cpu() -> bool:
    """Whether JAX's setting requests the CPU: first in its list, or in the old form."""
    first = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    return "cpu" in (first, os.environ.get("JAX_PLATFORM_NAME", "").lower())


def _answer_of_jax(platform: str) -> str:
    try:
        return f"{len(jax.devices(platform))} devices"
    except RuntimeError as error:
        return str(error).splitlines()[0]
