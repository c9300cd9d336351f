# SPDX-License-Identifier: Apache-2.0
"""Which run a start resumes, for every case of directory and saves."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.recovery_plan import PartialSnapshot, Tier
from hetjax.checkpoint.run_identity import RunIdentity, parse_identity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cli.train import parse
from hetjax.errors import BadInput
from hetjax.models.finetuning import TrainConfig
from hetjax.plans.worker_map import EMBEDDED
from hetjax.training.directory.identity import (
    Claim,
    OtherRun,
    SavedRun,
    SavePlace,
    decide,
    provisional,
    saved_runs,
    settled,
)
from hetjax.training.directory.leftover_checkpoints import (
    check_is_of_run,
    claim_of,
    identify,
)
from hetjax.training.directory.rundir import METRICS, check_same_run
from hetjax.training.settings.checks import as_options
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import flat_values

RATE = "optimizer.learning_rate"
NEW = Claim(
    run_dir="runs/new",
    own=None,
    is_new=True,
    lease=1,
    fresh="fff",
    settings={RATE: 0.1, "seed": 0},
    hashes={"tokenizer.json": "t"},
    kept=("seed",),
)
OLD = replace(NEW, is_new=False, lease=9, last_step=5)  # from before identities
OURS = replace(NEW, own=RunIdentity(id="aaa"), is_new=False, lease=4)
BEFORE = replace(OURS, own=RunIdentity(id="before-aaa"))


def saved(run: str, *, start: int = 3, **settings: Any) -> SavedRun:
    known = {RATE: 0.1, "seed": 0, "tokenizer.json": "t"} if run else {"seed": 0}
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    return SavedRun(
        id=run,
        places=("disk",),
        start=start,
        step=5,
        step_elsewhere=5,
        settings={**known, **changed},
    )


def snapshot(
    run: str, step: int, start: int, tier: Tier, worker: str = "a"
) -> PartialSnapshot:
    return PartialSnapshot(
        worker=worker,
        tier=tier,
        save=(step, AttemptNames(start).new()),
        leaves=frozenset(),
        host={"run": {"seed": step}},
        run=run,
    )


A, B, OLDER = saved("aaa"), saved("bbb"), saved("")


@pytest.mark.parametrize(
    ("claim", "found", "expected"),
    [
        # a new directory
        (NEW, [], RunIdentity(id="fff")),
        (NEW, [A], RunIdentity(id="aaa", after=3)),
        (replace(NEW, adopt="aaa"), [A], RunIdentity(id="aaa", after=3)),
        (
            replace(NEW, adopt="aaa"),
            [saved("aaa", optimizer__learning_rate=9.0)],
            RunIdentity(id="aaa", after=3),
        ),
        (
            replace(NEW, adopt="before"),
            [OLDER],
            RunIdentity(id="before-fff", after=3),
        ),
        # saves without identity belong to the run that began before identities existed
        (
            NEW,
            [OLDER, saved("before-aaa", start=5)],
            RunIdentity(id="before-aaa", after=5),
        ),
        # a directory from before identities
        (OLD, [], RunIdentity(id="before-fff")),
        (OLD, [OLDER], RunIdentity(id="before-fff")),
        (OLD, [saved("", start=99)], RunIdentity(id="before-fff", after=99)),
        (
            replace(OLD, last_step=4),
            [replace(OLDER, step_elsewhere=4)],  # step 5 is in the directory itself
            RunIdentity(id="before-fff"),
        ),
        # its own saves
        (OURS, [], RunIdentity(id="aaa")),
        (OURS, [A], RunIdentity(id="aaa")),
        (OURS, [saved("aaa", optimizer__learning_rate=9.0)], RunIdentity(id="aaa")),
        (replace(OURS, adopt="aaa"), [A], RunIdentity(id="aaa")),
        (BEFORE, [OLDER], RunIdentity(id="before-aaa")),
        (replace(BEFORE, adopt="before"), [], RunIdentity(id="before-aaa")),
        (
            replace(OURS, own=RunIdentity(id="aaa", after=7)),
            [saved("aaa", start=10)],
            RunIdentity(id="aaa", after=7),
        ),
        # its own saves, moved without the .lease that counts its starts
        (
            replace(OURS, lease=1),
            [replace(A, start_in_run_dir=3)],
            RunIdentity(id="aaa", after=3),
        ),
        (
            replace(OURS, lease=1),
            [replace(saved("aaa", start=5), start_in_run_dir=5)],
            RunIdentity(id="aaa", after=5),
        ),
        # a copy, which the user lets take over
        (
            replace(OURS, adopt="aaa"),
            [saved("aaa", start=4)],
            RunIdentity(id="aaa", after=4),
        ),
    ],
)
def test_a_start_goes_on_with(
    claim: Claim, found: list[SavedRun], expected: RunIdentity
):
    decision = decide(claim, found)
    assert decision.run == expected
    knew = claim.own is not None or not claim.is_new
    assert (decision.adopted is None) == (knew or not found)
    if claim.adopt is not None:  # workers hold leases for that run
        assert provisional(claim).id == decision.run.id
    # its saves are numbered after all saves found, and the next start owns them
    number = expected.after + claim.lease
    assert all(number > one.start for one in found)
    again = replace(settled(claim, decision.run), adopt=None, lease=claim.lease + 1)
    assert decide(again, [*found, saved(expected.id, start=number)]).run == expected


@pytest.mark.parametrize("asked", ["../x", "A b", "", "a" * 99])
def test_what_no_run_is_called_is_not_held_for(asked: str):
    assert provisional(replace(NEW, adopt=asked)).id == "fff"
    assert provisional(replace(OURS, adopt=asked)).id == "aaa"


@pytest.mark.parametrize(
    ("claim", "found", "words"),
    [
        # a new directory
        (
            NEW,
            [saved("aaa", optimizer__learning_rate=9.0)],
            ["run aaa", f"{RATE} = 9.0 (here 0.1)", "--optimizer.learning-rate 9.0"]
            + ["--adopt aaa", "'runs/new'"],
        ),
        (NEW, [replace(A, settings={**A.settings, "tokenizer.json": "x"})], ["text"]),
        (NEW, [A, B], ["run aaa", "run bbb", "2 runs"]),
        (NEW, [OLDER], ["before runs had identities", "--adopt before"]),
        (NEW, [OLDER, A], ["run aaa", "before runs had identities"]),
        (replace(NEW, adopt="aaa"), [A, B], ["run aaa", "run bbb"]),
        (replace(NEW, adopt="ccc"), [A], ["--adopt ccc", "--adopt aaa"]),
        (replace(NEW, adopt="before"), [A], ["--adopt before", "--adopt aaa"]),
        (replace(NEW, adopt="aaa"), [], ["leave --adopt out"]),
        # a directory from before identities
        (OLD, [A], ["run aaa", "--adopt aaa"]),
        (replace(OLD, last_step=4), [OLDER], ["ends at step 4", "--adopt before"]),
        (OLD, [saved("", seed=5)], ["seed = 5 (here 0)"]),
        (OLD, [OLDER, A], ["run aaa", "before runs had identities"]),
        # its own directory
        (OURS, [B], ["run bbb", "run aaa", "--checkpoint.local"]),
        (OURS, [A, B], ["run bbb", "run aaa"]),
        (OURS, [OLDER], ["run aaa", "before runs had identities"]),
        (BEFORE, [OLDER, B], ["run bbb", "run before-aaa"]),
        (replace(OURS, adopt="bbb"), [B], ["--adopt bbb", "--adopt aaa"]),
        (replace(OURS, adopt="bbb"), [], ["--adopt bbb", "run aaa"]),
        (replace(OURS, adopt="before"), [OLDER], ["--adopt before"]),
        # a copy of a directory in which the run has continued
        (OURS, [saved("aaa", start=4)], ["a copy", "--adopt aaa"]),
        (OURS, [saved("aaa", start=5)], ["a copy", "step 5"]),
        (
            OURS,
            [replace(saved("aaa", start=5), start_in_run_dir=4)],
            ["directory 'runs/new': this is a copy"],
        ),
        (replace(OURS, lease=1), [A], ["its .lease is missing, or this is a copy"]),
    ],
)
def test_a_start_does_not_go_on(claim: Claim, found: list[SavedRun], words: list[str]):
    with pytest.raises(OtherRun) as refused:
        decide(claim, found)
    assert refused.value.exit_code == 2
    text = str(refused.value)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        (NEW, [saved("aaa", seed=5)]),
        (NEW, [saved("aaa", seed=5, optimizer__learning_rate=9.0)]),
        (NEW, [replace(A, settings={**A.settings, "tokenizer.json": "x"})]),
        (NEW, [saved("", seed=5)]),
        (OLD, [saved("aaa", seed=5)]),
        (replace(NEW, adopt="ccc"), [saved("aaa", seed=5)]),
    ],
)
def test_a_run_that_would_be_refused_is_not_offered(
    claim: Claim, found: list[SavedRun]
):
    """What a run keeps differs, so an adoption would be refused next."""
    with pytest.raises(OtherRun) as refused:
        decide(claim, found)
    for offer in ("(--adopt", "give --adopt", "add --adopt"):
        assert offer not in refused.value.fix


def test_a_refusal_says_on_which_nodes_and_in_which_store_saves_are():
    storage = CheckpointStorage(
        directory="/local/{worker}", cloud="gs://store", is_local=True
    )
    nodes = [f"node-{number}" for number in range(5)]
    disks = [snapshot("bbb", 6, 2, "disk", worker) for worker in (EMBEDDED, *nodes[:1])]
    with pytest.raises(OtherRun) as refused:
        identify(OURS, storage, [*disks, snapshot("bbb", 6, 2, "cloud")], print)
    places = "/local/embedded, /local/node-0 on node-0, gs://store)"
    assert f"run bbb (step 6 in {places}" in refused.value.got
    assert "remove the step_* folders" in refused.value.fix
    many = [snapshot("bbb", 6, 2, "disk", worker) for worker in nodes]
    with pytest.raises(OtherRun, match=r"/local/node-2 on node-2 and 2 more\)"):
        identify(OURS, storage, many, print)
    for save in (*disks, snapshot("bbb", 6, 2, "cloud")):
        with pytest.raises(BadInput) as refused:
            check_is_of_run(storage, {"seed": 5}, [save])
        where = {"cloud": "gs://store"}.get(save.tier, f"/local/{save.worker}")
        assert f"step 6 in {where}" in refused.value.got
        assert "remove the step_* folders" in refused.value.fix


ODD = {"evaluation.prompt": "Once upon 'a' \"time\"; $HOME", "lora.targets": "a.(q|v)"}
ODD |= {"init": None, "data.pack": True, "optimizer.learning_rate": 1e-05}


@pytest.mark.parametrize("value", ["--seed 5", "", "a (b) #c"])
def test_the_settings_of_an_error_can_be_pasted(value: str, tmp_path: Path):
    """The test pastes them into a shell, and the command's parser reads them."""
    there = {**ODD, "train.only": value}
    here: dict[str, Any] = dict.fromkeys(there, "other")
    found = replace(A, settings=there)
    with pytest.raises(OtherRun) as refused:
        decide(replace(NEW, settings=here, hashes={}), [found])
    pasted = refused.value.fix.partition("under its settings (")[2]
    pasted = pasted.rpartition("), or resume it under these")[0]
    shown = subprocess.check_output(["sh", "-c", f"printf '%s\\0' {pasted}"], text=True)
    words = shown.split("\0")[:-1]
    config, _ = parse(["tiny", "--run-dir", str(tmp_path), *words])
    read = flat_values(config)
    assert {name: read[name] for name in there} == there
    # the same if the run directory holds another run
    previous: Any = SimpleNamespace(config=config)
    now = replace(config, train=TrainConfig())
    with pytest.raises(BadInput) as refused:
        check_same_run(previous, now)
    assert f"resume that run with {as_options({'train.only': value})}, " in (
        refused.value.fix
    )


