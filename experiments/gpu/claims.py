# SPDX-License-Identifier: Apache-2.0
"""Lists what README and documentation claim of cards, and the row that decides each.

Owns the list. A claim names its row by part and words; tests check that each part still
has that row.
"""

from collections.abc import Callable
from dataclasses import dataclass

from experiments.gpu.rows import Row

Verdict = Callable[[Row], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim's `text` and place (`where`), and the row and rule that decide it."""

    text: str
    where: str
    part: str
    what: str
    holds: Verdict


def at_least(bound: float) -> Verdict:
    """Return a rule: the measured figure is a number and at least `bound`."""
    return lambda row: _is_number(row.measured) and row.measured >= bound  # pyright: ignore


def at_most(bound: float) -> Verdict:
    """Return a rule: the measured figure is a number and at most `bound`."""
    return lambda row: _is_number(row.measured) and row.measured <= bound  # pyright: ignore


def near(share: float) -> Verdict:
    """Return a rule: measured and predicted differ by no more than this share."""
    return lambda row: row.ratio is not None and abs(row.ratio - 1) <= share


def is_so(row: Row) -> bool:
    """Return whether the row's answer is yes."""
    return row.measured is True


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


_ROOFLINE = "hetjax/costs/roofline.py"
_PRIORS = (
    Claim(
        text="attention by a kernel is as fast as costs count on (545 TFLOP/s of an "
        "H100, at heads of 128), within a fifth",
        where=_ROOFLINE,
        part="priors",
        what="attention of the longest sequence, heads of 128, both passes",
        holds=near(0.2),
    ),
    Claim(
        text="products reach the share of the peak that costs count on, within a tenth",
        where=_ROOFLINE,
        part="priors",
        what="constant matmul_efficiency",
        holds=near(0.1),
    ),
    Claim(
        text="copies reach 0.8 of the bandwidth of the data sheet, within a tenth",
        where="docs/doctor.md",
        part="priors",
        what="constant memory_efficiency",
        holds=near(0.1),
    ),
    Claim(
        text="the link between a device and its host moves at least 12 GB/s",
        where="docs/train.md",
        part="priors",
        what="device to host by way of pinned memory",
        holds=at_least(12.0),
    ),
)

_MEMORY = (
    Claim(
        text="a worker starts with 92 % of a GPU's memory",
        where="docs/many-machines.md",
        part="memory",
        what="a process starts with 92% of the memory",
        holds=is_so,
    ),
    Claim(
        text="a plan may fill 90 % of a GPU's memory",
        where="docs/many-machines.md",
        part="memory",
        what="a process holds what plans may fill",
        holds=is_so,
    ),
    Claim(
        text="no stage needs 2 % more memory than is predicted for it",
        where="docs/how/compiled.md",
        part="memory",
        what="peak of memory over the prediction, the highest",
        holds=at_most(1.02),
    ),
)

_TRANSPORTS = (
    Claim(
        text="sockets carry arrays between the workers of two cards",
        where="docs/many-machines.md",
        part="transports",
        what="sockets between two processes: what is sent arrives",
        holds=is_so,
    ),
    Claim(
        text="--transport transfer carries arrays from one process's card to another's",
        where="docs/many-machines.md",
        part="transports",
        what="jax.experimental.transfer between two processes: what is sent arrives",
        holds=is_so,
    ),
)

_RUNS = (
    Claim(
        text="where JAX finds a card, `hetjax train` runs on it",
        where="docs/start.md",
        part="runs",
        what="hetjax train runs, and its loss falls",
        holds=is_so,
    ),
    Claim(
        text="CPU devices show that results are right: losses on a card are the same",
        where="README.md",
        part="runs",
        what="losses in float32 are the CPU's within rounding",
        holds=is_so,
    ),
    Claim(
        text="a run without a cluster file has the devices of this machine",
        where="docs/machines.md",
        part="runs",
        what="discovery finds the devices that JAX has",
        holds=is_so,
    ),
    Claim(
        text="plans fill less of a card than JAX takes",
        where="docs/many-machines.md",
        part="runs",
        what="memory of a plan is within JAX's limit",
        holds=is_so,
    ),
    Claim(
        text="`hetjax doctor` ends with 0 where nothing is wrong",
        where="docs/doctor.md",
        part="runs",
        what="exit code of hetjax doctor",
        holds=at_most(0),
    ),
)

_SPEED = (
    Claim(
        text="a step through hetjax reaches 0.97 of the rate of one plain jit",
        where="docs/how/cards.md",
        part="speed",
        what="rate of hetjax over one plain jit",
        holds=at_least(0.97),
    ),
    Claim(
        text="hetjax is at least as fast as PyTorch with torch.compile",
        where="docs/how/cards.md",
        part="speed",
        what="rate of hetjax over PyTorch",
        holds=at_least(1.0),
    ),
)

_ISLANDS = (
    Claim(
        text="every plan gives the gradients of one jit, up to rounding",
        where="README.md",
        part="islands",
        what="gradients of both kinds in one pipeline, furthest from the CPU's",
        holds=at_most(1e-4),
    ),
    Claim(
        text="a card and the CPU of its machine can train together",
        where="docs/faq.md",
        part="islands",
        what="a run on workers of both kinds ends, and its loss falls",
        holds=is_so,
    ),
    *(
        Claim(
            text=f"when a worker dies, the run goes on: {worker}",
            where="docs/survive.md",
            part="islands",
            what=f"recovers when the {worker} is killed",
            holds=is_so,
        )
        for worker in ("CPU's worker", "card's worker")
    ),
    *(
        Claim(
            text=f"losses have the same bits as without a loss: {worker}",
            where="docs/survive.md",
            part="islands",
            what=f"losses are those of an undisturbed run when the {worker} is killed",
            holds=is_so,
        )
        for worker in ("CPU's worker", "card's worker")
    ),
)

_UNEQUAL = (
    Claim(
        text="unlike devices get as much work as each can do: no slower than an even "
        "split, nor than the faster one alone",
        where="docs/faq.md",
        part="unequal",
        what="gain of the planner's layout over the better of the other two",
        holds=at_least(1.0),
    ),
    Claim(
        text="a plan by measured times takes as long as predicted, within a tenth",
        where="docs/figures.md",
        part="unequal",
        what="step of the planner's layout",
        holds=near(0.1),
    ),
)

_BITS = (
    Claim(
        text="an update gives the same bits on devices of one kind",
        where="docs/survive.md",
        part="bits",
        what="an update in another process: equal to the bit",
        holds=is_so,
    ),
    Claim(
        text="with --deterministic a step gives the same bits again",
        where="docs/survive.md",
        part="bits",
        what="a step in another process, deterministic: equal to the bit",
        holds=is_so,
    ),
)

_METHODS = (
    Claim(
        text="a stopped run continues with the same command, as if nothing had been",
        where="docs/train.md",
        part="methods",
        what="a run that was stopped and resumed: losses of one that was not",
        holds=is_so,
    ),
    Claim(
        text="QLoRA trains over frozen weights in four bits",
        where="docs/train.md",
        part="methods",
        what="QLoRA (NF4): runs",
        holds=is_so,
    ),
    Claim(
        text="cards without bfloat16 train in float16 with a scaled loss",
        where="README.md",
        part="methods",
        what="float16 with loss scaling: runs",
        holds=is_so,
    ),
    Claim(
        text="updates on the host take the time that plans count, within a half",
        where="docs/train.md",
        part="methods",
        what="optimizer on the host: step",
        holds=near(0.5),
    ),
)

CLAIMS: tuple[Claim, ...] = (
    *_RUNS,
    *_SPEED,
    *_BITS,
    *_ISLANDS,
    *_UNEQUAL,
    *_MEMORY,
    *_PRIORS,
    *_TRANSPORTS,
    *_METHODS,
)
