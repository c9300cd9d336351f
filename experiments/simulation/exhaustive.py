# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.simulation.exhaustive`: explores all courses of a small run.

Three workers train three steps and save each. Two may be lost at any moment, with their
disks or without. The search visits, breadth first, every order in which workers hear of
the others, write their parts and are lost. Real functions decide when a step is
committed and finished (`duties.py`), which commit counts and which save is restored
(`recovery_decisions.py`), who gives what (`recovery_plan.py`), which old files go
(`checkpoint/disk.py`).

Owns the model's states, its moves and its invariants. Does not own time, the network
and failures of other kinds: `run.py` draws these at random.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hetjax.checkpoint import disk, recovery_plan
from hetjax.checkpoint.recovery_plan import PartialSnapshot, Save
from hetjax.runtime.control import recovery_decisions
from hetjax.runtime.control.recovery_decisions import Leftovers
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc import schema
from hetjax.runtime.worker import duties
from hetjax.runtime.worker.duties import Progress

# By worker: the layers that it holds, and those that it saves. Two replicas of a and b.
HAS: Mapping[str, frozenset[str]] = {
    "w0": frozenset("a"),
    "w1": frozenset("b"),
    "w2": frozenset("ab"),
}
SAVES: Mapping[str, frozenset[str]] = {"w0": frozenset("a"), "w1": frozenset("b")}
ALL = frozenset("ab")
STEPS, LOSSES, KEEP = 3, 2, 1


@dataclass(frozen=True, slots=True)
class Worker:
    """A process: its reported and its true progress, and the part that it is writing.

    `holds` is the step of the state that it keeps for others during a recovery.
    """

    is_alive: bool = True
    progress: Progress = Progress(at=0)
    steps: int | None = 0  # that its layers really have taken
    has_part: bool = False  # of an aborted step, which it could finish
    holds: int | None = None
    writing: Save | None = None
    newest: Save | None = None


@dataclass(frozen=True, slots=True)
class State:
    """All state. In its `phase`, the controller waits for the workers `late`."""

    workers: tuple[Worker, ...] = (Worker(),) * len(HAS)
    disks: tuple[frozenset[Save], ...] = (frozenset(),) * len(HAS)
    phase: str = "between"
    at: int = 0
    late: frozenset[str] = frozenset()
    best: int | None = None  # newest step whose layers the survivors have or can finish
    commit: StepCommit | None = None  # with which the late workers finish the step
    save: Save | None = None  # which the late workers restore
    is_due: bool = False  # whether the last step must be saved
    saving: Save | None = None
    saved: int | None = None
    ever_saved: bool = False
    attempts: int = 0
    losses: int = 0
    lost_disk: bool = False

    def of(self, name: str) -> Worker:
        return self.workers[int(name[1])]

    def disk(self, name: str) -> frozenset[Save]:
        return self.disks[int(name[1])]

    @property
    def alive(self) -> list[str]:
        return [name for name in HAS if self.of(name).is_alive]

    def having(self, name: str, **changes: object) -> "State":
        """Return the state with these changes to one worker."""
        at, found = int(name[1]), [*self.workers]
        found[at] = replace(found[at], **changes)
        return replace(self, workers=tuple(found))

    def on_disk(self, name: str, saves: frozenset[Save]) -> "State":
        at, found = int(name[1]), [*self.disks]
        found[at] = saves
        return replace(self, disks=tuple(found))

    def whole(self) -> list[Save]:
        """Return the saves of which the disks have all layers."""
        parts = [self.disk(name) for name in SAVES]
        return sorted(frozenset.intersection(*parts))


class Broken(AssertionError):
    """An invariant is broken."""


def moves(state: State) -> Iterator[State]:
    """Yield every state that may come next."""
    if state.phase in ("done", "lost"):
        return
    yield from _PHASES[state.phase](state)
    for name in state.alive:
        if state.of(name).writing is not None:
            yield _written(state, name)
        if state.losses < LOSSES:
            yield _lost(state, name, with_disk=False)
            if name in SAVES:
                yield _lost(state, name, with_disk=True)


def _lost(state: State, name: str, with_disk: bool) -> State:
    """Remove a process, perhaps with its disk; what it sent may still arrive."""
    gone = Worker(is_alive=False, progress=Progress(), steps=None)
    state = replace(state, losses=state.losses + 1, late=state.late - {name})
    state = state.having(name, **{f: getattr(gone, f) for f in Worker.__slots__})
    if with_disk:
        state = replace(state.on_disk(name, frozenset()), lost_disk=True)
    if state.phase == "finish":
        state = replace(state, best=_best(state))
    return state


