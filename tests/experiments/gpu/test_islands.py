# SPDX-License-Identifier: Apache-2.0
"""Two nodes in one job, and the loss of either worker; here both nodes are CPUs."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.parts import islands
from experiments.gpu.parts.islands import (
    Disturbed,
    cluster_of_two_kinds,
    cramped,
    measure,
)
from experiments.gpu.processes.background import Background
from experiments.gpu.rows import Row
from experiments.gpu.setting import OutOfTime, Setting
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.search.find import find_plan
from tests import jax_settings

pytestmark = pytest.mark.nightly  # takes minutes, for scripts that only a card needs

LOST = ["CPU's worker", "card's worker"]


@pytest.fixture(scope="module")
def rows() -> Iterator[Mapping[str, Row]]:
    """All processes compile quickly, so all round alike."""
    flags = os.environ.get("XLA_FLAGS", ""), *jax_settings.quick_flags()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XLA_FLAGS", " ".join(flags))
        patched.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with jax.numpy_dtype_promotion("standard"):  # as users have it, for optax
            found = measure(Setting(platform="cpu", quick=True))
            yield {row.what: row for row in found}


def test_gradients_over_both_are_those_of_one_stage(rows: Mapping[str, Row]):
    row = rows["gradients of both kinds in one pipeline, furthest from the CPU's"]
    assert isinstance(row.measured, float) and row.measured < 1e-5


def test_the_plan_leaves_no_node_out_and_runs(rows: Mapping[str, Row]):
    assert rows["the plan has stages on both kinds"].measured is True
    run = rows["a run on workers of both kinds ends, and its loss falls"]
    assert run.measured is True, run.note
    step = rows["step of both kinds in one job"]
    assert step.ratio is not None and step.ratio > 0


@pytest.mark.parametrize("lost", LOST)
def test_a_lost_worker_comes_back_and_no_loss_changes(
    rows: Mapping[str, Row], lost: str
):
    back = rows[f"recovers when the {lost} is killed"]
    assert back.measured is True, back.note
    assert {"CPU's worker": "host", "card's worker": "card"}[lost] in back.note
    took = rows[f"recovery from the loss of the {lost}"].measured
    assert isinstance(took, float) and took > 0
    what = f"losses are those of an undisturbed run when the {lost} is killed"
    assert rows[what].measured is True, rows[what].note


def test_neither_node_has_room_for_the_whole_model():
    size = islands._QUICK
    cluster = cramped(cluster_of_two_kinds(jax.local_devices()[0]), size)
    request = islands._request(cluster, size)
    plan = find_plan(request, local_work=500).best.plan
    for node in cluster.nodes:
        stage = islands._stage(node.name, (0, 6), 1)
        alone = islands.replace(plan.replicas[0], stages=(stage,))
        with pytest.raises(NoFeasiblePlan):
            evaluate_plan(request, islands.replace(plan, replicas=(alone,)))


def disturbed(**changes: object) -> Disturbed:
    seconds = {"start": 1.5, "compile": 0.5}
    usual: dict[str, object] = {
        "is_killed": True,
        "code": 0,
        "losses": [3.0, 2.0],
        "recovered": [{"reason": "worker host lost", "seconds": seconds}],
        "tail": "the last words",
    }
    return Disturbed(**usual | changes)  # pyright: ignore[reportArgumentType]


def test_what_does_not_recover_is_said_so():
    for changes in ({"is_killed": False}, {"code": 1}, {"recovered": []}):
        (row,) = islands._recovery("host", disturbed(**changes), [3.0, 2.0])
        assert row.measured is False and "the last words" in row.note


def test_a_run_that_had_no_time_to_end_is_not_judged(tmp_path: Path):
    for is_killed, word in ((True, "was killed"), (False, "nothing was killed")):
        late = disturbed(is_killed=is_killed, code=None, recovered=[])
        (row,) = islands._recovery("host", late, [3.0, 2.0])
        assert row.measured is None and "time was up" in row.note and word in row.note
    log = tmp_path / "log.txt"
    log.write_text("preparing the programs")
    run = Background(process=None, log=log)  # pyright: ignore[reportArgumentType]
    job: Any = SimpleNamespace(size=SimpleNamespace(steps=2), note="")
    judged = {
        (code, len(found)): islands._whole(code, found, run, job).measured
        for code, found in ((None, []), (None, [2.0]), (1, []), (0, [3.0, 2.0]))
    }
    assert judged == {(None, 0): None, (None, 1): None, (1, 0): False, (0, 2): True}


def test_without_time_the_part_is_not_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each run is stopped, none is judged, and what they printed remains."""
    setting = Setting(
        platform="cpu", quick=True, ends_s=time.monotonic() + 4, logs=tmp_path
    )
    monkeypatch.setattr(islands, "_gradients", lambda device: Row(what="", measured=0))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    rows = list[Row]()
    with pytest.raises(OutOfTime, match="3 of 3 runs"):
        rows.extend(measure(setting))
    logs = {path.name for path in (tmp_path / "islands").iterdir()}
    assert {"whole.txt", "without-host.txt", "without-card.txt"} <= logs


def test_the_seconds_of_a_recovery_are_those_of_all_its_phases():
    _, took, same = islands._recovery("host", disturbed(), [3.0, 2.0])
    assert took.measured == 2.0 and same.measured is True
    *_, other = islands._recovery("host", disturbed(losses=[3.0, 2.2]), [3.0, 2.0])
    assert other.measured is False and "0.1" in other.note


def test_every_claim_is_decided_by_a_row(rows: Mapping[str, Row]):
    wanted = {claim.what for claim in CLAIMS if claim.part == "islands"}
    assert wanted and wanted <= rows.keys()
