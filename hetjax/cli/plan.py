# SPDX-License-Identifier: Apache-2.0
"""The command `plan`: finds the best plan for a model on a cluster.

Owns its options and its help, and the files that it writes. Does not own the choices
(`api/plan_config.py`), the search (`api/planning.py`) nor the display (`report/`).
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from hetjax.api.plan_config import PlanConfig, plan_config
from hetjax.cli.command import (
    check_devices,
    check_inputs,
    check_outputs,
    main_of,
    print_result,
    write_outputs,
)
from hetjax.cli.options.options import (
    nothing_given,
    parse_options,
    preset_first,
    preset_lines,
)
from hetjax.plans.plan_files import write_plan
from hetjax.report.progress import working

if TYPE_CHECKING:
    from hetjax.report.found import Ended, FoundPlan

_PROGRAM = "python -m hetjax.plan"
_COMMON = (
    *("model", "cluster", "global_batch", "seq_len", "profile", "objective"),
    *("search_s", "output", "report", "json"),
)
_ENDED: "dict[Ended, str]" = {
    "interrupted": "ended by Ctrl-C",
    "search_s": "ended after --search-s",
    "search_work": "ended after --search-work",
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanConfig):
    """The options of `plan`."""

    model: str | None = None
    """The model: a preset; a Hugging Face folder or config.json; or a function that
    returns a model, package.module:function."""
    cluster: Path | None = None
    """Cluster file, or lab, office or tiny; None: the preset's cluster, or the devices
    found here."""
    profile: Path | None = None
    """Measured times, from python -m hetjax.profile; None: estimate the times."""
    compiled: Path | None = None
    """Memory that the compiler reported for a run, its compiled.json; None: estimate
    it."""
    calibration: Annotated[str | None, tyro.conf.arg(metavar="none|FILE")] = None
    """Measured speeds: a run's calibration.json, or the output of NCCL-tests. none:
    speeds as modelled. By default, what earlier runs measured."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """The plan that runs now; also count the state that has to move to the new plan."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=("--out",))] = None
    """Write the plan here, with its prediction."""
    report: Path | None = None
    """Write an HTML page about the plan here."""
    plot: Path | None = None
    """Draw the layout here: .png, .pdf or .svg."""
    allow_model_code: str | None = None
    """Function, package.module:function, that may be called if the plan file names it
    as the model; no other function is called."""
    json: bool = False
    """Print one JSON object instead of tables."""


def plan(arguments: Sequence[str]) -> None:
    """Plan as the arguments say; print and write the results.

    Raises BadInput before anything is written, NoFeasiblePlan if nothing fits.
    """
    preset, options = parse(arguments)
    check_outputs(options, "output", "plot", "report")
    check_inputs(
        cluster=options.cluster,
        plan=options.from_,
        profile=options.profile,
        calibration=options.calibration,
        model=options.model,
    )
    check_devices(options.cluster)
    with working("starting", quiet=options.json):  # JAX and solvers take seconds
        from hetjax.api.planning import find_plan
    found = find_plan(
        preset,
        model=options.model,
        cluster=options.cluster,
        profile=options.profile,
        compiled=options.compiled,
        calibration=options.calibration,
        allow_model_code=options.allow_model_code,
        current=options.from_,
        quiet=options.json,
        **{field.name: getattr(options, field.name) for field in fields(PlanConfig)},
    )
    command = f"{_PROGRAM} {shlex.join(arguments)}"
    write_outputs(
        options,
        {
            "output": ("plan: {}", lambda path: write_plan(path, found.plan)),
            "plot": ("picture: {}", lambda path: found.draw().save(path)),
            "report": ("report: {}", lambda path: found.write_report(path, command)),
        },
        lambda: _show(found, options.json),
    )
    bound = found.planned.found.bound
    if bound.is_false:
        raise SystemExit(bound.why)


def _show(found: "FoundPlan", as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.values(), allow_nan=False))
        return
    print_result(found)
    if found.ended is not None:
        print(f"{_ENDED[found.ended]}: the best plan so far{_again(found)}")


def _again(found: "FoundPlan") -> str:
    """Return the option that gives the same plan again, on any machine."""
    if found.ended != "search_s" or not found.search_work:
        return ""
    return f"; --search-work {','.join(map(str, found.search_work))} finds it again"


def parse(arguments: Sequence[str]) -> tuple[str | None, PlanOptions]:
    """Return the name of the preset with the defaults, if any, and the options.

    Raises BadInput for an unknown preset or option and for a value of the wrong type,
    SystemExit after it has printed help.
    """
    if not arguments:
        raise nothing_given(
            _PROGRAM,
            got="nothing to plan",
            allowed=f"{_PROGRAM} PRESET [options], or {_PROGRAM} --cluster FILE "
            "--model NAME --global-batch N --seq-len S",
        )
    name, rest, program = None, list(arguments), _PROGRAM
    default, description = PlanOptions(), _help()
    if not arguments[0].startswith("-"):
        name, preset, rest = preset_first(arguments, program=_PROGRAM)
        config = plan_config(preset)
        asked = {of.name: getattr(config, of.name) for of in fields(PlanConfig)}
        default = PlanOptions(model=preset.config.model, **asked)
        program, description = f"{_PROGRAM} {name}", f"{preset.summary}\n\n{_help()}"
    flags = (tyro.conf.FlagCreatePairsOff,)
    return name, parse_options(
        default,
        rest,
        program=program,
        description=description,
        markers=flags,
        common=_COMMON,
    )


def _help() -> str:
    return f"""Find the best plan for a cluster, and how much better any could be.

Plans are judged by simulating the programs that training would run. Times come from a
measured profile, or are estimated from what the devices can do.

presets:
{preset_lines()}

examples:
  {_PROGRAM} tiny
  {_PROGRAM} --cluster lab --model llama-1b --global-batch 128
      --seq-len 2048 --output plan.json --report plan.html
  {_PROGRAM} llama-1b --cluster lab --objective cost
      --deadline-hours 240 --tokens 20e9
  {_PROGRAM} --cluster lab --model llama3-8b --lora.rank 16
      --global-batch 32 --seq-len 2048
  {_PROGRAM} --cluster left.toml --from plan.json --output next.json

On up to 64 devices, the plans of other planners are compared, too (--compare); if one
of them is better, the search continues from it, and says so.
Exit codes: 0 done, 1 interrupted before there was a plan, 2 bad input,
3 no plan fits."""


main = main_of(plan)
