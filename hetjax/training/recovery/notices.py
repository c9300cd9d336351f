# SPDX-License-Identifier: Apache-2.0
"""What asks a run to stop, or to do without a machine that is about to be taken away.

Owns where notices come from (the metadata servers of Google Compute Engine and AWS, the
file by which an operator asks, workers on other machines), the thread that listens, and
the handlers of SIGINT and SIGTERM while training goes on. Does not own what is done
about them (`training/session.py`, `training/loop.py`).
"""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from hetjax.files.parsing import json_value
from hetjax.files.reading import Unreadable, read_bytes
from hetjax.files.writing import write_whole
from hetjax.report.progress import say_at_once

REQUEST = "preempt"  # in the run directory: an operator's request
GRACE_S, AWS_GRACE_S = 30.0, 120.0
GCE_HOST, AWS_ENDPOINT = "metadata.google.internal", "http://169.254.169.254"
PATIENCE_S = 1.0  # metadata servers are on the same host, or not at all
_MAX_ANSWER_BYTES = 4096
_OPENER = build_opener(ProxyHandler({}))  # a proxy would answer for its own machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """In `grace_s` this machine goes; or, from an operator, `node`, None: all.

    `source` names who says so, for people.
    """

    source: str
    grace_s: float
    node: str | None = None


# A look returns None where there is nothing new; looks end if nothing more can come.
Looks = Iterator[Notice | None]


class Watch:
    """Within `with`, calls `heard` for each notice, from a thread of its own.

    Listens to an operator where `run_dir` is given, and to `sources`, looks with the
    seconds between them: those of `clouds` by default. Nothing is heard after `with`.
    """

    def __init__(
        self,
        heard: Callable[[Notice], None],
        run_dir: Path | None,
        sources: Mapping[Looks, float] | None = None,
    ) -> None:
        self._heard, self._over = heard, threading.Event()
        self._every_s = {} if run_dir is None else {operator(run_dir): 0.5}
        self._every_s |= clouds(os.environ) if sources is None else sources
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)  # a name that is looked up may keep it longer

    def _run(self) -> None:
        due_s = dict.fromkeys(self._every_s, 0.0)
        while due_s:
            looks, when_s = min(due_s.items(), key=lambda item: item[1])
            if self._over.wait(max(0.0, when_s - time.monotonic())):
                return
            try:
                notice = next(looks)
            except StopIteration:
                del due_s[looks]
                continue
            if notice is not None and not self._over.is_set():
                self._heard(notice)
            due_s[looks] = time.monotonic() + self._every_s[looks]


def clouds(environment: Mapping[str, str]) -> dict[Looks, float]:
    """Return the clouds' sources, at the addresses that their own libraries use."""
    google = environment.get("GCE_METADATA_HOST") or GCE_HOST
    amazon = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or AWS_ENDPOINT
    return {google_compute_engine(google): 1.0, aws(amazon): 5.0}


def google_compute_engine(host: str) -> Looks:
    """Look for the flag of a spot machine, and for maintenance that ends a machine."""
    instance = f"http://{host}/computeMetadata/v1/instance"
    headers = {"Metadata-Flavor": "Google"}
    # not ?wait_for_change=true, which would hold up the other sources
    flag = _ask("GET", f"{instance}/preempted", headers)
    if flag.status < 500 and not flag.is_google:
        return _say_absent(host, GCE_HOST)
    while True:
        event = flag.text and _ask("GET", f"{instance}/maintenance-event", headers).text
        if flag.text == "TRUE" or event == "TERMINATE_ON_HOST_MAINTENANCE":
            yield Notice(source="Google Compute Engine", grace_s=GRACE_S)
            return
        yield None
        flag = _ask("GET", f"{instance}/preempted", headers)


def aws(endpoint: str) -> Looks:
    """Look for the action that is planned for a spot instance."""
    latest = f"{endpoint.rstrip('/')}/latest"
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    token = _ask("PUT", f"{latest}/api/token", lifetime)
    if token.status < 500 and not token.text:
        return _say_absent(endpoint, AWS_ENDPOINT)
    while True:
        headers = {"X-aws-ec2-metadata-token": token.text}
        action = _ask("GET", f"{latest}/meta-data/spot/instance-action", headers)
        if action.text and (notice := _spot_notice(action.text, action.date)):
            yield notice
            return
        if action.status == 401 or not token.text:  # it has expired, or never came
            token = _ask("PUT", f"{latest}/api/token", lifetime)
        yield None


def operator(run_dir: Path) -> Looks:
    """Look for the file that `ask_to_leave` writes; it is gone when it is heard."""
    path, taken = run_dir / REQUEST, run_dir / f".{REQUEST}.heard"
    while True:
        notice = None
        try:
            path.replace(taken)  # before it is read: another may come meanwhile
            text = read_bytes(taken, what="request").decode(errors="replace")
            node = _node(text)
            taken.unlink()
            notice = Notice(source="operator", grace_s=GRACE_S, node=node)
        except FileNotFoundError:
            pass
        except (OSError, Unreadable) as error:
            warnings.warn(f"cannot look for {path}: {error}", stacklevel=1)
        yield notice


