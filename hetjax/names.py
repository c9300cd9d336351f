# SPDX-License-Identifier: Apache-2.0
"""Checks names that come from files and peers, and turns them into paths.

Owns the rule for the names of nodes and workers, and the only way from a name to a
path. Every room may import this file.
"""

import re
from pathlib import Path

from hetjax.errors import BadInput

_NODE = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_HOST = "[/@](?:0|[1-9][0-9]{0,4})"  # after a slash in messages, after an @ in paths
_TAKEN = ("COMMIT",)  # a name beside the workers of a step in a store
_IS_WORKER = re.compile(f"(?P<node>{_NODE})(?:{_HOST})?")
_LONGEST_PART = 255  # bytes, in most file systems

RULE = (
    "a letter or digit, then up to 62 more letters, digits, '.', '_' or '-' (and not "
    f"{', '.join(_TAKEN)})"
)
LONGEST_WORKER = 63 + len("/65535")


class UnsafeName(BadInput):
    """A name that leads, or might lead, out of the folder that it belongs in."""

    def __init__(self, got: str) -> None:
        super().__init__(
            got=got,
            allowed="names of files within a folder, without '..' and without links "
            "that lead out of it",
            fix="remove what has this name: hetjax did not write it",
        )


def is_node(name: object) -> bool:
    """Return whether a node, and then its only worker, may have this name.

    >>> [is_node(name) for name in ("a100-0", "..", "a/0", "-a", "a" * 64)]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and _node_of(name) == name


def is_worker(name: object) -> bool:
    """Return whether a worker may have this name: its node's, or that of a host.

    >>> [is_worker(name) for name in ("a100-0", "a100-0/12", "a@12", "a/b", "../1")]
    [True, True, True, False, False]
    """
    return isinstance(name, str) and _node_of(name) is not None


def _node_of(worker: str) -> str | None:
    """Return the node in a worker's name, or None if that is no valid name."""
    found = _IS_WORKER.fullmatch(worker)
    if found is None or found["node"] in _TAKEN:
        return None
    return found["node"]


def check_relative(name: object) -> None:
    """Raise UnsafeName unless every part of the name leads down."""
    if not isinstance(name, str):
        raise UnsafeName(f"{str(name)[:80]!r}, which is not a name")
    for part in name.split("/"):
        too_long = len(part.encode(errors="replace")) > _LONGEST_PART
        if part in ("", ".", "..") or too_long or not part.isprintable():
            raise UnsafeName(
                f"{name[:80]!r}, which is not the name of a file within a folder"
            )


def inside(folder: Path, *names: str) -> Path:
    """Return the path of these names, one below the other, within a folder.

    Raises UnsafeName if the path leads elsewhere, also by way of a symbolic link.
    """
    for name in names:
        check_relative(name)
    path = folder.joinpath(*names)
    try:
        is_there = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # circular links
        is_there = False
    if not is_there:
        raise UnsafeName(f"{path}, which leads out of {folder}")
    return path
