# SPDX-License-Identifier: Apache-2.0
"""Trackers get a run's numbers, also under the usual names of other tools."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import wandb
from prometheus_client.parser import text_string_to_metric_families

from hetjax.training.observers.dispatch import Dispatcher
from hetjax.training.observers.loading import GivenObserver, observer_sources
from hetjax.training.observers.prometheus import PrometheusObserver
from hetjax.training.observers.records import StartRecord
from hetjax.training.observers.tensorboard import TensorBoardObserver
from tests.training.observers.event_files import scalars, wandb_records

RUN = "0123456789abcdef"
FIRST = [
    {"step": 0, "val_loss": 6.5, "val_bits_per_byte": 3.5},
    *(
        {
            "step": step,
            "loss": 6.0 - step,
            "tokens": 64,
            "step_time_s": 0.5,
            "tokens_per_s": 128.0,
            "grad_norm": 1.5,
            "learning_rate": 0.25,
            "mfu": 0.125,
            "joules_per_token": 2.0,
        }
        for step in (1, 2, 3)
    ),
    {"event": "saved", "step": 2, "time": "now"},
]
BACK = {
    "event": "recovered",
    "step": 2,
    "time": "now",
    "reason": "worker 'b' is gone",
    "seconds": {"move": 1.5},
}
AGAIN = [BACK, {"step": 3, "loss": 7.0, "grad_norm": 0.5}, {"step": 3, "val_loss": 4.0}]
LAST = {"event": "finished", "step": 3, "time": "now"}
LOSSES = {1: 5.0, 2: 4.0, 3: 7.0}


def watched(
    folder: Path, given: GivenObserver, lines: Sequence[dict[str, Any]], step: int = 0
) -> list[str]:
    """Return the messages of a run with these lines, in which a worker is lost."""
    said: list[str] = []
    start = StartRecord(
        run=RUN, run_dir=folder, step=step, steps=3, settings={"optimizer.name": "lion"}
    )
    with Dispatcher(observer_sources([given])) as run:
        run.begin(start, said.append)
        for line in lines:
            if line is BACK:
                run.see_lost(3, "b", "is gone")
            run.see_line(line)
    return said


def test_tensorboard_has_each_step_once_also_after_a_recovery_and_a_resume(
    tmp_path: Path,
):
    assert watched(tmp_path, "tensorboard", [*FIRST, *AGAIN]) == []
    found = scalars(tmp_path / "tensorboard")
    assert found["train/loss"] == LOSSES
    assert found["grad/norm/total"] == {1: 1.5, 2: 1.5, 3: 0.5}
    assert found["optim/learning_rate"] == {1: 0.25, 2: 0.25}
    assert found["throughput/tokens_per_second"] == {1: 128.0, 2: 128.0}
    assert found["throughput/mfu"][1] == 0.125
    assert found["eval/loss"] == {0: 6.5, 3: 4.0} and found["eval/bpb"] == {0: 3.5}
    assert (
        found["throughput/joules_per_token"][2] == 2.0
    )  # this metric has no usual name

    assert watched(tmp_path, "tensorboard", [{"step": 2, "loss": 9.0}], step=1) == []
    assert scalars(tmp_path / "tensorboard")["train/loss"] == {1: 5.0, 2: 9.0}


def test_a_tracker_without_a_place_to_write_is_left_out(tmp_path: Path):
    (tmp_path / "file").touch()
    nowhere = TensorBoardObserver(tmp_path / "file" / "folder")
    (told,) = watched(tmp_path, nowhere, FIRST)
    assert "TensorBoardObserver has raised" in told and "NotADirectoryError" in told


def test_weights_and_biases_gets_a_run_with_the_identity_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert watched(tmp_path, "wandb", [*FIRST, *AGAIN, LAST]) == []
    wandb.teardown()  # wandb's own process writes until then
    records = wandb_records(tmp_path / "wandb")
    (run,) = {(r.run.run_id, r.run.project) for r in records if r.HasField("run")}
    assert run == (RUN, "hetjax")
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row}
        for row in (r.history.item for r in records if r.HasField("history"))
    ]
    rows = [(row["step"], row["train/loss"]) for row in history if "train/loss" in row]
    assert rows == [(1, 5.0), (2, 4.0), (3, 3.0), (3, 7.0)]
    (first, last) = [row for row in history if "eval/loss" in row]
    assert (first["eval/loss"], first["eval/bpb"], last["eval/loss"]) == (6.5, 3.5, 4.0)
    (exit_code,) = [r.exit.exit_code for r in records if r.HasField("exit")]
    assert exit_code == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def scraped(address: str) -> dict[str, float]:
    text = urlopen(f"http://{address}/metrics", timeout=60).read().decode()
    families = text_string_to_metric_families(text)
    return {s.name: s.value for family in families for s in family.samples}


def test_prometheus_answers_with_the_newest_numbers_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("HETJAX_PROMETHEUS", address)
    observer, pages = PrometheusObserver(), list[dict[str, float]]()
    end = observer.on_end

    def scrape_and_end(record: Any) -> None:
        pages.append(scraped(address))
        end(record)

    monkeypatch.setattr(observer, "on_end", scrape_and_end)
    assert watched(tmp_path, observer, [*FIRST, *AGAIN, LAST]) == []
    (page,) = pages
    assert page["hetjax_train_loss"] == 7.0 and page["hetjax_step"] == 3
    assert page["hetjax_eval_loss"] == 4.0 and page["hetjax_saved_step"] == 2
    assert page["hetjax_throughput_mfu"] == 0.125
    assert page["hetjax_lost_workers_total"] == page["hetjax_recoveries_total"] == 1
    with pytest.raises(OSError):
        scraped(address)  # the run is over


def test_a_port_that_is_taken_leaves_prometheus_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HETJAX_PROMETHEUS", f"127.0.0.1:{port}")
        (told,) = watched(tmp_path, "prometheus", FIRST)
    assert "observer prometheus has raised" in told and "in use" in told
