# SPDX-License-Identifier: Apache-2.0
"""The hooks of mkdocs, loaded as mkdocs loads them: they belong to no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def hook(name: str) -> ModuleType:
    """Load `docs/NAME.py`, which mkdocs.yml has to name."""
    assert f"- docs/{name}.py" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
