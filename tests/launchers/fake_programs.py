# SPDX-License-Identifier: Apache-2.0
"""Fakes of Slurm's commands and of ssh, in a folder of PATH, that run their input here.

`scontrol` prints what a real one (22.05) printed about a job of three components. Owns
the real commands' behaviour that matters to a run: the end of an `srun` ends its task,
that of an `ssh` does not; a shell at the far end of `ssh` joins words by blanks and has
none of our variables.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

_RECORDED = Path(__file__).parent / "recorded"
_SRUN = """#!/bin/sh
# --x=y are options; the first other word begins the command
node=?
while :; do
    case "$1" in
        --nodelist=*) node=${1#--nodelist=} ;;
        --jobid=*|--het-group=*|--nodes=1|--ntasks=1|--overlap|--cpu-bind=none) ;;
        --mpi=none|--unbuffered|--export=ALL) ;;
        --*) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
        *) break ;;
    esac
    echo "$1" >>"$0.heard"
    shift
done
if grep -qx "$node" "$0.down" 2>/dev/null; then
    echo "srun: error: Unable to create step for job 1: Node failure on $node" >&2
    exit 1
fi
apart=  # the program that runs words on a machine which shares nothing
[ ! -e "$0.apart" ] || apart="$(cat "$0.apart") $node"
exec 3<&0  # else what runs in the background reads nothing
SLURMD_NODENAME=$node SLURM_STEP_ID=0 $apart "$@" <&3 3<&- &
task=$!
# as the process beside a real srun: one that is dead, if not buried, has no words
( while [ -n "$(tr -d '\\0' </proc/$$/cmdline)" ]; do sleep 0.1; done
  kill -KILL $task ) >/dev/null 2>&1 3<&- &
watch=$!
wait $task
code=$?
kill $watch
[ $code -lt 128 ] || echo "srun: error: $node: task 0: Killed" >&2
exit $code
"""
_SCONTROL = """#!/bin/sh
case "$*" in
    "show job -d -o 1") cat "$0.job" ;;
    "show job -o 1")  # as 22.05 tells it, the time of a preemption if there is one
        cut -d ' ' -f 1-20 "$0.job"
        if [ -e "$0.preempted" ]; then echo "JobId=1 $(cat "$0.preempted") End="; fi ;;
    "show node -o "*) cat "$0.node" ;;
    "show hostnames a[1-2]") printf 'a1\\na2\\n' ;;
    "requeue "*) echo "$@" >>"$0.heard" ;;
    *) echo "scontrol: error: $*" >&2; exit 1 ;;
esac
"""
_SINFO = """#!/bin/sh
printf 'gpu:a100:2\\ngpu:t4:1\\n(null)\\n'
"""
# runs the script at once, as the job of recorded components
_SBATCH = """#!/bin/sh
export SLURM_JOB_ID=1
bash "$1" >&2 || exit
echo "Submitted batch job 1"
"""
_SSH = """#!/bin/sh
while [ "$1" != -- ]; do
    echo "$1" >>"$0.heard"
    shift
done
host=$2
shift 2
apart=  # the program that runs words on a machine which shares nothing
[ ! -e "$0.apart" ] || apart="$(cat "$0.apart") $host"
if grep -qx "$host" "$0.down" 2>/dev/null; then
    echo "ssh: connect to host $host port 22: Connection refused" >&2
    exit 255
fi
export FAR="$*"
exec 3<&0
setsid env -i PATH="$PATH" HOME="$HOME" SSH_CONNECTION="127.0.0.1 9 $host 22" \\
    $apart sh -c "$FAR" <&3 3<&- &
far=$!
wait $far
"""
_PROGRAMS = {
    "srun": _SRUN,
    "scontrol": _SCONTROL,
    "sinfo": _SINFO,
    "sbatch": _SBATCH,
    "ssh": _SSH,
}


def put_on_path(folder: Path, patched: pytest.MonkeyPatch) -> Path:
    """Write the programs into a folder that comes first in PATH; return the folder."""
    programs = written(folder)
    patched.setenv("PATH", os.pathsep.join([str(programs), os.environ["PATH"]]))
    return programs


def written(folder: Path) -> Path:
    """Write the programs into a folder below this one, and return that folder."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for what in ("job", "node"):
        told = (_RECORDED / f"scontrol-show-{what}").read_text()
        (programs / f"scontrol.{what}").write_text(told)
    return programs


def heard(programs: Path, name: str) -> list[str]:
    """Return the options that a program received, in order."""
    path = programs / f"{name}.heard"
    return path.read_text().splitlines() if path.exists() else []


def processes(words: Iterable[str], *told: str) -> list[int]:
    """Return the processes with all of these words, and `told` in their environment."""
    return [
        pid
        for pid, found, environment in _all()
        if {*words} <= {*found} and all(each.encode() in environment for each in told)
    ]


def _all() -> Iterator[tuple[int, list[str], bytes]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            yield (
                int(entry.name),
                words.split("\0"),
                (entry / "environ").read_bytes(),
            )
        except OSError:
            continue
