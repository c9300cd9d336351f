# SPDX-License-Identifier: Apache-2.0
"""What a kind of file is to the fuzz: how to make a sound one, and who reads it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.files.mutations import KINDS_OF_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """`make` fills a folder, `read` gives what is in it, as text that can be compared.

    `target` is the file that is changed, also to another of the `kinds_of_file`; `seal`
    puts the checksums of its JSON right.
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