def _written(state: State, name: str) -> State:
    """Make a part durable, and remove outdated ones."""
    save, own = state.of(name).writing, state.disk(name)
    assert save is not None
    own = frozenset(s for s in own if s[0] != save[0]) | {save}
    steps = sorted(step for step, _ in own)
    upto = [step for step in steps if step <= save[0]]
    gone = disk.outdated(steps, upto, KEEP, {state.saved})
    left = frozenset(s for s in own if s[0] not in gone)
    state = state.having(name, writing=None, newest=save).on_disk(name, left)
    if state.saved is not None and not state.lost_disk:
        if not [s for s in state.whole() if s[0] >= state.saved]:
            raise Broken(f"what was saved of step {state.saved} is gone")
    return state


# --- a step


def _between(state: State) -> Iterator[State]:
    """Start a step, or end; the controller assumes that all workers have one state."""
    if len(state.alive) < len(HAS):
        yield replace(state, phase="reached")
        return
    state = _heard_of_saving(state)
    is_busy = any(worker.writing for worker in state.workers)
    if state.at < STEPS:
        yield _training(_saving(state) if state.is_due and not is_busy else state)
    elif state.saved == STEPS:
        yield replace(state, phase="done")
    elif not is_busy:
        yield _saving(state)


def _training(state: State) -> State:
    request = schema.Train(step=state.at, turn=0, traced=False, loss_scale=None)
    for name in HAS:
        progress = duties.begun(state.of(name).progress, request)
        state = state.having(name, progress=progress, has_part=False)
    return replace(state, phase="step", late=frozenset(HAS), is_due=False)


def _step(state: State) -> Iterator[State]:
    """Let each late worker commit or abort the step, whose parts were all sent."""
    if not state.late:
        if len(state.alive) == len(HAS):
            yield replace(state, phase="between", at=state.at + 1, is_due=True)
        else:
            yield replace(state, phase="reached")
    for name in state.late:
        yield _committed(state, name)
        if len(state.alive) < len(HAS):
            idle = state.having(name, has_part=True)
            yield replace(idle, late=state.late - {name})


def _committed(state: State, name: str) -> State:
    worker = state.of(name)
    assert worker.steps is not None
    progress = duties.committed(state.at, _commit(state.at))
    state = state.having(name, progress=progress, steps=worker.steps + 1)
    return replace(state, late=state.late - {name})


def _commit(step: int) -> StepCommit:
    return StepCommit(squares=float(step), losses=(), num_tokens=1)


# --- recovery


def _reached(state: State) -> Iterator[State]:
    """Collect the survivors' progress; some must finish a step that one committed."""
    told = {
        name: schema.Reached(at=of.at, commit=of.commit, is_aborted=True)
        for name in state.alive
        if (worker := state.of(name)).steps is not None and (of := worker.progress)
    }
    commit, late = recovery_decisions.committed_step(told)
    state = replace(state, phase="finish", commit=commit, late=frozenset(late))
    yield replace(state, best=_best(state), save=None)


def _finish(state: State) -> Iterator[State]:
    if not state.late:
        yield _restoring(state)
    for name in state.late:
        worker = state.of(name)
        assert state.commit is not None and worker.steps is not None
        if not worker.has_part:
            raise Broken(f"{name} is to finish a step that it has no part of")
        request = schema.FinishStep(commit=state.commit)
        progress = duties.done(duties.begun(worker.progress, request), request)
        steps = worker.steps + 1
        found = state.having(name, progress=progress, steps=steps, has_part=False)
        yield replace(found, late=state.late - {name})


def _restoring(state: State) -> State:
    """Start lost workers again, and choose the newest whole save."""
    for name in state.alive:
        worker = state.of(name)
        holds = worker.holds if worker.progress.at is None else worker.progress.at
        state = state.having(name, holds=holds)
    for name in HAS.keys() - {*state.alive}:
        state = state.having(name, is_alive=True)
    held = [*_in_memory(state), *_on_disks(state)]
    most = max([state.at, *(h.save[0] for h in held if h.tier == "memory")])
    left = Leftovers(
        held=[h for h in held if h.save[0] <= most],
        needed=ALL,
        saved=state.saved or 0,
        has_asked_store=True,
    )
    save = recovery_decisions.next_save(left)
    if save is None and not state.ever_saved:
        return _anew(state)
    if save is None:
        if state.whole() or not state.lost_disk:
            raise Broken("what is there is taken for lost")
        return replace(state, phase="lost")
    assert save != "ask the store"
    if state.best is not None and save[0] < state.best:
        raise Broken(f"back to {save[0]}, though all of {state.best} was left")
    needs = {w: HAS[w] for w in HAS if state.of(w).progress.at != save[0]}
    recovery_plan.assign(held, save, needs, dict.fromkeys(ALL, 1))
    state = replace(state, commit=None, best=None)
    return replace(state, phase="place", late=frozenset(HAS), save=save)


