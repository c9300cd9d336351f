# SPDX-License-Identifier: Apache-2.0
"""The options of `plan`: with a preset's name before them, or alone.

Owns the options, their defaults and the help. Does not own what they mean together
(`plan_request.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hetjax.errors import BadInput
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.planner.model.request import REMATS
from hetjax.planner.search.comparison import MOST_COMPARED, Questions
from hetjax.training.options import (
    Integers,
    Names,
    Remats,
    parse_options,
    preset_first,
    preset_lines,
)
from hetjax.training.presets import Preset

PROGRAM = "python -m hetjax.plan"
_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The options of `plan`."""

    model: str | None = None
    """Name of a model preset."""
    global_batch: int | None = None
    """Sequences per step, over all replicas."""
    seq_len: int | None = None
    """Tokens per sequence."""
    cluster: Path | None = None
    """Cluster file, or lab or tiny; else the preset's, else the devices here."""
    profile: Path | None = None
    """Measured times, from python -m hetjax.profile; else times are estimated."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What is computed in; else the profile's, the preset's, or bfloat16."""
    objective: Wish = "time"
    """What is to be best: step time, USD per million tokens (cost), or progress while
    spot nodes vanish (goodput)."""
    max_usd_per_hour: float | None = None
    """The nodes in use may not cost more than this; each is rented whole."""
    deadline_hours: float | None = None
    """The plan has to get through --tokens in this time."""
    tokens: float | None = None
    """How many tokens --deadline-hours is for, as in 300e9."""
    recovery_s: float = Objective().recovery_s
    """Of goodput: from a lost node to the next step."""
    checkpoint_every_s: float = Objective().checkpoint_every_s
    """Of goodput: from checkpoint to checkpoint, half of which is lost with a node that
    alone held some layer."""
    node_back_s: float = Objective().node_back_s
    """Of goodput: from a lost node until it is back, or another in its place."""
    microbatch_sizes: Integers = _SIZES
    """Sequences per microbatch that are tried, before the split over data."""
    tensor: Integers = _SIZES
    """Tensor-parallel degrees that are tried, where model and nodes allow them."""
    remat: Remats = REMATS
    """What backward passes may compute again."""
    unequal_tensor: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let every stage have a tensor degree of its own."""
    compare: Names | None = None
    """Planners to compare with: names, or `none`; all where there are up to 64
    devices, or if no name follows."""
    pareto: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the best plans by time, by cost and by goodput."""
    what_if: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show what a node more of each kind brings, and what one fewer costs."""
    search_s: float | None = None
    """End with the best found by then, all that is asked included; otherwise where the
    search has nothing more to try, local search after 5 s. Ctrl-C ends it at any time,
    with the best so far."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """The plan that runs now: count what has to move to another."""
    horizon_s: float = Questions().horizon_s
    """Of --from: the time in which a move has to pay."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=("--out",))] = None
    """Write the plan here, the prediction in it."""
    report: Path | None = None
    """Write one page of HTML about the plan here."""
    plot: Path | None = None
    """Draw the layout here: .png, .pdf or .svg."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object in place of tables."""


def parse(arguments: Sequence[str]) -> tuple[PlanOptions, Preset | None]:
    """Return the options, and the preset that their defaults are from, if any.

    BadInput for an unknown preset or option and for a value of the wrong type.
    SystemExit after help, which is printed.
    """
    if not arguments:
        raise BadInput(
            got="nothing to plan",
            allowed=f"{PROGRAM} PRESET [options], or {PROGRAM} --cluster FILE --model "
            "NAME --global-batch N --seq-len S",
            fix=f"{PROGRAM} tiny, say; {PROGRAM} --help tells more",
        )
    if arguments[0].startswith("-"):
        default = PlanOptions()
        return parse_options(
            default, arguments, program=PROGRAM, description=_help()
        ), None
    name, preset, rest = preset_first(arguments, program=PROGRAM)
    config = preset.config
    default = PlanOptions(
        model=config.model,
        global_batch=config.global_batch,
        seq_len=config.seq_len,
        microbatch_sizes=tuple(sorted({*_SIZES, config.microbatch_size})),
    )
    description = f"{preset.summary}\n\n{_help()}"
    options = parse_options(
        default, rest, program=f"{PROGRAM} {name}", description=description
    )
    return options, preset


def _help() -> str:
    return f"""Find the best plan for a cluster, and how much better any could be.

Plans are judged by simulating the programs that training would run. Times come from a
measured profile, or are estimated from what the devices can do.

presets:
{chr(10).join(preset_lines())}

examples:
  {PROGRAM} tiny
  {PROGRAM} --cluster lab --model llama-1b --global-batch 128
      --seq-len 2048 --output plan.json --report plan.html
  {PROGRAM} llama-1b --cluster lab --objective cost
      --deadline-hours 240 --tokens 20e9
  {PROGRAM} --cluster left.toml --from plan.json --output next.json

Baselines are planned too, and compared, on up to {MOST_COMPARED} devices (--compare);
the search goes on from theirs where they are better, and says so.
Exit codes: 0 done, 1 interrupted before there was a plan, 2 bad input,
3 no plan fits."""
