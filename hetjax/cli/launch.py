# SPDX-License-Identifier: Apache-2.0
"""The command `launch`: starts a run on a Slurm cluster, or on hosts by ssh.

Owns its options and messages. Does not own the job's script
(`launchers/slurm/job_script.py`), hosts (`cluster/hosts.py`), nor the run (`train.py`).
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hetjax.cli import train
from hetjax.cli.command import main_of, write_file
from hetjax.cli.options.options import HELP, parse_options
from hetjax.cluster.cluster_files import load_cluster
from hetjax.cluster.hosts import load_hosts
from hetjax.cluster.slurm_nodes import gpus_of
from hetjax.data.sources.readers import text_files
from hetjax.errors import BadInput
from hetjax.launchers.slurm.job_script import (
    JobTerms,
    gres_types,
    groups_of,
    job_script,
)
from hetjax.launchers.slurm.slurm_commands import slurm_output
from hetjax.training.settings.checks import check_config

_PROGRAM = "python -m hetjax.launch"
_HELP = f"""usage: {_PROGRAM} slurm CLUSTER.toml [options] -- train PRESET [options]
       {_PROGRAM} ssh HOSTS.toml -- train PRESET [options]

Start a run where its machines are.

slurm: write the script of a job that asks for the nodes of a cluster file, show it and
submit it. Before its time limit, or if another job preempts it, the run saves and the
job goes back into the queue.
ssh: start a worker on each host of a file; the run itself is this process.

{_PROGRAM} slurm --help lists the options. Exit codes: as train's for ssh; for slurm 0
submitted, 2 bad input."""
_LIMIT = re.compile(r"\d+(-\d+(:\d+){0,2})?|\d+(:\d+){1,2}")
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=[^\n]*)?")
_EARLY_S = 60
_OWN = {
    "slurm": ("--launcher", "--cluster", "--hosts"),
    "ssh": ("--launcher", "--hosts"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What the job requests, and where to write its script."""

    cluster: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CLUSTER")]
    """Cluster file; the job requests its nodes."""
    time: str = ""
    """Time limit in Slurm's form: minutes, H:MM:SS or D-HH; if empty, the partition's
    limit."""
    notice_s: int = 300
    """Seconds before the time limit at which the run saves; Slurm may be a minute
    early."""
    cpus_per_device: int = 4
    """CPUs for each device."""
    gres: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """The site's name for a device, DEVICE=TYPE; repeat it for each device whose name
    launch cannot find out."""
    sbatch: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A further option of sbatch for all components, without its dashes, account=mine
    for instance; repeat it for more."""
    script: Path | None = None
    """Where to write the script; None: RUN_DIR.slurm.sh, beside the run directory."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write and show the script, but do not submit it."""


def launch(arguments: Sequence[str]) -> int:
    """Start as the arguments say; return 0, or the exit code of `train`."""
    if not arguments:
        print(_HELP)
        return 2
    if arguments[0] in HELP:
        print(_HELP)
        _slurm_options(HELP[:1])  # ends the process
    how, *rest = arguments
    if how not in _OWN:
        raise BadInput(
            got=f"launch {how}",
            allowed=f"{_PROGRAM} slurm or {_PROGRAM} ssh",
            fix=f"{_PROGRAM} --help says more",
        )
    if rest[:1] and rest[0] in HELP and how == "ssh":
        print(_HELP)
        return 0
    own, words = _divided(rest, how)
    return _by_slurm(own, words) if how == "slurm" else _by_ssh(own, words)


def _divided(given: Sequence[str], how: str) -> tuple[list[str], list[str]]:
    """Return the words before `--` and those after `-- train`. Raises BadInput if a
    part is missing, or for options that `launch` sets itself."""
    at = [*given, "--"].index("--")
    own, words = list(given[:at]), list(given[at + 1 :])
    if any(word in HELP for word in own):
        return own, words
    usage = f"{_PROGRAM} {how} FILE.toml ... -- train PRESET [options]"
    if words[:1] != ["train"] or len(words) < 2:
        raise BadInput(
            got=f"launch {how} without a command to run"
            if not words
            else f"{shlex.join(words)} after --",
            allowed=usage,
            fix=f"{_PROGRAM} {how} {shlex.join(own[:1]) or 'FILE.toml'} -- train tiny",
        )
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in _OWN[how]:
            raise BadInput(
                got=f"{name} after --",
                allowed=f"settings of the run other than {', '.join(_OWN[how])}, which "
                f"launch {how} sets",
                fix=f"leave {name} out",
            )
    return own, words[1:]


