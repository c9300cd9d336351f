# SPDX-License-Identifier: Apache-2.0
"""Notices are heard once, and only from servers that speak as the clouds' own do.

The servers here follow the clouds' public documents: a mandatory header, a session
token, and 404 if nothing is planned.
"""

import json
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from email.utils import format_datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, Self

import pytest

from hetjax.training.recovery import notice_sources
from hetjax.training.recovery.notice_sources import (
    CLOUDS,
    Notice,
    ask_to_leave,
    aws,
    azure,
    clouds,
    google_compute_engine,
    operator,
)
from hetjax.training.recovery.notices import StopRequest, Watch
from hetjax.training.session import _on_notice

SOON_S, PATIENCE_S = 0.01, 5.0
GCE = "/computeMetadata/v1/instance/"
AWS = "/latest/"
AZURE = "/metadata/"
AZURE_NAME = f"{AZURE}instance/compute/name?api-version=2021-02-01&format=text"
AZURE_EVENTS = f"{AZURE}scheduledevents?api-version=2020-07-01"
HANGS = -1  # instead of a status: no answer until the server ends


class Cloud:
    """A metadata server: values by path, and the faults that precede its answers."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.upsets: list[int] = []
        self.flavour: str | None = None
        self.tokens: set[str] = set()
        self.num_granted = self.num_values = 0
        self.num_answered = self.num_asked = 0
        self.ended, self._changed = threading.Event(), threading.Condition()

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, str]:
        with self._changed:
            self.num_asked += 1
            if self.upsets:
                return self.upsets.pop(0), "upset"
            return self._value(request)

    def _value(self, request: BaseHTTPRequestHandler) -> tuple[int, str]:
        path, headers = request.path, request.headers
        if path.startswith(GCE) and headers["Metadata-Flavor"] != "Google":
            return 403, "no header"
        if path.startswith(AZURE) and headers["Metadata"] != "true":
            return 400, "no header"
        if (request.command, path) == ("PUT", f"{AWS}api/token"):
            if not 1 <= int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600:
                return 400, "no lifetime"
            self.num_granted += 1
            self.tokens.add(f"token-{self.num_granted}")
            return 200, f"token-{self.num_granted}"
        if path.startswith(AWS) and headers["X-aws-ec2-metadata-token"] not in (
            self.tokens
        ):
            return 401, "no token"
        return (200, self.values[path]) if path in self.values else (404, "")

    def answered(self) -> None:
        with self._changed:
            self.num_answered += 1
            self._changed.notify_all()

    def wait_for_answers(self, more: int) -> None:
        """Return once the server has answered this many more requests."""
        with self._changed:
            enough = self.num_answered + more
            assert self._changed.wait_for(
                lambda: self.num_answered >= enough, PATIENCE_S
            )


def handler_of(cloud: Cloud) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = cloud.answer(self)
            if status == HANGS:
                cloud.ended.wait(PATIENCE_S)
                return
            self.send_response(status)
            if cloud.flavour is not None:
                self.send_header("Metadata-Flavor", cloud.flavour)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
            cloud.answered()

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def serving() -> Iterator[tuple[Cloud, str]]:
    """Yield a server and its host:port."""
    cloud = Cloud()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(cloud)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield cloud, f"127.0.0.1:{server.server_port}"
        finally:  # else the process of a failed test would never end
            cloud.ended.set()
            server.shutdown()
            thread.join()


@contextmanager
def serving_google() -> Iterator[tuple[Cloud, str]]:
    with serving() as (cloud, host):
        cloud.flavour = "Google"
        none = {f"{GCE}preempted": "FALSE\n", f"{GCE}maintenance-event": "NONE\n"}
        cloud.values = none
        yield cloud, host


@pytest.fixture
def served() -> Iterator[tuple[Cloud, str]]:
    with serving() as found:
        yield found


@pytest.fixture
def google() -> Iterator[tuple[Cloud, str]]:
    with serving_google() as found:
        yield found


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def spot(cloud: Cloud, text: str) -> None:
    cloud.values[f"{AWS}meta-data/spot/instance-action"] = text


def in_s(seconds: float) -> str:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def is_watching() -> bool:
    return any(thread.name == "notices" for thread in threading.enumerate())


def wait_until_it_ends() -> None:
    for thread in threading.enumerate():
        if thread.name == "notices":
            thread.join(PATIENCE_S)
    assert not is_watching()


def test_a_flag_that_goes_up_at_google_is_told_once(
    google: tuple[Cloud, str], tmp_path: Path
):
    cloud, host = google
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, tmp_path, {google_compute_engine(host): SOON_S}):
        cloud.wait_for_answers(6)
        assert heard.empty()
        cloud.values[f"{GCE}preempted"] = "TRUE\n"
        told = heard.get(timeout=PATIENCE_S)
        assert told == Notice(source="Google Compute Engine", grace_s=30.0)
        ask_to_leave(tmp_path, None)  # the flag stays up throughout
        assert heard.get(timeout=PATIENCE_S).source == "operator"
    assert heard.empty() and not is_watching()


def test_maintenance_that_ends_the_machine_counts_and_one_that_moves_it_does_not(
    google: tuple[Cloud, str],
):
    cloud, host = google
    cloud.values[f"{GCE}maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {google_compute_engine(host): SOON_S}):
        cloud.wait_for_answers(6)
        assert heard.empty()
        cloud.values[f"{GCE}maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        assert heard.get(timeout=PATIENCE_S).source == "Google Compute Engine"


def test_an_action_at_aws_is_told_with_the_time_that_is_left(
    served: tuple[Cloud, str],
):
    cloud, host = served
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {aws(f"http://{host}/"): SOON_S}):
        cloud.wait_for_answers(4)
        assert heard.empty()
        spot(cloud, json.dumps({"action": "terminate", "time": in_s(90)}))
        told = heard.get(timeout=PATIENCE_S)
    assert told.source == "AWS" and 80 < told.grace_s <= 90
    assert (cloud.num_granted, told.node) == (1, None)


@pytest.mark.parametrize("wrong_s", [-1e7, 1e7])
def test_the_time_that_is_left_at_aws_is_told_by_its_own_clock(
    served: tuple[Cloud, str], wrong_s: float, monkeypatch: pytest.MonkeyPatch
):
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(seconds=wrong_s)

    cloud, host = served
    spot(cloud, json.dumps({"action": "terminate", "time": in_s(90)}))
    monkeypatch.setattr("hetjax.training.recovery.notice_sources.datetime", Wrong)
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {aws(f"http://{host}/"): SOON_S}):
        assert 80 < heard.get(timeout=PATIENCE_S).grace_s <= 90


def test_a_server_that_tells_no_time_grants_no_more_than_aws_does(
    served: tuple[Cloud, str], monkeypatch: pytest.MonkeyPatch
):
    cloud, host = served
    spot(cloud, json.dumps({"action": "terminate", "time": in_s(1e7)}))
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: "never")
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {aws(f"http://{host}/"): SOON_S}):
        assert heard.get(timeout=PATIENCE_S).grace_s == 120.0


@pytest.mark.parametrize("moment", [None, 5, "soon", "2026-11-21T10:00:00"])
def test_a_time_at_aws_that_cannot_be_read_leaves_two_minutes(
    served: tuple[Cloud, str], moment: object
):
    cloud, host = served
    spot(cloud, json.dumps({"action": "stop", "time": moment}))
    heard: Queue[Notice] = Queue()
    with pytest.warns(UserWarning, match="no time in .* assuming 120.0 s"):
        with Watch(heard.put, None, {aws(f"http://{host}"): SOON_S}):
            assert heard.get(timeout=PATIENCE_S).grace_s == 120.0


def test_a_time_that_has_passed_leaves_nothing(served: tuple[Cloud, str]):
    cloud, host = served
    spot(cloud, json.dumps({"action": "hibernate", "time": in_s(-60)}))
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {aws(f"http://{host}"): SOON_S}):
        assert heard.get(timeout=PATIENCE_S).grace_s == 0.0


def test_an_expired_token_is_renewed(served: tuple[Cloud, str]):
    cloud, host = served
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {aws(f"http://{host}"): SOON_S}):
        cloud.wait_for_answers(3)
        cloud.tokens.clear()
        cloud.wait_for_answers(4)
        spot(cloud, json.dumps({"action": "terminate", "time": in_s(90)}))
        assert heard.get(timeout=PATIENCE_S).source == "AWS"
    assert cloud.num_granted == 2


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"action": "dance"}', "[" * 4096])
def test_an_answer_of_aws_that_makes_no_sense_is_warned_of_and_asked_again(
    served: tuple[Cloud, str], text: str
):
    cloud, host = served
    spot(cloud, text)
    heard: Queue[Notice] = Queue()
    with pytest.warns(UserWarning, match="unknown action in "):
        with Watch(heard.put, None, {aws(f"http://{host}"): SOON_S}):
            cloud.wait_for_answers(3)
            assert heard.empty()
            spot(cloud, json.dumps({"action": "terminate", "time": in_s(90)}))
            assert heard.get(timeout=PATIENCE_S).source == "AWS"


@pytest.mark.parametrize("first", [200, 503])
def test_google_may_fail_or_hang_in_between(
    google: tuple[Cloud, str], monkeypatch: pytest.MonkeyPatch, first: int
):
    monkeypatch.setattr(notice_sources, "PATIENCE_S", 0.3)
    cloud, host = google
    cloud.upsets = [503] if first == 503 else []
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {google_compute_engine(host): SOON_S}):
        cloud.wait_for_answers(3)
        cloud.upsets = [503, HANGS, 500, 404, 503]
        cloud.wait_for_answers(6)
        assert heard.empty()
        cloud.values[f"{GCE}preempted"] = "TRUE"
        assert heard.get(timeout=PATIENCE_S).source == "Google Compute Engine"


@pytest.mark.parametrize("first", [200, 503])
def test_aws_may_fail_or_hang_in_between(
    served: tuple[Cloud, str], monkeypatch: pytest.MonkeyPatch, first: int
):
    monkeypatch.setattr(notice_sources, "PATIENCE_S", 0.3)
    cloud, host = served
    cloud.upsets = [503] if first == 503 else []
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {aws(f"http://{host}"): SOON_S}):
        cloud.wait_for_answers(3)
        cloud.upsets = [503, HANGS, 401, 503, 503]  # so there is no new token at first
        cloud.wait_for_answers(6)
        assert heard.empty()
        spot(cloud, json.dumps({"action": "terminate", "time": in_s(90)}))
        assert heard.get(timeout=PATIENCE_S).source == "AWS"


def address_at(name: str, host: str) -> str:
    return host if name == "Google Compute Engine" else f"http://{host}"


@pytest.mark.parametrize("name", CLOUDS)
def test_where_no_server_is_the_source_ends_quietly(name: str, closed_port: str):
    look = CLOUDS[name].poll(address_at(name, closed_port))
    heard: Queue[Notice] = Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Watch(heard.put, None, {look: SOON_S}):
            wait_until_it_ends()
    assert heard.empty()


@pytest.mark.parametrize("host", ["closed", "not a host"])
def test_a_server_that_was_named_and_is_not_there_is_warned_of(
    host: str, closed_port: str
):
    named = closed_port if host == "closed" else host
    names = {c.variable: address_at(name, named) for name, c in CLOUDS.items()}
    with pytest.warns(UserWarning, match="no metadata server at .*: no ") as warned:
        with Watch(print, None, dict.fromkeys(clouds(names), SOON_S)):
            wait_until_it_ends()
    assert len(warned) == len(CLOUDS)


@pytest.mark.parametrize("name", CLOUDS)
def test_a_server_of_something_else_is_not_listened_to(
    name: str, served: tuple[Cloud, str]
):
    cloud, host = served
    cloud.values = {f"{GCE}preempted": "TRUE", f"{GCE}maintenance-event": "NONE"}
    if name == "AWS":
        cloud.upsets = [405]  # another cloud's server has no tokens
        spot(cloud, json.dumps({"action": "terminate", "time": in_s(90)}))
    heard: Queue[Notice] = Queue()
    look = CLOUDS[name].poll(address_at(name, host))
    with Watch(heard.put, None, {look: SOON_S}):
        wait_until_it_ends()
    assert heard.empty() and cloud.num_asked == 1


def event(kind: str, at: str, *machines: str, status: str = "Scheduled") -> Any:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": machines,
        "EventStatus": status,
        "NotBefore": at,
        "EventSource": "Platform",
    }


def schedule(cloud: Cloud, *events: Any) -> None:
    told = {"DocumentIncarnation": 1, "Events": events}
    cloud.values[AZURE_NAME] = "vm_0"
    cloud.values[AZURE_EVENTS] = json.dumps(told)


def http_in_s(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


def test_an_event_at_azure_is_told_when_it_is_near_and_of_this_machine(
    served: tuple[Cloud, str],
):
    cloud, host = served
    heard: Queue[Notice] = Queue()
    schedule(cloud)
    with Watch(heard.put, None, {azure(f"http://{host}/"): SOON_S}):
        for passing in [
            event("Freeze", "", "vm_0"),  # takes some seconds
            event("Preempt", http_in_s(30), "vm_1"),
            event("Reboot", http_in_s(800), "vm_0"),  # leaves time to train
            "{",
            None,
            {"EventType": "Preempt", "Resources": None},
        ]:
            schedule(cloud, passing)
            cloud.wait_for_answers(3)
        cloud.values[AZURE_EVENTS] = "[" * 4096
        cloud.upsets = [503, 410, 429]
        cloud.wait_for_answers(5)
        assert heard.empty()
        far = event("Redeploy", http_in_s(600), "vm_0")
        schedule(cloud, far, event("Preempt", http_in_s(30), "vm_1", "vm_0"))
        told = heard.get(timeout=PATIENCE_S)
    assert told.source == "Azure" and 20 < told.grace_s <= 30


@pytest.mark.parametrize("at", ["", None, 7, "soon"])
def test_an_event_at_azure_that_has_started_leaves_nothing(
    served: tuple[Cloud, str], at: Any
):
    cloud, host = served
    schedule(cloud, event("Terminate", at, "vm_0", status="Started"))
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {azure(f"http://{host}"): SOON_S}):
        assert heard.get(timeout=PATIENCE_S).grace_s == 0.0


def test_azure_may_take_long_for_the_first_answer(
    served: tuple[Cloud, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notice_sources, "PATIENCE_S", 0.2)
    cloud, host = served
    schedule(cloud)
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {azure(f"http://{host}"): SOON_S}):
        cloud.wait_for_answers(1)
        cloud.upsets = [HANGS, HANGS]
        cloud.wait_for_answers(2)
        schedule(cloud, event("Preempt", http_in_s(30), "vm_0"))
        assert heard.get(timeout=PATIENCE_S).source == "Azure"


def test_addresses_come_from_the_environment_and_proxies_do_not(
    google: tuple[Cloud, str], closed_port: str, monkeypatch: pytest.MonkeyPatch
):
    cloud, host = google
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{host}")
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://{host}")
    schedule(cloud, event("Preempt", "", "vm_0"))
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://{closed_port}")
    cloud.values[f"{GCE}preempted"] = "TRUE"
    spot(cloud, json.dumps({"action": "terminate", "time": in_s(90)}))
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None):
        sources = {heard.get(timeout=PATIENCE_S).source for _ in CLOUDS}
    assert sources == {*CLOUDS}


def test_an_operator_is_heard_each_time_and_the_file_goes(tmp_path: Path):
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, None, {operator(tmp_path): SOON_S}):
        for node in ("h20-0", None, "a100-0"):
            path = ask_to_leave(tmp_path, node)
            told = heard.get(timeout=PATIENCE_S)
            assert told == Notice(source="operator", grace_s=30.0, node=node)
            assert not path.exists()
    assert list(tmp_path.iterdir()) == [] and not is_watching()


@pytest.mark.parametrize("text", [b"", b"h20-0", b"{}", b'{"node": 3}', b"\xff"])
def test_a_request_that_names_no_node_is_for_the_whole_run_with_a_warning(
    tmp_path: Path, text: bytes
):
    (tmp_path / "preempt").write_bytes(text)
    heard: Queue[Notice] = Queue()
    with pytest.warns(
        UserWarning, match="preempt: no node in .*: stopping the whole run"
    ):
        with Watch(heard.put, None, {operator(tmp_path): SOON_S}):
            assert heard.get(timeout=PATIENCE_S).node is None


def test_nothing_is_heard_after_the_watch(
    google: tuple[Cloud, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(notice_sources, "PATIENCE_S", 0.3)
    cloud, host = google
    heard: Queue[Notice] = Queue()
    with Watch(heard.put, tmp_path, {google_compute_engine(host): SOON_S}):
        cloud.wait_for_answers(2)
        cloud.upsets = [HANGS]
    cloud.values[f"{GCE}preempted"] = "TRUE"
    ask_to_leave(tmp_path, None)
    wait_until_it_ends()
    assert heard.empty()


def test_hours_ask_for_a_stop_when_they_are_over_and_not_before():
    stop = StopRequest()
    with stop.after(0.3 / 3600, time.perf_counter()):
        assert stop.reason is None
        limit_s = time.perf_counter() + 30
        while stop.reason is None and time.perf_counter() < limit_s:
            time.sleep(0.05)
    assert stop.reason == "--max-hours 8.33333e-05" and not stop.leaves_no_time
    over = StopRequest()
    with over.after(0.2 / 3600, time.perf_counter()):
        pass
    time.sleep(0.4)
    assert over.reason is None


def test_a_sigterm_that_comes_again_neither_says_more_nor_gives_more_time(
    capfd: pytest.CaptureFixture[str],
):
    """Slurm sends it to the script, which passes it on, and to the run itself."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        first = vars(stop).copy()
        os.kill(os.getpid(), signal.SIGTERM)
        assert vars(stop) == first and stop.reason == "SIGTERM"
    assert capfd.readouterr().err.count("saving after this step") == 1


def two_notices(node: str) -> Iterator[Notice | None]:
    for name in (node, "other"):
        yield Notice(node=name, source=f"SIGTERM on {name}", grace_s=30.0)


def test_a_notice_that_fails_stops_the_run_and_later_ones_are_heard():
    stop, recorded = StopRequest(), Queue[tuple[str | None, bool]]()

    def leave(node: str) -> bool:
        if node == "bad":
            raise RuntimeError("no plan, for a reason that nobody knows")
        return True

    driver: Any = SimpleNamespace(leave=leave, at=7)
    recorder: Any = SimpleNamespace(
        notice=lambda notice, step, goes_on: recorded.put((notice.node, goes_on))
    )
    on_notice = partial(_on_notice, driver, stop, recorder)
    with (
        pytest.warns(
            UserWarning, match="SIGTERM on bad: notice not handled: RuntimeErr"
        ),
        Watch(on_notice, None, {two_notices("bad"): SOON_S}),
    ):
        assert recorded.get(timeout=PATIENCE_S) == ("bad", False)
        assert recorded.get(timeout=PATIENCE_S) == ("other", True)
    assert stop.reason == "SIGTERM on bad" and stop.grace_s == 30.0
