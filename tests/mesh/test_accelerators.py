# SPDX-License-Identifier: Apache-2.0
"""A run on the CPU is refused if JAX does not use the machine's accelerator.

A test machine is a folder with the files by which a real machine shows its devices.
"""

import configparser
import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement

from hetjax.errors import BadInput
from hetjax.mesh.accelerators import (
    AMD,
    NVIDIA,
    TPU,
    Accelerator,
    Visible,
    check_accelerator_used,
    installed_versions,
    not_started,
    unusable,
    visible_accelerator,
)

CARD = Visible(accelerator=NVIDIA, file=Path("/dev/nvidia0"))
RADEON = Visible(accelerator=AMD, file=Path("/dev/kfd"))
CHIP = Visible(accelerator=TPU, file=Path("/dev/vfio/0"))
PCI = "sys/bus/pci/devices/0000:00:0"
V5E = {f"{PCI}4.0/vendor": "0x1ae0\n", f"{PCI}4.0/device": "0x0063\n"}
GOOGLE_NETWORK = {f"{PCI}5.0/vendor": "0x1ae0\n", f"{PCI}5.0/device": "0x0042\n"}
INTEL = {f"{PCI}6.0/vendor": "0x8086\n", f"{PCI}6.0/device": "0x0063\n"}
KFD = "sys/class/kfd/kfd/topology/nodes"
MI300 = {
    f"{KFD}/0/properties": "cpu_cores_count 96\ngfx_target_version 0\n",
    f"{KFD}/1/properties": "simd_count 1216\ngfx_target_version 90402\n",
}
IN_A_PROCESSOR = {f"{KFD}/1/properties": "simd_count 8\ngfx_target_version 90012\n"}
WSL_DRIVER = {"usr/lib/wsl/lib/libcuda.so.1": ""}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "accelerator", "file"),
    [
        ({"dev/nvidia0": "", "dev/nvidiactl": ""}, NVIDIA, "dev/nvidia0"),
        ({"dev/nvidia3": ""}, NVIDIA, "dev/nvidia3"),  # a container with one GPU
        ({"dev/dxg": "", **WSL_DRIVER}, NVIDIA, "dev/dxg"),
        ({"dev/kfd": "", **MI300}, AMD, "dev/kfd"),
        ({"dev/accel0": "", "dev/accel1": "", **V5E}, TPU, "dev/accel0"),
        ({"dev/vfio/0": "", "dev/vfio/vfio": "", **V5E}, TPU, "dev/vfio/0"),
        ({"dev/vfio/0": "", **GOOGLE_NETWORK, **V5E}, TPU, "dev/vfio/0"),
    ],
)
def test_an_accelerator_shows_itself_by_its_device_file(
    files: dict[str, str], accelerator: Accelerator, file: str, tmp_path: Path
):
    there = visible_accelerator(machine(tmp_path, files))
    assert there == Visible(accelerator=accelerator, file=tmp_path / file)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"dev/dxg": ""},  # Windows with another vendor's GPU
        {"dev/nvidiactl": "", "dev/nvidia-uvm": ""},  # a driver without a card
        {"proc/driver/nvidia/gpus/0000:01:00.0/information": ""},  # a container's host
        V5E,  # a container's host
        MI300,
        {"dev/kfd": "", **IN_A_PROCESSOR},
        {"dev/kfd": "", f"{KFD}/1/properties": "\nnonsense\n"},
        {"dev/vfio/0": "", **GOOGLE_NETWORK, **INTEL},
        {"dev/vfio/0": "", f"{PCI}1.0/vendor": "0x1ae0\n"},  # other files are hidden
        {"dev/accel/accel0": "", "dev/vfio/vfio": "", **V5E},
    ],
    ids=str,
)
def test_what_a_process_was_not_given_is_not_there(
    files: dict[str, str], tmp_path: Path
):
    assert visible_accelerator(machine(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("there", "versions", "said", "extra"),
    [
        (
            CARD,
            {},
            "an NVIDIA GPU (/dev/nvidia0); JAX cannot use it without jax-cuda12-plugin",
            "cuda12",
        ),
        (
            CARD,
            {"jax-cuda12-plugin": "0.7.2"},
            "JAX ignores jax-cuda12-plugin 0.7.2: jaxlib is 0.12.0.1",
            "cuda12",
        ),
        (
            CARD,
            {"jax-cuda13-plugin": "0.12.0"},
            "JAX ignores jax-cuda13-plugin 0.12.0: jaxlib is 0.12.0.1",
            "cuda13",
        ),
        (
            CARD,
            {"jax-cuda12-plugin": "0.12.0.1"},
            "it did not start with jax-cuda12-plugin 0.12.0.1 (no such luck)",
            "cuda12",
        ),
        (CARD, {"libtpu": "0.0.50"}, "without jax-cuda12-plugin", "cuda12"),
        (  # the older plugin was installed before, as on Colab
            CARD,
            {"jax-cuda12-plugin": "0.7.2", "jax-cuda13-plugin": "0.12.0.1"},
            "it did not start with jax-cuda13-plugin 0.12.0.1 (no such luck)",
            "cuda13",
        ),
        (RADEON, {}, "an AMD GPU (/dev/kfd); JAX cannot use it without jax-r", "rocm"),
        (
            RADEON,
            {"jax-rocm7-plugin": "0.12.0.1.post1"},
            "it did not start with jax-rocm7-plugin 0.12.0.1.post1 (no such luck)",
            "rocm",
        ),
        (RADEON, {"jax-rocm7-plugin": "0.12.0"}, "JAX ignores jax-rocm7-pl", "rocm"),
        (
            CHIP,
            {"jax-cuda12-plugin": "0.7.2"},
            "a TPU (/dev/vfio/0); JAX cannot use it without libtpu",
            "tpu",
        ),
        (
            CHIP,
            {"libtpu": "0.0.50"},
            "it did not start with libtpu 0.0.50 (no such luck)",
            "tpu",
        ),
    ],
)
def test_it_says_what_is_missing_and_what_to_type(
    there: Visible, versions: dict[str, str], said: str, extra: str
):
    found = {"jaxlib": "0.12.0.1", **versions}
    error = unusable(there, found) or not_started(there, found, "no such luck")
    assert said in error.got
    assert error.got.startswith("a run on the CPU of a machine that has a")
    assert "explicit request" in error.allowed
    assert re.findall(r"pip install '(.*?)'", error.fix) == [f"hetjax[{extra}]"]
    assert "--platform cpu" in error.fix


def test_jax_on_the_cpu_is_refused_where_there_is_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check_accelerator_used(tmp_path)
    root = machine(tmp_path, {"dev/nvidia0": ""})
    check_accelerator_used(root)  # all tests set JAX_PLATFORMS=cpu
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(BadInput, match="JAX was restricted to the CPU") as refused:
        check_accelerator_used(root)
    assert "restart the kernel" in refused.value.fix
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check_accelerator_used(root)


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAX_PLATFORMS", "cpu,cuda"), ("JAX_PLATFORM_NAME", "CPU")],
)
def test_each_way_in_which_jax_is_asked_for_the_cpu_counts(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv(name, value)
    check_accelerator_used(machine(tmp_path, {"dev/nvidia0": ""}))


@pytest.mark.skipif(
    visible_accelerator() is not None, reason="JAX may start on what is here"
)
@pytest.mark.parametrize(
    ("value", "said"),
    [("cuda", "none of these is available"), ("CPU", "backend 'CPU'")],
)
def test_platforms_that_are_not_here_are_named(value: str, said: str):
    done = subprocess.run(
        [sys.executable, "-c", "from hetjax import discover; discover()"],
        env=os.environ | {"JAX_PLATFORMS": value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = done.stderr.splitlines()
    assert f"BadInput: got: JAX_PLATFORMS={value}: " in told[-3] and said in told[-3]
    assert told[-1] == "fix: unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu"


def test_an_accelerator_that_fails_as_jax_starts_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails() -> list[jax.Device]:
        raise RuntimeError(
            "Unable to initialize backend 'cuda': no such luck\nat line 7"
        )

    monkeypatch.setattr(jax, "local_devices", fails)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(BadInput, match="cuda': no such luck\nallowed") as refused:
        check_accelerator_used(tmp_path)
    assert "what JAX reports, or set JAX_PLATFORMS=cpu" in refused.value.fix


def test_each_extra_brings_what_fits_the_jax_that_it_comes_with():
    """The oracle is JAX's own requirements, so there is no second list of versions."""
    ours = _extras()
    jax_version, installed = jax.__version__, installed_versions()
    assert installed["jaxlib"] == jax_version
    for plugin, extra in {**NVIDIA.extras, **TPU.extras}.items():
        assert ours[extra].split() == [f"jax[{extra}]"]
        by_name = {asked.name: asked for asked in _asked(extra)}
        pinned = by_name[plugin].specifier
        if plugin == "libtpu":
            assert {part.operator for part in pinned} == {"=="}
            continue
        for name in (plugin, "jaxlib"):
            assert by_name[name].specifier.contains(jax_version)
            assert not by_name[name].specifier.contains("0.7.2")
            assert not by_name[name].specifier.contains(f"{jax_version}.1")
        assert by_name[plugin].extras == {"with-cuda"}


def test_the_extra_of_rocm_brings_jax_with_its_own_plugin():
    """The plugin runs on AMD's ROCm, which no PyPI package provides."""
    ours = _extras()
    assert ours["rocm"].partition("#")[0].split() == ["jax[rocm7-local]"]
    by_name = {asked.name: asked for asked in _asked("rocm7-local")}
    assert by_name["jax-rocm7-plugin"].specifier.contains(f"{jax.__version__}.post1")
    assert not by_name["jax-rocm7-plugin"].specifier.contains("0.7.1")


def test_the_extra_of_old_cards_has_the_last_cudnn_with_code_for_them():
    """As the libraries show, 9.10.2 has code for 5.0 to 7.0 and 9.11.0 has none."""
    lines = _extras()["cuda12-volta"].split("\n")
    asked = {
        r.name: r
        for r in map(Requirement, (ln.partition("#")[0] for ln in lines if ln))
    }
    assert asked["jax"].extras == {"cuda12"}
    fits = asked["nvidia-cudnn-cu12"].specifier
    assert fits.contains("9.10.2.21") and not fits.contains("9.11.0.98")


def _extras() -> configparser.SectionProxy:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
    return setup["options.extras_require"]


def _asked(extra: str) -> list[Requirement]:
    """Return the requirements that this extra of JAX adds."""
    return [
        asked
        for asked in map(Requirement, requires("jax") or ())
        if asked.marker
        and asked.marker.evaluate({"extra": extra})
        and not asked.marker.evaluate({"extra": ""})
    ]