def _by_ssh(own: Sequence[str], words: Sequence[str]) -> int:
    if len(own) != 1:
        raise BadInput(
            got=f"launch ssh {shlex.join(own)}",
            allowed="one file of hosts",
            fix=f"{_PROGRAM} ssh HOSTS.toml -- train PRESET [options]",
        )
    load_hosts(Path(own[0]))
    return train.train([*words, "--launcher", "ssh", "--hosts", own[0]])


def _by_slurm(own: Sequence[str], words: Sequence[str]) -> int:
    options = _slurm_options(own)
    _check(options)
    file = options.cluster
    added = ["--launcher", "slurm", "--cluster", str(_absolute(file))]
    config, _ = train.parse([*words, *added])
    check_config(config)
    if config.data.path is not None and config.data.path.exists():
        text_files(config.data.path)  # rather than after hours in the queue
    _check_paths(config.run_dir, Path.cwd())
    groups = groups_of(load_cluster(file))
    named = [kind for kind in _types() if kind]
    script = job_script(
        groups,
        gres_types(groups, named, dict(_pair(gres) for gres in options.gres)),
        JobTerms(
            limit=options.time,
            notice_s=options.notice_s,
            cpus_per_device=options.cpus_per_device,
            options=options.sbatch,
        ),
        [sys.executable, "-m", "hetjax.train", *words, *added],
        config.run_dir,
        Path.cwd(),
    )
    path = options.script or Path(f"{config.run_dir}.slurm.sh")
    write_file(path, script, "--script")
    print(f"{script}\nscript: {path}")
    if not options.dry_run:
        print(slurm_output(["sbatch", str(path)], limit_s=None).strip())
    return 0


def _slurm_options(given: Sequence[str]) -> SlurmOptions:
    return parse_options(
        SlurmOptions(cluster=tyro.MISSING),
        given,
        program=f"{_PROGRAM} slurm",
        description="Submit a job; after -- come train PRESET and its settings.",
    )


def _absolute(file: Path) -> Path:
    """Return the absolute path of a file; the name of a preset stays as it is, because
    the job finds it anywhere."""
    return file.absolute() if file.exists() else file


def _check(options: SlurmOptions) -> None:
    if options.time and not _LIMIT.fullmatch(options.time):
        raise BadInput(
            got=f"--time {options.time}",
            allowed="minutes, M:SS, H:MM:SS, D-H, D-H:M or D-H:M:S",
            fix="give --time 4:00:00, say",
        )
    if options.time and seconds_of(options.time) < options.notice_s + _EARLY_S:
        raise BadInput(
            got=f"--time {options.time} with --notice-s {options.notice_s}",
            allowed="a time limit that leaves time to train before the notice, which "
            f"may come {_EARLY_S} s early",
            fix="increase --time, or decrease --notice-s",
        )
    for name, least, most in (("notice_s", 30, 65535), ("cpus_per_device", 1, 1024)):
        value = getattr(options, name)
        if not least <= value <= most:
            raise BadInput(
                got=f"--{name.replace('_', '-')} {value}",
                allowed=f"{least} to {most}",
                fix="give a number in this range, or leave it out",
            )
    for word in options.sbatch:
        if not _OPTION.fullmatch(word):
            raise BadInput(
                got=f"--sbatch {word}",
                allowed="a long option of sbatch without its dashes",
                fix="--sbatch account=mine, say",
            )


def seconds_of(limit: str) -> int:
    """Return the seconds of a limit in Slurm's form.

    >>> [seconds_of(limit) for limit in ("5", "1:30", "1:00:00", "2-12", "1-0:30")]
    [300, 90, 3600, 216000, 88200]
    """
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:  # hours, then minutes and seconds if they are given
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_paths(*paths: Path) -> None:
    """Raise BadInput for paths with line ends, which would break the script."""
    for path in paths:
        if not str(path).isprintable():
            raise BadInput(
                got=f"the path {str(path)!r} in a job's script",
                allowed="folder names without line breaks",
                fix="give another --run-dir, or start in another folder",
            )


def _pair(gres: str) -> tuple[str, str]:
    device, _, kind = gres.partition("=")
    if not device or not re.fullmatch(r"[\w.-]+", kind):
        raise BadInput(
            got=f"--gres {gres}",
            allowed="DEVICE=TYPE",
            fix="--gres A100-SXM4-80GB=a100, say",
        )
    return device, kind


def _types() -> list[str]:
    """Return the names that the Slurm cluster here has for its cards; [] without a
    cluster."""
    try:
        listing = slurm_output(["sinfo", "--noheader", "-o", "%G"])
    except BadInput:
        return []
    return sorted({kind for line in listing.split() for kind, _ in gpus_of(line)})


main = main_of(launch)
