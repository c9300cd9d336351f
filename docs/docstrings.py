# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings as code blocks: an extension of griffe, which reads them.

In the docstrings of this repository an example stands by itself, between empty lines.
"""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(>>> .*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class FencedExamples(griffe.Extension):
    """Put what begins with `>>>`, up to the next empty line, between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\1\n```", value)
