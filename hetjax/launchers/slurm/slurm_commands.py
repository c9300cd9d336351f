# SPDX-License-Identifier: Apache-2.0
"""Runs Slurm's own commands with a timeout, and explains their failures.

Owns running them. Does not own parsing their output (`hetjax/cluster/slurm_nodes.py`),
nor the job script (`job_script.py`).
"""

import shlex
import subprocess
from collections.abc import Sequence

from hetjax.errors import BadInput

_LIMIT_S = 30.0


def slurm_output(words: Sequence[str], limit_s: float | None = _LIMIT_S) -> str:
    """Return what a command prints; BadInput if it is missing, fails or hangs.

    If `limit_s` is None, it may take any time.
    """
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except OSError as error:
        raise BadInput(
            got=f"no {words[0]} on this machine ({error.strerror})",
            allowed="a machine with Slurm's commands: a login node, or a job",
            fix="log in to the cluster, or add the folder of Slurm's commands to PATH",
        ) from error
    except subprocess.TimeoutExpired:
        raise _failed(words, f"no answer in {limit_s} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise _failed(words, said[-1] if said else f"exit code {done.returncode}")
    return done.stdout


def _failed(words: Sequence[str], why: str) -> BadInput:
    if words[0] == "sbatch":
        return BadInput(
            got=f"{shlex.join(words)}: {why}",
            allowed="a job that Slurm accepts",
            fix="see what nodes have: sinfo -N -o '%N %P %c %m %l %G' (name, "
            "partition, CPUs, MB, time limit, cards); ask for no more, with "
            "--cpus-per-device, --gres, --time, or --sbatch partition=NAME",
        )
    return BadInput(
        got=f"{' '.join(words[:3])}: {why}",
        allowed="Slurm's answer",
        fix=f"run it yourself to see what is wrong: {shlex.join(words)}",
    )