def test_the_words_of_a_list_are_typed_one_by_one():
    assert as_options({"a_b": ["q", "v w"]}) == "--a-b q 'v w'"


def test_saves_are_of_runs_by_their_newest_start_and_step():
    places = {
        "disk": SavePlace(name="/local", in_run_dir=True),
        "cloud": SavePlace(name="gs://store"),
    }
    found = saved_runs(
        [
            snapshot("aaa", 6, 2, "cloud"),
            snapshot("aaa", 4, 3, "disk"),
            snapshot("bbb", 9, 2, "disk"),
            snapshot("ccc", 9, 2, "cloud"),
        ],
        lambda snapshot: places[snapshot.tier],
    )
    assert found == [
        SavedRun(
            id="aaa",
            places=("/local", "gs://store"),
            start=3,
            start_in_run_dir=3,
            step=6,
            step_elsewhere=6,
            settings={"seed": 6},
        ),
        SavedRun(
            id="bbb",
            places=("/local",),
            start=2,
            start_in_run_dir=2,
            step=9,
            settings={"seed": 9},
        ),
        SavedRun(
            id="ccc",
            places=("gs://store",),
            start=2,
            step=9,
            step_elsewhere=9,
            settings={"seed": 9},
        ),
    ]


def test_what_a_directory_from_before_tells_of_ends_with_its_metrics(tmp_path: Path):
    config = RunConfig(
        model="tiny", run_dir=tmp_path, steps=9, seq_len=8, global_batch=2
    )
    before: Any = SimpleNamespace(run=None)
    assert claim_of(config, before).last_step == 0
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 4, 3)]
    (tmp_path / METRICS).write_text("".join(lines) + '{"step": 9')  # cut off
    claim = claim_of(config, before)
    assert claim.last_step == 4
    with pytest.raises(OtherRun, match="ends at step 4"):
        decide(claim, [replace(OLDER, settings={})])
    adopting = replace(claim, adopt="before")
    assert decide(adopting, [OLDER]).run.id == f"before-{claim.fresh}"


@pytest.mark.parametrize("told", [5, ["seed"], "x", None])
def test_settings_that_are_no_table_are_refused(told: Any):
    save = replace(snapshot("aaa", 6, 1, "disk"), host={"run": told})
    with pytest.raises(BadInput, match="run in step 6 in /local"):
        saved_runs([save], lambda _: SavePlace(name="/local"))


@pytest.mark.parametrize(
    "wrong",
    [{"id": "A b"}, {"id": "../x"}, {"id": ""}, {"id": "a" * 99}]
    + [{"after": -1}, {"after": 2**31}, {"id": 5}, {"after": "1"}],
)
def test_an_identity_that_no_run_has_is_refused(wrong: dict[str, Any]):
    assert parse_identity({"id": "a1", "after": 2}, "it") == RunIdentity(
        id="a1", after=2
    )
    with pytest.raises(BadInput, match="it"):
        parse_identity({"id": "a1", "after": 2} | wrong, "it")