def _best(state: State) -> int | None:
    """Return the newest step that the survivors have, or can finish, in all layers."""
    steps = {name: state.of(name).steps for name in state.alive}
    newest = max((at for at in steps.values() if at is not None), default=None)
    if newest is None:
        return None
    can_finish = {n for n in steps if state.of(n).has_part and steps[n] == newest - 1}
    have = [HAS[n] for n in steps if steps[n] == newest or n in can_finish]
    return newest if frozenset().union(*have) == ALL else None


def _in_memory(state: State) -> Iterator[PartialSnapshot]:
    for name in state.alive:
        if (at := state.of(name).holds) is not None:
            save = at, _attempt(state, at)
            yield PartialSnapshot(
                worker=name, tier="memory", save=save, leaves=HAS[name]
            )


def _attempt(state: State, at: int) -> str:
    return state.saving[1] if state.saving is not None and state.saving[0] == at else ""


def _on_disks(state: State) -> Iterator[PartialSnapshot]:
    for name, leaves in SAVES.items():
        for save in state.disk(name):
            yield PartialSnapshot(worker=name, tier="disk", save=save, leaves=leaves)


def _anew(state: State) -> State:
    """Return all workers to the initial state: nothing was ever saved."""
    for name in HAS:
        progress = duties.done(Progress(), schema.Initialise(seed=0))
        state = state.having(name, progress=progress, steps=0, holds=None)
    return replace(state, phase="between", at=0, saving=None)


def _place(state: State) -> Iterator[State]:
    """Let each late worker replace its state by the collected one."""
    assert state.save is not None
    step = state.save[0]
    if not state.late:
        if len(state.alive) == len(HAS):
            is_due = step > state.at
            yield replace(state, phase="between", at=step, is_due=is_due, save=None)
        else:
            yield replace(state, phase="reached")
    for name in state.late:
        worker, request = state.of(name), schema.PlaceState(step=step)
        steps = worker.steps if worker.progress.at == step else step
        progress = duties.done(worker.progress, request)
        found = state.having(
            name, progress=progress, steps=steps, holds=None, has_part=False
        )
        yield replace(found, late=state.late - {name})


# --- checkpoints


def _saving(state: State) -> State:
    save = state.at, f"{state.attempts:02d}"
    for name in SAVES:
        if state.of(name).steps != state.at:
            raise Broken(f"{name} saves another step")
        state = state.having(name, writing=save)
    return replace(state, saving=save, attempts=state.attempts + 1)


def _heard_of_saving(state: State) -> State:
    """Note that the step is saved once all have their parts of one attempt."""
    if state.saving is None or not is_saved(state):
        return state
    if state.saving not in state.whole():
        raise Broken(f"step {state.saving[0]} is said to be saved, and is not")
    return replace(state, saved=state.saving[0], ever_saved=True)


def is_saved(state: State) -> bool:
    """Whether the save is complete, as `Controller._savers` decides it."""
    return all(state.of(name).newest == state.saving for name in SAVES)


_PHASES = {
    "between": _between,
    "step": _step,
    "reached": _reached,
    "finish": _finish,
    "place": _place,
}


def check(state: State) -> None:
    """Raise Broken if a worker's report about its state is false."""
    for name in state.alive:
        worker = state.of(name)
        if worker.steps != worker.progress.at:
            said = f"says {worker.progress.at}, and has taken {worker.steps} steps"
            raise Broken(f"{name} {said}")


@dataclass(frozen=True)
class Explored:
    """How many states there are, and how the runs end."""

    num_states: int
    num_moves: int
    ends: Mapping[str, int] = field(default_factory=dict)


def explore() -> Explored:
    """Visit all states. Raises Broken at the first invalid one.

    A state is invalid, too, if the run has not ended and only a loss can follow.
    """
    first = State()
    seen, front, num_moves = {first}, [first], 0
    ends: dict[str, int] = {}
    while front:
        following: list[State] = []
        for state in front:
            check(state)
            after = [*moves(state)]
            num_moves += len(after)
            if state.phase in ("done", "lost"):
                ends[state.phase] = ends.get(state.phase, 0) + 1
            elif not [found for found in after if found.losses == state.losses]:
                raise Broken(f"nothing follows: {state}")
            for found in after:
                if found not in seen:
                    seen.add(found)
                    following.append(found)
        front = following
    return Explored(len(seen), num_moves, ends)


if __name__ == "__main__":
    print(explore())
