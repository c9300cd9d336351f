# SPDX-License-Identifier: Apache-2.0
"""Files that commands write where they are told to.

Owns the refusal of places that cannot be written to. Does not own any file.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hetjax.errors import BadInput


def check_folders(paths: Mapping[str, Path | None]) -> None:
    """Raise BadInput for the first path, by option, whose folder is not there."""
    for name, path in paths.items():
        if path is not None and not os.path.isdir(path.parent):
            raise BadInput(
                got=f"{name} {path}, in a folder that is not there",
                allowed="a file in a folder that is there",
                fix=f"mkdir -p {path.parent}",
            )


@contextmanager
def writing(*options: str) -> Iterator[None]:
    """Turn the system's refusals to write into BadInput that names the options."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            got=f"{error.filename}: {error.strerror}",
            allowed=f"files that can be written for {', '.join(options)}",
            fix="give another path",
        ) from error
