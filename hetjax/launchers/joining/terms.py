# SPDX-License-Identifier: Apache-2.0
"""Defines the terms on which machines join a run by themselves.

Owns the description of the terms. Does not own the settings
(`training/settings/config.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetjax.launchers.reprovisioning import Follow


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTerms:
    """Machines call at `address`, HOST:PORT; port 0: any.

    The certificate of this side and the tokens are in `folder`; a token lasts `token_s`
    seconds. A run waits up to `wait_s` seconds for its nodes at its beginning.
    `model_code` is the function that workers will call as the model (empty: none).
    `note` informs users; `is_done` returns whether the run has nothing more to do.
    `on_waiting` receives a function that returns the nodes to request. Any thread may
    call that function, until `on_waiting` receives another.
    """

    address: str
    folder: Path
    token_s: float
    wait_s: float
    model_code: str = ""
    note: Callable[[str], None]
    is_done: Callable[[], bool]
    on_waiting: Follow | None = None
