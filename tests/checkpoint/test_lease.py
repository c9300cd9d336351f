# SPDX-License-Identifier: Apache-2.0
"""One holder at a time, on a disk and in a bucket; no other holder's writes remain."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from hetjax.checkpoint.format import AttemptNames, to_text
from hetjax.checkpoint.leases.lease import (
    Fence,
    Lease,
    LeaseHeld,
    LeaseLost,
    acquire,
    look,
)
from hetjax.checkpoint.reader import steps
from hetjax.checkpoint.storage import lease_folder
from hetjax.checkpoint.stored_steps import (
    COMMIT,
    commit,
    committed_lease,
    committed_steps,
    object_name,
)
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import Store
from hetjax.checkpoint.uploader import Uploader
from hetjax.checkpoint.writer import CheckpointWriter
from tests.checkpoint.fake_s3 import ENVIRONMENT
from tests.checkpoint.test_hostile_names import manifest
from tests.checkpoint.values import state_of
from tests.short_runs import draws

SOON_S = 0.3  # lease of a holder that does not renew
LATER_S = 0.6  # of one that renews, even on a busy machine


def taken(store: Store, renew_s: float = 0.1, lease_s: float = SOON_S) -> Lease:
    return acquire(store, "it", lease_s=lease_s, renew_s=renew_s)


def elsewhere(store: Store, number: int) -> None:
    """Move the holder to another machine, so that nothing here can tell if it lives."""
    name = f"lease/{number:010d}/holder"
    holder = json.loads(store.get_text(name) or "")
    store.remove([name])
    store.put_text(name, json.dumps(holder | {"machine": "another"}))


def silent(store: Store, number: int) -> Fence:
    """Return a holder on another machine that unknowingly did not renew."""
    lease = taken(store, renew_s=1e6)
    assert lease.number == number
    elsewhere(store, number)
    return lease.fence


def test_a_wait_begins_when_the_lease_was_first_seen(store: Store):
    silent(store, 1)
    seen, told = look(store), list[str]()
    time.sleep(SOON_S)
    with acquire(store, "it", told.append, seen=seen, lease_s=SOON_S) as lease:
        assert lease.number == 2 and not told


def test_a_lease_that_was_renewed_since_it_was_seen_is_held(store: Store):
    with taken(store):
        elsewhere(store, 1)
        seen = look(store)
        time.sleep(LATER_S)
        with pytest.raises(LeaseHeld):
            acquire(store, "it", seen=seen, lease_s=LATER_S)


def test_numbers_grow_with_each_holder(store: Store):
    for number in (1, 2, 3):
        with taken(store) as lease:
            assert lease.number == number
            lease.fence.check()
    assert all("0000000003" in name for name in store.names("lease/"))


def test_one_that_renews_keeps_it_however_long(store: Store):
    with taken(store) as lease:
        elsewhere(store, 1)
        told: list[str] = []
        for _ in range(2):
            with pytest.raises(LeaseHeld, match=f"in use by process {os.getpid()} on"):
                acquire(store, "it", told.append, lease_s=3 * LATER_S)
        assert "waiting up to 1.8 s" in told[0]
        lease.fence.check()


def test_one_that_does_not_renew_loses_it_and_knows(store: Store):
    fence = silent(store, 1)
    begin_s = time.monotonic()
    with taken(store) as lease:
        assert lease.number == 2 and time.monotonic() - begin_s >= SOON_S
        with pytest.raises(LeaseLost, match=r"it was taken over by process \d+ on"):
            fence.check()
        lease.fence.check()


def test_one_that_is_known_to_be_dead_loses_it_at_once(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from hetjax.checkpoint.leases.lease import acquire\n"
        "from hetjax.checkpoint.storage import lease_folder\n"
        "acquire(lease_folder(Path(sys.argv[1])), 'it'); os._exit(1)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=environment)
    with acquire(lease_folder(tmp_path), "it", lease_s=1e6) as lease:
        assert lease.number == 2


def test_one_that_has_given_it_back_is_not_waited_for(store: Store):
    taken(store).release()
    elsewhere(store, 1)
    with acquire(store, "it", lease_s=1e6) as lease:
        assert lease.number == 2


def test_of_many_that_want_it_at_once_one_has_it(store: Store):
    silent(store, 1)
    found: list[Lease] = []
    refused: list[LeaseHeld] = []

    def want() -> None:
        try:
            found.append(taken(store, lease_s=LATER_S))
        except LeaseHeld as held:
            refused.append(held)

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lease.number for lease in found] == [2] and len(refused) == 5
    found[0].fence.check()
    found[0].release()


def test_where_there_are_no_links_one_is_first_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refused)
    with taken(lease_folder(tmp_path)) as lease:
        elsewhere(lease_folder(tmp_path), 1)
        with pytest.raises(LeaseHeld):
            taken(lease_folder(tmp_path), lease_s=LATER_S)
        assert lease.number == 1


def test_what_one_without_the_lease_has_saved_is_not_committed(tmp_path: Path):
    leases = FileStore(tmp_path / "leases")
    fence = silent(leases, 1)
    with taken(leases), CheckpointWriter(tmp_path, "a", fence=fence) as writer:
        with pytest.warns(UserWarning, match="not saved .*it was taken over by"):
            writer.save(1, state_of(1), host={})
            writer.wait()
    assert steps(tmp_path) == []


def test_one_without_the_lease_gives_up_nothing(tmp_path: Path):
    leases = FileStore(tmp_path / "leases")
    fence = silent(leases, 1)
    with CheckpointWriter(tmp_path, "a", fence=fence) as writer:
        writer.save(1, state_of(1), host={})
        writer.wait()
        with taken(leases), pytest.raises(LeaseLost, match="it was taken over by"):
            writer.discard_after(0)
    assert steps(tmp_path) == [1]


def test_it_is_undone_if_the_lease_is_lost_in_the_very_moment(tmp_path: Path):
    leases = FileStore(tmp_path / "leases")
    held: list[Lease] = []

    class Late(Fence):
        """Its lease is taken over between its check and its write."""

        def check(self) -> None:
            super().check()
            if not held:
                held.append(taken(leases))

    fence = silent(leases, 1)
    late = Late(fence.store, fence.where, fence.number)
    with CheckpointWriter(tmp_path, "a", fence=late) as writer:
        with pytest.warns(UserWarning, match="not saved .*it was taken over by"):
            writer.save(1, state_of(1), host={})
            writer.wait()
    assert steps(tmp_path) == []
    held[0].release()


def upload(store: Store, folder: Path, values: int, fence: Fence, step: int) -> None:
    """Save and upload a step as a run under that lease does."""
    with Uploader(store, folder, "a", fence=fence) as uploader:
        with CheckpointWriter(folder, "a", uploader=uploader) as writer:
            name = AttemptNames(fence.number).new()
            writer.save(step, state_of(values), host={"attempt": name})


def test_two_runs_on_one_store_do_not_both_commit(store: Store, tmp_path: Path):
    first = silent(store, 1)
    upload(store, tmp_path / "one", 1, first, 10)
    assert committed_lease(store, 10) == 1
    with taken(store) as lease:
        with pytest.warns(UserWarning, match="not uploaded .*was taken over by"):
            upload(store, tmp_path / "one", 1, first, 20)
        assert committed_steps(store) == [10]
        upload(store, tmp_path / "two", 2, lease.fence, 20)
        assert committed_lease(store, 20) == 2
        with warnings.catch_warnings(record=True):  # nor remove what is committed
            warnings.simplefilter("always")
            upload(store, tmp_path / "one", 1, first, 5)
        assert committed_steps(store) == [10, 20]


def test_a_late_commit_of_an_older_lease_gives_way_to_the_newer(
    store: Store, tmp_path: Path
):
    """Its writer checked, stalled, wrote, and was killed before it checked again."""
    first = silent(store, 1)
    with taken(store) as lease:
        upload(store, tmp_path / "one", 1, Fence(store, "it", 0), 20)
        name = object_name(20, COMMIT)
        body = json.loads(store.get_text(name) or "")
        store.remove([name])
        store.put_text(name, json.dumps(body | {"lease": first.number}))
        upload(store, tmp_path / "two", 2, lease.fence, 20)
        assert committed_lease(store, 20) == 2


def test_a_commit_is_taken_back_if_the_lease_was_lost_meanwhile(store: Store):
    fence = silent(store, 1)
    store.put_text(object_name(1, "a", "manifest.json"), to_text(manifest()))
    held: list[Lease] = []

    class Late(Fence):
        def check(self) -> None:
            super().check()
            if not held:
                held.append(taken(store))

    with pytest.raises(LeaseLost):
        commit(store, 1, ["a"], Late(store, "it", fence.number))
    assert committed_steps(store) == []
    held[0].release()


PROCESS = """
import sys, time, warnings
from pathlib import Path
shift_s = float(sys.argv[3])
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + shift_s
time.time_ns = lambda: now_ns() + int(1e9 * shift_s)
from hetjax.checkpoint.leases import lease as leases
from hetjax.checkpoint.storage import CheckpointStorage, lease_folder, open_store
from tests.checkpoint.values import state_of
top, cloud, endpoint = Path(sys.argv[1]), sys.argv[2], sys.argv[4] or None
leases._machine = lambda: sys.argv[3]  # as if each were on a machine of its own
store = open_store(cloud, endpoint=endpoint)
run = leases.acquire(lease_folder(top / ".lease"), "run", lease_s=3, renew_s=0.3)
kept = leases.acquire(store, "store", lease_s=3, renew_s=0.3)
storage = CheckpointStorage(
    directory=str(top / "checkpoints"), cloud=cloud, endpoint=endpoint, keep=99,
    lease=str(top / ".lease"), number=run.number, store_number=kept.number,
)
print("holds", run.number, kept.number, flush=True)
writer = storage.writer("a")
for line in sys.stdin:
    step = int(line)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        writer.save(step, state_of(run.number), host={"attempt": f"{run.number:016x}"})
        writer.wait()
        writer._uploader.wait(30)
    print("saved" if not told else "refused " + str(told[0].message), flush=True)
