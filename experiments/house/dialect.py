# SPDX-License-Identifier: Apache-2.0
"""Counts names that cannot be searched for, or that have a standard word.

    python -m experiments.house.dialect [FOLDER]

Counts, in the Python files of a folder (hetjax), functions whose whole name is in
`BARE`, functions whose name ends in `_of`, uses of the identifiers in `DIALECT`, and
public class names that are defined more than once. Underscores around the names in
`BARE` and `DIALECT` do not matter. Prints JSON. `now` is not counted: it is the usual
name of a local time, or of the current value, and is read where it is set.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BARE = ("of", "one", "told", "take", "go_on", "hear")
DIALECT = ("told", "heard", "foretold", "patience", "foresee_after_s", "detour")


def trees(folder: Path) -> Iterator[ast.Module]:
    for path in sorted(folder.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def counts(folder: Path) -> dict[str, Any]:
    """Return how often each name occurs."""
    bare, used, classes = Counter[str](), Counter[str](), Counter[str]()
    suffixed = 0
    for node in (node for tree in trees(folder) for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bare[name.strip("_")] += name.strip("_") in BARE
                suffixed += name.endswith("_of")
            case ast.ClassDef(name=name):
                classes[name] += not name.startswith("_")
            case (
                ast.Name(id=name)
                | ast.arg(arg=name)
                | ast.keyword(arg=str(name))
                | ast.Attribute(attr=name)
            ):
                used[name.strip("_")] += name.strip("_") in DIALECT
    return {
        "bare": {name: bare[name] for name in BARE},
        "ending in _of": suffixed,
        "used": {name: used[name] for name in DIALECT},
        "classes twice": sorted(name for name, n in classes.items() if n > 1),
    }


if __name__ == "__main__":
    print(json.dumps(counts(Path(*sys.argv[1:2] or ["hetjax"])), indent=1))
