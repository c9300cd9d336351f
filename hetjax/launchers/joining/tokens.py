# SPDX-License-Identifier: Apache-2.0
"""Makes tokens: each lets one machine join as one worker, once and for a time.

Owns making tokens, their files, which only the run's owner may read, and the state of
each. Every worker always has a token that is good for at least half its time. Does not
own how a token is proven (`hello.py`), nor who may join (`desk.py`).
"""

import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetjax.comm.pinned import OWNER_ALONE
from hetjax.files.writing import write_whole
from hetjax.plans.worker_map import file_name

_BYTES = 32
_SPELLED = re.compile(r"[0-9a-f]{64}")


@dataclass(kw_only=True, slots=True)
class Token:
    """Lets one machine join as this worker, until a monotonic time."""

    worker: str
    key: bytes
    until_s: float
    is_used: bool = False


State = Literal["good", "used", "expired"]


class JoinTokens:
    """Tokens of one start of a run, in files `folder`/WORKER.token; for any thread.

    Each lasts `seconds`. The state of an expired one is remembered for as long again.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._lock = threading.Lock()
        self._tokens: list[Token] = []
        for left in folder.glob("*.token"):  # left over from an earlier start
            left.unlink(missing_ok=True)

    def renew(self, workers: Collection[str]) -> None:
        """Give each of these a token, which its file holds; others lose theirs."""
        with self._lock:
            now_s = time.monotonic()
            before = {token.worker for token in self._tokens}
            for worker in before.difference(workers):
                self.file(worker).unlink(missing_ok=True)
            self._tokens = [
                token
                for token in self._tokens
                if token.worker in workers and now_s < token.until_s + self._seconds
            ]
            half_s = now_s + self._seconds / 2
            good = {
                token.worker
                for token in self._tokens
                if token.until_s > half_s and not token.is_used
            }
            for worker in workers:
                if worker not in good:
                    self._issue(worker, now_s + self._seconds)

    def file(self, worker: str) -> Path:
        """Return where the worker's current token is, in one line."""
        return self._folder / f"{file_name(worker)}.token"

    def proven(self, is_proof: Callable[[bytes], bool]) -> Token | None:
        """Return the token whose key the proof was made with, in whatever state."""
        with self._lock:
            found = [token for token in self._tokens if is_proof(token.key)]
        return found[0] if found else None

    def state(self, token: Token) -> State:
        """Return the state of the token."""
        with self._lock:
            return self._state(token)

    def use(self, token: Token) -> bool:
        """Use up the token and issue another; return whether it was good."""
        with self._lock:
            if self._state(token) != "good":
                return False
            token.is_used = True
            self._issue(token.worker, time.monotonic() + self._seconds)
            return True

    def end(self) -> None:
        """Invalidate all tokens, and leave no file behind."""
        with self._lock:
            for worker in {token.worker for token in self._tokens}:
                self.file(worker).unlink(missing_ok=True)
            self._tokens.clear()

    def _state(self, token: Token) -> State:
        if token.is_used:
            return "used"
        return "good" if time.monotonic() < token.until_s else "expired"

    def _issue(self, worker: str, until_s: float) -> None:
        key = secrets.token_bytes(_BYTES)
        try:
            write_whole(self.file(worker), f"{key.hex()}\n", OWNER_ALONE)
        except OSError as error:
            warnings.warn(
                f"the token for joining as {worker} cannot be written: {error}",
                stacklevel=2,
            )
        else:
            self._tokens.append(Token(worker=worker, key=key, until_s=until_s))


def read_token(text: str) -> bytes | None:
    """Return the key of a token in one line; None for another text."""
    found = _SPELLED.fullmatch(text.strip())
    return bytes.fromhex(found[0]) if found else None
