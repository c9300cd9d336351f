# SPDX-License-Identifier: Apache-2.0
"""On which terms machines join a run by themselves.

Owns what a run says of it. Does not own its settings (`training/settings/config.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTerms:
    """Machines call at `address`, HOST:PORT; port 0: any.

    The certificate of this side and the tokens are in `folder`; a token lasts `token_s`
    seconds. A run that begins waits for its nodes for `wait_s` seconds. `model_code` is
    the function that workers will call as the model, empty: none. `note` tells people;
    `is_done` says whether the run has nothing more to do.
    """

    address: str
    folder: Path
    token_s: float
    wait_s: float
    model_code: str = ""
    note: Callable[[str], None]
    is_done: Callable[[], bool]
