# SPDX-License-Identifier: Apache-2.0
"""Damages checkpoints on workers' disks: is the restored state the saved one?

    python -m experiments.recovery.damage [--cases 500] [--seed 0]

Four worker processes, each with its own folder as a disk and all with one store, save
two steps with different bits. Each case gives the workers another state, damages files
of one kind (a flipped bit, truncated or removed) on some disks, in the newest step or
in both, and lets the workers restore. Besides the disks, a case has one other source:
the store (`store`; the caller lists it, or the restore asks it when needed), a copy of
each saver's part on another worker's disk (`copy`), the newest state in the memory of a
worker that has all of it (`memory`), or nothing. The case then compares the state on
every worker's devices with the saved one, bit for bit, and the step and the bytes by
tier with what the undamaged files allow. Prints one JSON object; `wrong` must be empty.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.recovery import witness
from experiments.recovery.disks import KINDS, Disks, Kind, Part
from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import in_store
from hetjax.launchers.launcher import start_workers
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery import Restored, in_memory, on_disk, restore
from hetjax.runtime.rpc.schema import Initialise, TellNeeds

STEPS = OLDER, NEWEST = 1, 2
_NEITHER = 0  # seed of a state that was never saved
_BESIDE = {"store": 4, "nothing": 3, "copy": 2, "memory": 2}  # relative frequencies
_BOTH_STEPS = 0.3
_UPLOAD_S, _LOOK_S = 300.0, 0.02  # the disk may be busy

State = dict[str, witness.Checksums]  # by worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The damage of a case, and the other source of the state."""

    kind: Kind
    beside: str
    listed: bool = False
    hurt: Mapping[int, Sequence[str]]

    def __str__(self) -> str:
        hurt = "; ".join(f"{step}: {', '.join(on)}" for step, on in self.hurt.items())
        listed = " listed before" if self.listed else ""
        return f"{self.kind} on {hurt}, beside {self.beside}{listed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a restore; `step` is None if it found nothing whole."""

    step: int | None
    num_bytes: Mapping[str, int]
    first_place: bool = True  # each leaf is from the tier that it has without damage

    def name(self) -> str:
        if self.step != NEWEST:
            return "refused" if self.step is None else "older step"
        if self.first_place:
            return "harmless"
        return "from the store" if "cloud" in self.num_bytes else "from a peer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """Workers that have saved; `saved` is their state at that time, by step."""

    controller: Controller
    storage: CheckpointStorage
    disks: Disks
    witnessed: Path
    saved: Mapping[int | None, State]
    needs: Mapping[str, Mapping[str, int]]  # bytes of each leaf, by worker

    @property
    def savers(self) -> list[str]:
        """The workers whose disks have parts."""
        return sorted({part.worker for part in self.disks.own_parts()})


def state(controller: Controller, witnessed: Path) -> State:
    return {worker: witness.told(witnessed, worker) for worker in controller.workers}


@contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    """Start workers and let them save."""
    storage = CheckpointStorage(
        directory=str(folder / "disks/{worker}"), cloud=(folder / "store").as_uri()
    )
    with ExitStack() as stack:
        module = "experiments.recovery.witness"
        launcher = OnThisMachine(folder / "logs", stack, module=module)
        controller = start_workers(launcher, witness.witness_plan())
        witnessed = folder / "witnessed"
        witnessed.mkdir()
        controller.build(witness.witness_settings(witnessed))
        controller.connect()
        saved = {step: save(controller, storage, step, witnessed) for step in STEPS}
        controller.initialise(_NEITHER)
        told = controller.connections.ask(
            dict.fromkeys(controller.workers, TellNeeds())
        )
        yield Lab(
            controller=controller,
            storage=storage,
            disks=Disks.copied(folder / "disks", folder / "pristine"),
            witnessed=witnessed,
            saved={**saved, None: state(controller, witnessed)},
            needs={worker: dict(message.leaves) for worker, message in told.items()},
        )
        controller.end()


def save(
    controller: Controller, storage: CheckpointStorage, step: int, witnessed: Path
) -> State:
    """Save another state as this step; return it when the store has it, too."""
    controller.initialise(step)
    assert controller.save(storage, step, {"step": step})
    controller.wait_saved()
    assert controller.saved == step
    store, end_s = storage.store(), time.monotonic() + _UPLOAD_S
    while step not in {holding.save[0] for holding in in_store(store)}:
        assert time.monotonic() < end_s, f"step {step} is not uploaded"
        time.sleep(_LOOK_S)
    return state(controller, witnessed)


def random_case(number: int, savers: Sequence[str], random_: random.Random) -> Case:
    """Return a case: kinds take turns, all else is drawn."""
    (beside,) = random_.choices([*_BESIDE], [*_BESIDE.values()])
    steps = STEPS if random_.random() < _BOTH_STEPS else (NEWEST,)
    return Case(
        kind=KINDS[number % len(KINDS)],
        beside=beside,
        listed=beside == "store" and random_.random() < 0.5,
        hurt={
            s: random_.sample(savers, random_.randint(1, len(savers))) for s in steps
        },
    )


def run(lab: Lab, case: Case, random_: random.Random) -> tuple[str, list[str]]:
    """Return the expected outcome of a case, and all deviations from it."""
    own = lab.disks.own_parts()
    copies = [*_copies(lab, own)] if case.beside == "copy" else []
    try:
        _forget(lab, case)
        for step, workers in case.hurt.items():
            for worker in workers:
                at = worker, step
                hit = [p for p in (*own, *copies) if (p.worker, p.step) == at]
                lab.disks.harm(hit, case.kind, random_)
        expected = _expected(lab, case, [*own, *copies])
        return expected.name(), [*_wrong(lab, expected, _restored(lab, case))]
    finally:
        for part in copies:
            lab.disks.remove(part)
        for part in own:
            if part.worker in case.hurt.get(part.step, ()):
                lab.disks.mend(part)


def _copies(lab: Lab, parts: Sequence[Part]) -> Iterator[Part]:
    """Copy each part to the disk of another saver, too."""
    others = dict(zip(lab.savers, [*lab.savers[1:], lab.savers[0]], strict=True))
    for part in parts:
        yield lab.disks.copy(part, others[part.worker])


def _forget(lab: Lab, case: Case) -> None:
    """Give all workers another state, except one that may keep the newest."""
    if case.beside != "memory":
        return lab.controller.initialise(_NEITHER)
    found = restore(lab.controller, _on_disks(lab), lab.storage)
    assert found is not None and found.step == NEWEST, found
    request = Initialise(seed=_NEITHER)
    lab.controller.connections.ask(dict.fromkeys(witness.STAGES, request))


def _on_disks(lab: Lab) -> list[PartialSnapshot]:
    return on_disk(lab.controller.connections, lab.controller.workers, lab.storage, {})


def _restored(lab: Lab, case: Case) -> Restored | None:
    storage, held = lab.storage, _on_disks(lab)
    if case.beside == "memory":
        held += in_memory(lab.controller, [witness.WHOLE])
    if case.beside != "store":
        storage = replace(storage, cloud=None)
    elif case.listed:
        held += in_store(storage.store())
    return restore(lab.controller, held, storage)


def _expected(lab: Lab, case: Case, parts: Sequence[Part]) -> Outcome:
    """Return the newest step whose leaves all exist, each from the nearest place."""
    for step in (NEWEST, OLDER):
        there = [part for part in parts if part.step == step]
        tiers = _tiers(lab, case, lab.disks.left(there))
        if None not in tiers.values():
            num_bytes = Counter[str]()
            for (worker, leaf), tier in tiers.items():
                num_bytes[str(tier)] += lab.needs[worker][leaf]
            return Outcome(
                step=step,
                num_bytes=num_bytes,
                first_place=tiers == _tiers(lab, case, lab.disks.saved(there)),
            )
    return Outcome(step=None, num_bytes={}, first_place=False)


def _tiers(
    lab: Lab, case: Case, holders: Mapping[str, Collection[str]]
) -> dict[tuple[str, str], str | None]:
    """Return the nearest tier of each leaf for each worker that lacks it."""
    has_all = case.beside == "memory"  # so no older step is needed
    elsewhere = {"store": "cloud", "memory": "peer"}.get(case.beside)
    found: dict[tuple[str, str], str | None] = {}
    for worker, leaves in lab.needs.items():
        for leaf in leaves if not (has_all and worker == witness.WHOLE) else ():
            on = holders.get(leaf, ())
            tier = "disk" if worker in on else "peer" if on else elsewhere
            found[worker, leaf] = tier
    return found


def _wrong(lab: Lab, expected: Outcome, found: Restored | None) -> Iterator[str]:
    step = None if found is None else found.step
    num_bytes = {} if found is None else dict(found.num_bytes)
    if step != expected.step:
        yield f"restored step {step}, not {expected.step}"
    elif num_bytes != dict(expected.num_bytes):
        yield f"bytes {num_bytes}, not {dict(expected.num_bytes)}"
    for worker, leaves in state(lab.controller, lab.witnessed).items():
        saved = lab.saved[step][worker]
        if other := [leaf for leaf in saved if leaves.get(leaf) != saved[leaf]]:
            yield f"{worker} has other bits in {len(other)} leaves, as {other[0]}"
    if left := [*lab.disks.root.glob("*/.fetched-*")]:
        yield f"left behind: {left[0].name}"


def measured(num_cases: int, seed: int, folder: Path) -> dict[str, Any]:
    random_ = random.Random(seed)
    outcomes: dict[str, Counter[str]] = {str(kind): Counter() for kind in KINDS}
    beside: dict[str, Counter[str]] = {name: Counter() for name in _BESIDE}
    wrong, took_s = [], []
    with lab(folder) as built:
        for number in range(num_cases):
            case = random_case(number, built.savers, random_)
            begin_s = time.perf_counter()
            outcome, troubles = run(built, case, random_)
            took_s.append(time.perf_counter() - begin_s)
            outcomes[str(case.kind)][outcome] += 1
            beside[case.beside][outcome] += 1
            if troubles:
                wrong.append({"case": number, "what": str(case), "troubles": troubles})
            print(number, len(wrong), file=sys.stderr, flush=True)
    return {
        "cases": num_cases,
        "wrong": wrong,
        "outcomes": sum(outcomes.values(), Counter()),
        "by_damage": outcomes,
        "by_what_is_beside": beside,
        "case_s": {
            "median": round(median(took_s), 3),
            "most": round(max(took_s), 3),
        },
        "load": os.getloadavg()[0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # each damage that is found causes a warning
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(given.cases, given.seed, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
