# SPDX-License-Identifier: Apache-2.0
"""Checkpoints damaged on workers' disks: only what was saved is restored.

`python -m experiments.recovery.damage` is the longer run.
"""

import random
from collections.abc import Iterator

import pytest

from experiments.recovery.damage import NEWEST, OLDER, Case, Lab, lab, random_case, run
from experiments.recovery.disks import KINDS, Kind
from tests.training.test_workers import set_environment

FLIP = Kind(target="chunk", action="flip")
CASES = {
    "a flipped chunk, the store not yet asked": (
        Case(kind=FLIP, beside="store", hurt={NEWEST: ["north"]}),
        "from the store",
    ),
    "a flipped chunk that another worker has in memory": (
        Case(kind=FLIP, beside="memory", hurt={NEWEST: ["north"]}),
        "from a peer",
    ),
    "a flipped chunk of which there is nothing else": (
        Case(kind=FLIP, beside="nothing", hurt={NEWEST: ["east"]}),
        "older step",
    ),
    "both steps with a flipped chunk": (
        Case(kind=FLIP, beside="nothing", hurt={OLDER: ["east"], NEWEST: ["south"]}),
        "refused",
    ),
    "the newest step without a trace on any disk": (
        Case(
            kind=Kind(target="part", action="remove"),
            beside="store",
            hurt={NEWEST: ["east", "north", "south", "west"]},
        ),
        "from the store",
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        with lab(tmp_path_factory.mktemp("lab")) as found:
            yield found


@pytest.mark.filterwarnings("ignore")  # each detected damage gives a warning
@pytest.mark.parametrize("name", CASES)
def test_damage_is_made_good_from_the_nearest_place_left(built: Lab, name: str):
    case, outcome = CASES[name]
    assert run(built, case, random.Random(0)) == (outcome, [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_whatever_is_done_to_files_no_wrong_bit_is_restored(built: Lab, number: int):
    random_ = random.Random(number)
    case = random_case(number, built.savers, random_)
    assert run(built, case, random_)[1] == [], case