"""


class Saver:
    """A process that saves and uploads the given steps under leases."""

    def __init__(self, *words: str, environment: dict[str, str]) -> None:
        self._words, self._environment = words, environment
        self._child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", PROCESS, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            text=True,
        )

    @property
    def child(self) -> subprocess.Popen[str]:
        assert self._child is not None
        return self._child

    def says(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def save(self, step: int) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{step}\n")
        self.child.stdin.flush()
        return self.says()

    def ends(self) -> str:
        """Return its last output."""
        _, words = self.child.communicate(timeout=60)
        assert self.child.returncode
        return words

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()


@pytest.mark.parametrize("cloud", draws(["s3", "gcs", "file"], short=1))
def test_two_processes_on_one_directory_and_store(
    tmp_path: Path, cloud: str, request: pytest.FixtureRequest
):
    """The first is paused too long; their clocks are years apart."""
    url = f"file://{tmp_path}/store"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    endpoint = ""
    if cloud == "gcs":
        server = request.getfixturevalue("gcs")
        environment["STORAGE_EMULATOR_HOST"] = server.url
        url = "gs://bucket/run"
    if cloud == "s3":
        endpoint = request.getfixturevalue("s3").url
        environment |= ENVIRONMENT
        url = "s3://bucket/run"
    one, two = (
        Saver(str(tmp_path), url, shift, endpoint, environment=environment)
        for shift in ("1e8", "-1e9")
    )
    try:
        one.start()
        assert one.says() == "holds 1 1"
        assert one.save(1) == "saved"
        two.start()
        assert "in use by" in two.ends()
        one.child.send_signal(signal.SIGSTOP)
        two.start()
        assert two.says() == "holds 2 2"
        one.child.send_signal(signal.SIGCONT)
        # because of its lease, or because the other removed its unfinished save
        assert one.save(2).startswith("refused")
        assert two.save(3) == "saved"
        assert "taken over by" in one.save(4)
        assert steps(tmp_path / "checkpoints") == [1, 3]
    finally:
        one.kill()
        two.kill()