def notices_of_workers(queue: SimpleQueue[Notice]) -> Looks:
    """Look for notices that workers received about their own machines."""
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            yield None


def ask_to_leave(run_dir: Path, node: str | None) -> Path:
    """Ask the run to let go of a node, None: of all; return the file that says so."""
    write_whole(run_dir / REQUEST, json.dumps({"node": node}) + "\n")
    return run_dir / REQUEST


def _node(text: str) -> str | None:
    node = _table(text).get("node", ...)
    if node is None or isinstance(node, str):
        return node
    warnings.warn(
        f"{REQUEST}: no node in {text[:200]!r}, so the whole run", stacklevel=1
    )
    return None


def _spot_notice(text: str, date: str) -> Notice | None:
    told = _table(text)
    if told.get("action") in ("terminate", "stop", "hibernate"):
        return Notice(source="AWS", grace_s=_grace_s(told.get("time"), date))
    warnings.warn(f"AWS: no known action in {text[:80]!r}, ignored", stacklevel=1)
    return None


def _grace_s(moment: Any, date: str) -> float:
    """Seconds from the server's date, else from ours, until then: two minutes at most.

    Our clock may be wrong, and AWS gives no more notice.
    """
    try:
        now = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        now = datetime.now(UTC)
    try:
        left = datetime.fromisoformat(moment) - now
    except (TypeError, ValueError):
        warnings.warn(f"AWS: no time in {moment!r}, so {AWS_GRACE_S} s", stacklevel=1)
        return AWS_GRACE_S
    return min(max(0.0, left.total_seconds()), AWS_GRACE_S)


def _table(text: str) -> dict[str, Any]:
    """The JSON object in the text, an empty one if there is none."""
    with suppress(ValueError):
        return told if isinstance(told := json_value(text), dict) else {}
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """`status` is 0 where none came, `text` is empty but for status 200.

    `date` is when the server sent it, by its own clock.
    """

    status: int = 0
    text: str = ""
    date: str = ""
    is_google: bool = False


def _ask(method: str, url: str, headers: Mapping[str, str]) -> _Answer:
    try:
        request = Request(url, headers=dict(headers), method=method)
        with _OPENER.open(request, timeout=PATIENCE_S) as answer:
            return _Answer(
                status=answer.status,
                text=answer.read(_MAX_ANSWER_BYTES).decode().strip(),
                date=answer.headers.get("Date", ""),
                is_google=answer.headers.get("Metadata-Flavor") == "Google",
            )
    except HTTPError as error:
        error.close()
        return _Answer(status=error.code)
    except (OSError, HTTPException, ValueError):
        return _Answer()


def _say_absent(address: str, usual: str) -> None:
    """Say so only of an address that somebody has named."""
    if address != usual:
        warnings.warn(f"no metadata server at {address}: no notices", stacklevel=1)


_RECOVERING = 1 / 3  # share of the grace that a recovery may still take


class StopRequest:
    """Within `with`, the first SIGINT or SIGTERM sets `reason`.

    A second SIGINT does what one did before `with`. `grace_s` is how long the machine
    stays after the notice that came first, None if nobody said.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.grace_s: float | None = None
        self._noticed_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def leaves_no_time(self) -> bool:
        """Whether what goes on now must be given up, so that the end comes in time."""
        if self.reason is None or self.grace_s is None:
            return False
        return time.monotonic() - self._noticed_s > _RECOVERING * self.grace_s

    @contextmanager
    def after(self, hours: float, since_s: float) -> Iterator[None]:
        """Within it, set `reason` at so many hours from `since_s` by the counter."""
        left_s = since_s + 3600 * hours - time.perf_counter()
        timer = threading.Timer(left_s, self._ask, (f"--max-hours {hours:g}",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def on_notice(self, notice: Notice) -> None:
        """Called by another thread: this machine is about to be taken away."""
        if self.reason is None:
            self._noticed_s, self.grace_s = time.monotonic(), notice.grace_s
            self.reason = notice.source
            say_at_once(f"{notice.source}: saving after this step")

    def _ask(self, reason: str) -> None:
        """Called by another thread: this machine stays, and there is no hurry."""
        if self.reason is None:
            self.reason = reason
            say_at_once(f"{reason}: saving after this step")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noticed_s = time.monotonic()
        self.grace_s = GRACE_S if number == signal.SIGTERM else None
        self.reason = signal.Signals(number).name
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        again = (
            "; Ctrl-C again: stop at once, unsaved" if number == signal.SIGINT else ""
        )
        say_at_once(f"{self.reason}: saving after this step{again}")
