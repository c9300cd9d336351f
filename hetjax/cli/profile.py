# SPDX-License-Identifier: Apache-2.0
"""The command `profile`: measures the model of a preset.

Owns its options, its help and its errors. Does not own the choice of measurements
(`training/settings/presets.py`) nor the measuring (`hetjax/profiling/`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from hetjax.cli.command import check_inputs, main_of
from hetjax.cli.options.options import (
    HELP,
    nothing_given,
    parse_options,
    preset_first,
    preset_lines,
    preset_usage,
)
from hetjax.files.reading import read_text
from hetjax.profiling.config import ProfileConfig, check_output
from hetjax.report.progress import working
from hetjax.training.settings.presets import profile_config

_PROGRAM = "python -m hetjax.profile"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ProfileConfig):
    """The options of `profile`."""

    sailor: Path | None = None
    """File of Sailor's layer times of the model on one kind of device, to write into
    the profile instead of measuring. It needs --device."""
    device: str | None = None
    """The kind of device of the --sailor file, by its name in the catalogue."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the profile as one JSON object instead of the table."""


def profile(arguments: Sequence[str]) -> None:
    """Measure as the arguments say; print and write the result."""
    name, options = parse(arguments)
    check_output(options)
    kept = options.output if options.output.exists() else None
    check_inputs(cluster=options.cluster, profile=kept)
    if options.sailor is not None:
        read_text(options.sailor, what="Sailor file")
    with working("starting"):  # JAX takes seconds to import
        from hetjax.api.profiling import measure_profile
    config = asdict(options)
    as_json = config.pop("json")
    # with --json, standard output has nothing but JSON
    measured = measure_profile(name, **config, quiet=as_json)
    if as_json:
        print(measured.json(), end="")
    elif options.sailor is not None:
        print(measured)
        print(f"profile written to {options.output}")
    else:
        for line in measured.how_sure:  # the table is already printed
            print(line)


def parse(arguments: Sequence[str]) -> tuple[str, ProfileOptions]:
    """Return the preset's name and what to measure of it.

    Raises BadInput for an unknown preset or option and for a value of the wrong type,
    SystemExit after it has printed help.
    """
    if not arguments:
        raise nothing_given(
            _PROGRAM, got="no preset to profile", allowed=preset_usage(_PROGRAM)
        )
    if arguments[0] in HELP:
        print(_help())
        raise SystemExit(0)
    name, chosen, rest = preset_first(arguments, program=_PROGRAM)
    options = parse_options(
        ProfileOptions(**asdict(profile_config(chosen))),
        rest,
        program=f"{_PROGRAM} {name}",
        description=chosen.summary,
    )
    return name, options


def _help() -> str:
    """Return what is measured and why, and the presets."""
    return f"""usage: {_PROGRAM} PRESET [options]

Time the layers of a preset's model on the devices that are here, and the
links between them, and write a profile for `plan` and `simulate`.

Only layers that differ are timed (embedding, one block of each kind,
head), a layer at a time: a model that does not fit can be measured.
The same command again measures what the file does not have yet.

presets:
{preset_lines()}

examples:
  {_PROGRAM} tiny
  {_PROGRAM} llama-1b --microbatch-sizes 1,2,4 --tensor 1,2 \\
      --remat none,full --output llama-1b.json

  {_PROGRAM} opt-350m.toml --sailor A100-40.json \\
      --device A100-SXM4-40GB --seq-len 2048

{_PROGRAM} PRESET --help lists the options and their values.
Exit codes: 0 done, 1 failed, 2 bad input."""


main = main_of(profile, "measures what is missing")
