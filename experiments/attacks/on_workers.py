# SPDX-License-Identifier: Apache-2.0
"""Attacks worker processes: they hang, are killed, and the run is asked to stop.

Does not own how a worker is made to hang or die (`victim.py`).
"""

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from experiments.attacks.attack import Attack, Outcome, unless
from experiments.attacks.runs import DONE, STOPPED, Run, run_in, unharmed
from experiments.attacks.victim import LIMIT_S
from experiments.recovery.kills import recoveries
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import LIMITS, AnyRequest
from hetjax.training.recovery.notice_sources import GRACE_S

# Requests at which a worker hangs: at the start, and by the step after which the attack
# begins, at most two for one step.
_AT_THE_START = (schema.Build, schema.Compile)
_HANGS = {
    2: (schema.Train, schema.PlaceState),
    4: (schema.SaveState, schema.CollectLeaves),
    6: (schema.AwaitSaved,),
}
_HUNG_S = 30.0  # instead of minutes or hours
_EVERY_STEP = ("--checkpoint.every", "1")
_SLACK_S = 5.0  # for other work on the machine
_NUM_RUNS, _KILLS, _PAUSE_S = 2, 2, (0.5, 8.0)


def _same(run: Run, folder: Path) -> bool:
    return run.losses == unharmed(folder)


def _hang(kind: type[AnyRequest]) -> str:
    return f"hang-{kind.__name__}"


def hangs(folder: Path) -> Outcome:
    run = run_in(folder)
    run.attack(*map(_hang, _AT_THE_START))
    with run.going(*_EVERY_STEP, env={LIMIT_S: str(_HUNG_S)}) as going:
        for step, kinds in _HANGS.items():
            run.wait_until(going, run.has_done(step))
            run.attack(*map(_hang, kinds))
        code = going.wait()
    kinds = [*_AT_THE_START, *(kind for some in _HANGS.values() for kind in some)]
    told = [LIMITS[kind].what for kind in kinds]
    seen = [what for what in told if f"{_HUNG_S:g} s to {what}" in run.logs]
    stacks = run.logs.count(" in hang\n")
    wrong = unless(
        it_goes_on=code == DONE,
        each_hang_is_noticed=seen == told,
        each_has_said_where_it_was=stacks == len(kinds),
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
        no_worker_is_left=run.is_left_alone(),
    )
    happened = f"{len(seen)} of {len(told)} noticed, {stacks} stacks, exit code {code}"
    return Outcome(happened=happened, wrong=wrong)


def losses_at_the_start(folder: Path) -> Outcome:
    run, step = run_in(folder), 2
    run.attack("die-Build", "die-Compile")
    with run.going(*_EVERY_STEP) as going:
        run.wait_until(going, run.has_done(step))
        run.attack("die-CollectLeaves")
        with suppress(KeyError, ProcessLookupError):
            run.kill("right")
        code = going.wait()
    num_left = len([*run.attacks.iterdir()])
    wrong = unless(
        it_goes_on=code == DONE,
        all_have_died=num_left == 0,
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    return Outcome(happened=f"four losses, exit code {code}", wrong=wrong)


def stop_while_recovering(folder: Path) -> Outcome:
    run, step = run_in(folder), 2
    with run.going(*_EVERY_STEP) as going:
        run.wait_until(going, run.has_done(step))
        run.attack("hang-Build")  # the replacement hangs, and has a limit of one hour
        run.kill("right")
        hung = run.attacks / "hang-Build"
        run.wait_until(going, lambda: not hung.exists())
        told_s = time.monotonic()
        going.send_signal(signal.SIGTERM)
        code = going.wait()
        took_s = time.monotonic() - told_s
    after = run.ended(*_EVERY_STEP)
    wrong = unless(
        it_ends_in_time=took_s < GRACE_S + _SLACK_S,
        its_state_is_saved=code == STOPPED,
        the_next_start_goes_on=after == DONE,
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    happened = f"ended after {took_s:.1f} s with code {code}, then {after}"
    return Outcome(happened=happened, wrong=wrong, seconds=round(took_s, 1))


def exit_codes(folder: Path) -> Outcome:
    """Check exit codes of runs whose workers are killed at random moments."""
    codes, num_recoveries, are_same = list[int](), 0, True
    for number in range(_NUM_RUNS):
        run = run_in(folder, number)
        chance = random.Random(f"F16 {number}")
        with run.going(*_EVERY_STEP) as going:
            run.wait_until(going, run.has_done(1))
            for _ in range(_KILLS):
                time.sleep(chance.uniform(*_PAUSE_S))
                with suppress(KeyError, ProcessLookupError):
                    run.kill(chance.choice(("left", "right")))
            codes.append(going.wait())
        num_recoveries += len(recoveries(run.run_dir))
        are_same &= _same(run, folder)
    wrong = unless(
        all_codes_are_0=codes == [DONE] * _NUM_RUNS,
        the_losses_are_those_of_an_unharmed_run=are_same,
    )
    happened = f"exit codes {codes} with {num_recoveries} recoveries"
    return Outcome(happened=happened, wrong=wrong)


WORKING = (
    Attack(
        finding="F3",
        done="a worker hangs as it builds, compiles, trains, saves, gives its state, "
        "puts it in place and finishes a save (30 s for each)",
        expected="each is noticed, says where it was, and is replaced; the same losses",
        act=hangs,
    ),
    Attack(
        finding="F9",
        done="workers die as they build, compile, train and restore",
        expected="each is started again, and the same losses",
        act=losses_at_the_start,
    ),
    Attack(
        finding="F15",
        done="SIGTERM while a lost worker's successor hangs",
        expected="over within the 30 s of the notice, exit code 4; the same losses",
        act=stop_while_recovering,
    ),
    Attack(
        finding="F16",
        done="workers of two runs are killed at moments of chance, twice each",
        expected="exit code 0, and the same losses",
        act=exit_codes,
    ),
)
