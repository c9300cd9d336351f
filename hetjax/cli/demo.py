# SPDX-License-Identifier: Apache-2.0
"""The command `demo`: races planners on a small cluster of unlike cards.

Owns its options and its help, and the files that it writes. Does not own the race
(`api/racing.py`) nor its display (`report/race/race_view.py`).
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from hetjax.cli.command import (
    check_devices,
    check_inputs,
    check_outputs,
    main_of,
    write_outputs,
)
from hetjax.cli.options.options import parse_options
from hetjax.cluster.cluster_files import load_cluster
from hetjax.errors import BadInput
from hetjax.report.progress import is_quiet
from hetjax.report.race.race_view import LiveView, PlainView, race_view
from hetjax.training.settings.checks import option

if TYPE_CHECKING:  # JAX and solvers take seconds
    from hetjax.report.race.race import Race

_PROGRAM = "python -m hetjax.demo"
_PICTURE = "demo.png"
_SECONDS = {"search_s": (1.0, 3_600.0), "seconds": (0.0, 60.0)}
_HELP = """Race planners on a small cluster of unlike cards, in simulated time.

An even split, the fastest kind of card alone, the planners of published papers and
hetjax each plan the same training. One simulator judges all plans: lanes fill with the
tokens of an hour of training. Needs no accelerator, and takes about a minute.

The default: Llama 1B on three workstations with ten cards of three generations:
  python -m hetjax.demo

Your own machines, and the plans to look at:
  python -m hetjax.demo --cluster mine.toml --output plans
  python -m hetjax.simulate plans/hetjax.json --cluster mine.toml

Exit codes: 0 done, 1 interrupted, 2 bad input, 3 no planner has a plan that fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The options of `demo`."""

    cluster: Path = Path("office")
    """Cluster file, or lab, office or tiny."""
    model: str = "llama-1b"
    """Name of a model preset."""
    global_batch: int = 64
    """Sequences per step, over all replicas."""
    seq_len: int = 2_048
    """Tokens per sequence."""
    search_s: float | None = None
    """Seconds for all planners together; a planner that is not done by then has no
    plan."""
    seconds: float = 5.0
    """Seconds that the race takes on a terminal."""
    plot: Path | None = None
    """Draw tokens/s and hetjax's plan here: .png, .pdf or .svg; None: demo.png."""
    output: Path | None = None
    """Write the plans of the race to this folder."""
    json: bool = False
    """Print one JSON object instead of the race."""


def demo(arguments: Sequence[str]) -> None:
    """Race as the arguments say; show the race, print and draw its result.

    Raises BadInput before anything is planned, NoFeasiblePlan if no planner has a plan.
    """
    options = parse(arguments)
    _check_seconds(options)
    check_outputs(options, "plot", "output")
    _check_folder(options.output)
    check_inputs(cluster=options.cluster, model=options.model)
    check_devices(options.cluster)
    with ExitStack() as screen:
        quiet = options.json or is_quiet()
        view = screen.enter_context(race_view(_title(options), quiet=quiet))
        from hetjax.api.racing import race_planners  # JAX and solvers take seconds

        race = race_planners(
            model=options.model,
            cluster=options.cluster,
            global_batch=options.global_batch,
            seq_len=options.seq_len,
            search_s=options.search_s,
            view=view,
        )
        write_outputs(
            options,
            {
                "output": ("plans: {}", race.write_plans),
                "plot": ("picture: {}", lambda path: race.draw().save(path)),
            },
            lambda: _show(race, view, options, screen),
        )
    if options.plot is None and not options.json:
        _draw_here(race)


def _show(
    race: "Race",
    view: PlainView | LiveView,
    options: DemoOptions,
    screen: ExitStack,
) -> None:
    """Show the result of the race, and free the screen for the lines printed below."""
    if options.json:
        print(json.dumps(race.values(), allow_nan=False))
    else:
        view.show(race, options.seconds)
    screen.close()


def parse(arguments: Sequence[str]) -> DemoOptions:
    """Return the options. Raises BadInput for invalid ones, SystemExit after help."""
    return parse_options(
        DemoOptions(),
        arguments,
        program=_PROGRAM,
        description=_HELP,
        markers=(tyro.conf.FlagCreatePairsOff,),
    )


def _check_seconds(options: DemoOptions) -> None:
    """Raise BadInput for times outside the allowed ranges."""
    for name, allowed in _SECONDS.items():
        (least, most), seconds = allowed, getattr(options, name)
        if seconds is not None and not least <= seconds <= most:
            raise BadInput(
                got=f"{option(name)} {seconds:g}",
                allowed=f"{least:g} to {most:g} seconds",
                fix=f"leave {option(name)} out",
            )


def _check_folder(output: Path | None) -> None:
    """Raise BadInput if the folder for plans is a file."""
    if output is not None and output.exists() and not output.is_dir():
        raise BadInput(
            got=f"--output {output}, which is a file",
            allowed="a folder, or a path where one can be made",
            fix="give another --output",
        )


def _title(options: DemoOptions) -> str:
    cluster = load_cluster(options.cluster)
    nodes = (f"  {node.name}: {node.count} x {node.device}" for node in cluster.nodes)
    return "\n".join(
        [
            f"{options.model} on cluster {cluster.name}, {cluster.num_devices} devices",
            *nodes,
        ]
    )


def _draw_here(race: "Race") -> None:
    """Draw the default picture, or say what it needs."""
    if find_spec("matplotlib") is None:
        print("for a picture of this: pip install 'hetjax[plot]'")
        return
    try:
        race.draw().save(_PICTURE)
    except OSError as error:
        print(f"no picture: {error}; --plot FILE draws it elsewhere")
    else:
        print(f"picture: {_PICTURE}")


main = main_of(demo)
