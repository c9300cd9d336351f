# SPDX-License-Identifier: Apache-2.0
"""What the first notebook's install cell makes of Colab's packages; with --install.

The environment has Colab's Python 3.13 (else 3.12, with a warning) and these packages
of Colab, which the cell has to replace: jax 0.7.2, its CUDA plugin and flax 0.11.2.
Unlike on Colab, pip gets this checkout's wheel instead of its address, and empty
packages instead of NVIDIA's libraries (3 GB). There is no card: `nvidia-smi` is an
empty program, and the card's file is in a folder that stands for the machine.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

from tests.wheel import ROOT, build_wheel, copy_source

NOTEBOOK = ROOT / "experiments" / "notebooks" / "01_first_run.ipynb"
COLAB = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")
RUN = """
import sys
from functools import partial
from pathlib import Path

from hetjax.mesh.accelerators import check_accelerator_used
from hetjax.train import main
from hetjax.training.layout import hardware

hardware.check_accelerator_used = partial(check_accelerator_used, Path("machine"))
sys.exit(main(["gpt2-124m", "--run-dir", "run"]))
"""


@pytest.fixture(scope="module", autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("install"):
        pytest.skip("downloads 700 MB: only with --install")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the environment (`venv`) after the install cell, and a `machine`."""
    folder = tmp_path_factory.mktemp("colab")
    card = folder / "machine" / "dev" / "nvidia0"
    card.parent.mkdir(parents=True)
    card.touch()
    subprocess.run([python(), "-m", "venv", folder / "venv"], check=True)
    before = [f"{name}==0.7.2" for name in COLAB]
    pip(folder, "--no-deps", "flax==0.11.2", *before)
    source = folder / "source"
    source.mkdir()
    copy_source(source)
    wheel = build_wheel(source)
    empty_libraries(folder)
    smi = folder / "venv" / "bin" / "nvidia-smi"
    smi.touch(mode=0o755)
    done = run(folder, install_cell(wheel))
    assert done.returncode == 0, done.stderr
    return folder


def install_cell(wheel: Path) -> str:
    """Return the first notebook's first code cell, with this wheel as its source."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    source, found = re.subn(
        r"^SOURCE = .*", f"SOURCE = {str(wheel)!r}", cell.source, flags=re.M
    )
    assert found == 1
    return source


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run it in the environment, without this process's settings."""
    ours = ("JAX_", "PYTHON", "XLA_")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(ours)
    }
    venv = folder / "venv" / "bin"
    kept |= {
        "PATH": f"{venv}:{kept['PATH']}",
        "PIP_NO_COMPILE": "0",
    }  # means: no compiling
    kept["PIP_FIND_LINKS"] = f"{folder / 'empty'} {kept.get('PIP_FIND_LINKS', '')}"
    return subprocess.run(
        [venv / "python", "-c", program],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
    )


def python() -> str:
    """Return the Python nearest to Colab's that can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for name in ("3.13", "3.12"):
        for candidate in (f"python{name}", *pyenv.glob(f"{name}.*/bin/python{name}")):
            words = [candidate, "-c", "import ensurepip, venv"]
            # a name on PATH can be a shim that refuses, so each one is tried
            if (
                shutil.which(candidate)
                and not subprocess.run(words, capture_output=True).returncode
            ):
                if name != "3.13":
                    warnings.warn(f"no Python 3.13: took {candidate}", stacklevel=1)
                return str(candidate)
    pytest.skip("no Python 3.13 or 3.12")


def pip(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(folder / "venv")]
    options = ["install", "--quiet", "--no-compile", "--progress-bar", "off"]
    done = subprocess.run(
        [*command, *options, *words], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr


def installed(folder: Path) -> dict[str, str]:
    """Return the versions in the environment, by name."""
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    found = importlib.metadata.distributions(path=[str(packages)])
    return {one.metadata["Name"].lower(): one.version for one in found}


def empty_libraries(folder: Path) -> None:
    """Write empty wheels, newer than any, of the NVIDIA packages of the plugin."""
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (plugin,) = importlib.metadata.distributions(
        path=[str(packages)], name="jax-cuda12-plugin"
    )
    (folder / "empty").mkdir()
    for asked in map(Requirement, plugin.requires or ()):
        if not asked.name.startswith("nvidia-"):
            continue
        version = next(v for v in ("9999", "9.9999") if asked.specifier.contains(v))
        stem = f"{asked.name.replace('-', '_')}-{version}"
        path = folder / "empty" / f"{stem}-py3-none-any.whl"
        texts = {
            "METADATA": "Metadata-Version: 2.1\n"
            f"Name: {asked.name}\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
            "Tag: py3-none-any\n",
            "RECORD": "",
        }
        with zipfile.ZipFile(path, "w") as wheel:
            for name, text in texts.items():
                wheel.writestr(f"{stem}.dist-info/{name}", text)


def test_jax_and_its_plugin_are_of_one_version_that_hetjax_takes(folder: Path):
    found = installed(folder)
    versions = {found[name] for name in COLAB}
    assert len(versions) == 1
    assert versions != {"0.7.2"}
    flax = tuple(map(int, found["flax"].split(".")))
    assert flax >= (0, 12, 8)


def test_a_run_on_the_cpu_beside_a_card_that_jax_ignores_says_so_and_stops(
    folder: Path,
):
    """With the plugin that an installation without the extra would leave there."""
    pip(folder, "--no-deps", "jax-cuda12-plugin==0.7.2")
    done = run(folder, RUN)
    assert done.returncode == 2, done.stderr
    _, got, allowed, fix = done.stderr.splitlines()[-4:]
    assert got == (
        "got: a run on the CPU of a machine that has an NVIDIA GPU "
        "(machine/dev/nvidia0); JAX ignores jax-cuda12-plugin 0.7.2: jaxlib is "
        f"{installed(folder)['jaxlib']}"
    )
    assert allowed.startswith("allowed: ")
    assert fix.startswith("fix: pip install 'hetjax[cuda12]'")
    assert not (folder / "run" / "config.json").exists()
