# SPDX-License-Identifier: Apache-2.0
"""Imports code that a person names as package.module:name: a model or an observer.

Owns the import, and the refusal of code that cannot be imported, belongs to Python, or
cannot be called without arguments. Does not own which names may be imported: no person
gave a name that comes from a file (`models/named.py`).
"""

import inspect
import pkgutil
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetjax.errors import BadInput

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCode:
    """A name, what it names, and words for errors about it."""

    name: str
    what: str  # "model"
    kind: str  # "function"
    where: str  # where it must be importable: "on every machine of the run"
    fix: str  # what to give instead of code of the standard library

    def check_name(self) -> None:
        """Raise BadInput if the name alone shows code of the standard library."""
        self._check_module(self.name.partition(":")[0])

    def imported(self) -> Any:
        """Import and return it; BadInput if that fails, also in the module's code."""
        self.check_name()
        try:
            found = pkgutil.resolve_name(self.name)
        except Exception as error:
            is_missing = isinstance(error, ImportError | AttributeError)
            raised = "" if is_missing else f"{type(error).__name__}: "
            raise BadInput(
                got=f"{self.what} {self.name}: {raised}{error}",
                allowed=f"package.module:{self.kind} that Python can import "
                f"{self.where}",
                fix="install the package, or add its folder to PYTHONPATH",
            ) from (None if is_missing else error)
        self._check_module(_home_module(found))
        return found

    def check_takes_nothing(self, found: Any) -> None:
        """Raise BadInput for code that cannot be called without arguments."""
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError) as error:
            raise BadInput(
                got=f"{self.what} {self.name}: {error}",
                allowed=f"a {self.kind} that can be called without arguments",
                fix=f"give each argument a default, or name another {self.kind}",
            ) from None

    def _check_module(self, module: str) -> None:
        if module.partition(".")[0] in sys.stdlib_module_names:
            raise BadInput(
                got=f"{self.what} {self.name}, a {self.kind} of Python's standard "
                f"library ({module})",
                allowed=f"package.module:{self.kind} of your own package",
                fix=self.fix,
            )


def names_code(name: str) -> bool:
    """Whether this names code, as package.module:name.

    >>> [names_code(name) for name in ("mine:gpt", "mine.big:gpt", "gpt", "a/b:c")]
    [True, True, False, False]
    """
    return _CODE.fullmatch(name) is not None


def _home_module(found: Any) -> str:
    """Return the module that defines it, also within `functools.partial`."""
    while isinstance(found, partial):
        found = found.func
    return getattr(found, "__module__", None) or ""
