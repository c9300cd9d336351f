# SPDX-License-Identifier: Apache-2.0
"""What the fuzz needs of a kind of file: how to make a valid one, and its reader."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.files.mutations import KINDS_OF_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """`make` fills a folder, `read` returns its content in a form that can be compared.

    `target` is the file that is changed, possibly to another of the `kinds_of_file`;
    `seal` corrects the checksums of its JSON.
    """

    make: Callable[[Path], object]
    target: str
    read: Callable[[Path], Any]
    hashed: bool = False
    seal: Callable[[Any], Any] | None = None
    kinds_of_file: Sequence[str] = KINDS_OF_FILE


def written(target: str, value: Any) -> Callable[[Path], object]:
    text = value if isinstance(value, str) else json.dumps(value)
    return lambda folder: (folder / target).write_text(text)
