# SPDX-License-Identifier: Apache-2.0
"""The wheel of this checkout, built from a copy, so nothing is written beside it."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKS = {"models": "hetjax/models", "mesh": "hetjax/mesh"}
_BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"


def copy_source(folder: Path) -> None:
    """Copy the files from which a wheel is built."""
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hetjax", folder / "hetjax", ignore=ignored)
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)


def build_wheel(source: Path) -> Path:
    """Build the wheel from the files in this folder, into this folder."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return source / done.stdout.splitlines()[-1]
