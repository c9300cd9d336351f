# SPDX-License-Identifier: Apache-2.0
"""Looks for notices: from clouds that take a machine away, and in an operator's file.

Owns the table of clouds, the requests to each one's metadata server, and the file. Does
not own the thread that looks (`notices.py`), nor the reaction to a notice
(`training/session.py`, `training/loop.py`).
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from hetjax.files.parsing import json_value
from hetjax.files.reading import Unreadable, read_bytes
from hetjax.files.writing import write_whole

REQUEST = "preempt"  # in the run directory: an operator's request
GRACE_S, LONGEST_S = 30.0, 120.0
PATIENCE_S = 1.0  # metadata servers are on the same host, or not at all
_MAX_ANSWER_BYTES = 1 << 16
_OPENER = build_opener(ProxyHandler({}))  # a proxy would answer for its own machine
_AZURE_ENDS = {"Preempt", "Terminate", "Redeploy", "Reboot"}  # Freeze lasts seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """The machine of `node` will be taken away in `grace_s`.

    Without a `node`, the notice is for this machine or, if an operator asks, for all
    machines. `source` names the sender, for users.
    """

    source: str
    grace_s: float
    node: str | None = None


# A poll returns None where there is nothing new; polls end if nothing more can come.
NoticePolls = Iterator[Notice | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cloud:
    """A cloud whose metadata server says when a machine goes.

    The cloud's own libraries read another `address` from the environment `variable`.
    `poll` asks the server there, every `every_s`.
    """

    variable: str
    address: str
    every_s: float
    poll: Callable[[str], NoticePolls]


def clouds(environment: Mapping[str, str]) -> dict[NoticePolls, float]:
    """Return the polls of all clouds, with the seconds between them.

    Warns of a server that the environment names and that does not answer.
    """
    return {
        _polls(cloud, environment.get(cloud.variable)): cloud.every_s
        for cloud in CLOUDS.values()
    }


def _polls(cloud: Cloud, named: str | None) -> NoticePolls:
    is_there = False
    for notice in cloud.poll(named or cloud.address):
        is_there = True
        yield notice
    if named and not is_there:
        warnings.warn(f"no metadata server at {named}: no notices", stacklevel=1)


def google_compute_engine(host: str) -> NoticePolls:
    """Look for the flag of a spot machine, and for maintenance that ends a machine."""
    instance = f"http://{host}/computeMetadata/v1/instance"
    headers = {"Metadata-Flavor": "Google"}
    # not ?wait_for_change=true, which would hold up the other sources
    flag = _ask("GET", f"{instance}/preempted", headers)
    if flag.status < 500 and not flag.is_google:
        return
    while True:
        event = flag.text and _ask("GET", f"{instance}/maintenance-event", headers).text
        if flag.text == "TRUE" or event == "TERMINATE_ON_HOST_MAINTENANCE":
            yield Notice(source="Google Compute Engine", grace_s=GRACE_S)
            return
        yield None
        flag = _ask("GET", f"{instance}/preempted", headers)


def aws(endpoint: str) -> NoticePolls:
    """Look for an action that AWS plans for a spot instance."""
    latest = f"{endpoint.rstrip('/')}/latest"
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    token = _ask("PUT", f"{latest}/api/token", lifetime)
    if token.status < 500 and not token.text:
        return
    while True:
        headers = {"X-aws-ec2-metadata-token": token.text}
        action = _ask("GET", f"{latest}/meta-data/spot/instance-action", headers)
        if action.text and (notice := _spot_notice(action.text, action.date)):
            yield notice
            return
        if action.status == 401 or not token.text:  # it has expired, or never came
            token = _ask("PUT", f"{latest}/api/token", lifetime)
        yield None


def azure(endpoint: str) -> NoticePolls:
    """Look for scheduled events of this virtual machine that end or restart it."""
    metadata, headers = f"{endpoint.rstrip('/')}/metadata", {"Metadata": "true"}
    name = "instance/compute/name?api-version=2021-02-01&format=text"
    machine = _ask("GET", f"{metadata}/{name}", headers).text
    if not machine:
        return
    while True:
        # the first answer may take minutes: until then requests time out
        events = f"{metadata}/scheduledevents?api-version=2020-07-01"
        answer = _ask("GET", events, headers)
        grace_s = _azure_grace_s(answer, machine)
        if grace_s <= LONGEST_S:  # else there is time to train
            yield Notice(source="Azure", grace_s=grace_s)
            return
        yield None


CLOUDS: Mapping[str, Cloud] = {
    "Google Compute Engine": Cloud(
        variable="GCE_METADATA_HOST",
        address="metadata.google.internal",
        every_s=1.0,
        poll=google_compute_engine,
    ),
    "AWS": Cloud(
        variable="AWS_EC2_METADATA_SERVICE_ENDPOINT",
        address="http://169.254.169.254",
        every_s=5.0,
        poll=aws,
    ),
    "Azure": Cloud(
        variable="AZURE_POD_IDENTITY_AUTHORITY_HOST",
        address="http://169.254.169.254",
        every_s=1.0,
        poll=azure,
    ),
}


def operator(run_dir: Path) -> NoticePolls:
    """Look for the file that `ask_to_leave` writes; remove it when it is read."""
    path, taken = run_dir / REQUEST, run_dir / f".{REQUEST}.heard"
    while True:
        notice = None
        try:
            path.replace(taken)  # before reading: another file may come meanwhile
            text = read_bytes(taken, what="request").decode(errors="replace")
            node = _node(text)
            taken.unlink()
            notice = Notice(source="operator", grace_s=GRACE_S, node=node)
        except FileNotFoundError:
            pass
        except (OSError, Unreadable) as error:
            warnings.warn(f"cannot look for {path}: {error}", stacklevel=1)
        yield notice


def notices_of_workers(queue: SimpleQueue[Notice]) -> NoticePolls:
    """Look for notices that workers received about their own machines."""
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            yield None


def ask_to_leave(run_dir: Path, node: str | None) -> Path:
    """Ask the run to let go of a node, None: of all; return the file written."""
    write_whole(run_dir / REQUEST, json.dumps({"node": node}) + "\n")
    return run_dir / REQUEST


def _node(text: str) -> str | None:
    node = _table(text).get("node", ...)
    if node is None or isinstance(node, str):
        return node
    warnings.warn(
        f"{REQUEST}: no node in {text[:200]!r}: stopping the whole run", stacklevel=1
    )
    return None


def _spot_notice(text: str, date: str) -> Notice | None:
    action = _table(text)
    if action.get("action") in ("terminate", "stop", "hibernate"):
        return Notice(source="AWS", grace_s=_grace_s(action.get("time"), date))
    warnings.warn(f"AWS: ignoring unknown action in {text[:80]!r}", stacklevel=1)
    return None


def _grace_s(moment: Any, date: str) -> float:
    """Return the seconds until `moment` from the server's date, else from ours.

    At most two minutes: our clock may be wrong, and AWS gives no more notice.
    """
    try:
        left = datetime.fromisoformat(moment) - _now(date)
    except (TypeError, ValueError):
        warnings.warn(
            f"AWS: no time in {moment!r}: assuming {LONGEST_S} s", stacklevel=1
        )
        return LONGEST_S
    return min(max(0.0, left.total_seconds()), LONGEST_S)


def _azure_grace_s(answer: "_Answer", machine: str) -> float:
    """Return the seconds until the first event that ends this machine, else infinity.

    An event that has started, or names no time, leaves none.
    """
    found = float("inf")
    events = _table(answer.text).get("Events")
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict) or event.get("EventType") not in _AZURE_ENDS:
            continue
        if machine not in (event.get("Resources") or ()):
            continue
        left_s = 0.0
        with suppress(TypeError, ValueError):
            moment = parsedate_to_datetime(str(event.get("NotBefore")))
            left = moment - _now(answer.date)
            left_s = max(0.0, left.total_seconds())
        found = min(found, left_s)
    return found


def _now(date: str) -> datetime:
    """Return the time by a server's date; without one, by our clock, which may jump."""
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(date)
    return datetime.now(UTC)


def _table(text: str) -> dict[str, Any]:
    """Return the JSON object in the text, an empty one if there is none."""
    with suppress(ValueError):
        return found if isinstance(found := json_value(text), dict) else {}
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """An answer; `status` is 0 if none came, `text` is empty unless `status` is 200.

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
