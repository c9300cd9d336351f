# SPDX-License-Identifier: Apache-2.0
"""Serves the newest numbers of the run to Prometheus.

Owns the address, which by default only this machine reaches, and the names. Does not
own the format, which is prometheus_client's.
"""

import os
from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    start_http_server,
)

from hetjax.report.metrics import tracked
from hetjax.training.observers.observer import Observer
from hetjax.training.observers.records import (
    EndRecord,
    EvaluationRecord,
    LostRecord,
    RecoveredRecord,
    SavedRecord,
    StartRecord,
    StepRecord,
)

ADDRESS = "HETJAX_PROMETHEUS"
_LOOPBACK = "127.0.0.1:9464"  # the port that OpenTelemetry's exporter takes


class PrometheusObserver(Observer):
    """Answers `/metrics` while the run is open.

    `address` is HOST:PORT; the default is that of the variable HETJAX_PROMETHEUS, else
    127.0.0.1:9464.
    """

    def __init__(self, address: str | None = None) -> None:
        address = address or os.environ.get(ADDRESS, _LOOPBACK)
        host, _, port = address.rpartition(":")
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._lost = self._counter("lost_workers", "Workers that were lost")
        self._recovered = self._counter("recoveries", "Recoveries, and changes of plan")
        self._server, _ = start_http_server(int(port), host, self._registry)

    def on_start(self, record: StartRecord) -> None:
        self._set({"step": record.step, "steps": record.steps})

    def on_step(self, record: StepRecord) -> None:
        self._set({"step": record.step, **tracked(record.metrics)})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._set(tracked(record.metrics))

    def on_saved(self, record: SavedRecord) -> None:
        self._set({"saved/step": record.step})

    def on_lost(self, record: LostRecord) -> None:
        self._lost.inc()

    def on_recovered(self, record: RecoveredRecord) -> None:
        self._recovered.inc()
        self._set({"step": record.step})

    def on_end(self, record: EndRecord) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"hetjax_{name}", text, registry=self._registry)

    def _set(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._gauges:
                known = f"hetjax_{name.replace('/', '_')}"
                self._gauges[name] = Gauge(known, name, registry=self._registry)
            self._gauges[name].set(value)
