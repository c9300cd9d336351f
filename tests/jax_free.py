# SPDX-License-Identifier: Apache-2.0
"""Which test files no release of JAX can change.

They are those of the rooms that may not import JAX (the contract `without-jax` in
setup.cfg), except files whose imports reach JAX.
"""

import ast
import configparser
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
CONTRACT = "importlinter:contract:without-jax"


def jax_free_files() -> frozenset[Path]:
    """Return the files that a second release of JAX need not run."""
    rooms = _modules("source_modules")
    files = (ROOT / "tests").rglob("test_*.py")
    return frozenset(
        file for file in files if _room(file) in rooms and not reaches_jax(file)
    )


def reaches_jax(file: Path) -> bool:
    """Return whether this file, or what it imports of hetjax and tests, imports JAX.

    Imports in functions, and in strings that are programs, count, too.
    """
    libraries, graph = _modules("forbidden_modules"), _graph()
    seen: set[str] = set()
    waiting = imported(ast.parse(file.read_text(encoding="utf-8")))
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if module.partition(".")[0] in libraries:
            return True
        waiting |= _loaded_by_name(module)
        if module in graph.modules:
            if libraries & graph.find_upstream_modules(module):
                return True
        elif (source := ROOT / f"{module.replace('.', '/')}.py").exists():
            waiting |= imported(ast.parse(source.read_text(encoding="utf-8")))
    return False


def _loaded_by_name(module: str) -> set[str]:
    """Return what a command, `hetjax/NAME.py`, imports only when it is called."""
    room, _, name = module.partition(".")
    is_command = room == "hetjax" and (ROOT / "hetjax/cli" / f"{name}.py").exists()
    return {f"hetjax.cli.{name}"} if is_command else set()


def imported(tree: ast.AST) -> set[str]:
    """Return a program's imported modules, and imported names, which may be modules."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and "import " in str(node.value):
            found |= _imported_by_text(str(node.value))
    return found


def _imported_by_text(text: str) -> set[str]:
    try:
        return imported(ast.parse(text))
    except (SyntaxError, ValueError):
        return set()


def _room(file: Path) -> str:
    """Return the module that a test file mirrors, such as `hetjax.plans`."""
    name = file.relative_to(ROOT / "tests").parts[0]
    return f"hetjax.{name.removesuffix('.py').removeprefix('test_')}"


def _modules(key: str) -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return set(setup[CONTRACT][key].split())


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("hetjax", include_external_packages=True, cache_dir=None)
