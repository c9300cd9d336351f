# SPDX-License-Identifier: Apache-2.0
"""Runs a private Slurm on this machine with three unlike nodes.

The nodes are `small`, `fast` and `old`. Jobs in the partition `urgent` preempt those in
`main`, which then have GRACE_S seconds. Needs Debian's slurmctld, slurmd, slurm-client
and munge, and root. Owns its settings, its daemons and their end. GPUs are character
devices that no process opens.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PORT = 17100
NODES = ("small", "fast", "old")
GRACE_S = 60  # between the notice of a preemption and the end of the job
_READY_S = 30.0
_CONF = """ClusterName=own
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,bf_resolution=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
SlurmdTimeout=20
JobRequeue=1
GresTypes=gpu
NodeName=small NodeHostname={host} NodeAddr=127.0.0.1 Port={small} CPUs=4
NodeName=fast NodeHostname={host} NodeAddr=127.0.0.1 Port={fast} CPUs=4 Gres=gpu:a100:2
NodeName=old NodeHostname={host} NodeAddr=127.0.0.1 Port={old} CPUs=4 Gres=gpu:t4:1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
_GRES = """NodeName=fast Name=gpu Type=a100 File=/dev/tty[1-2] Flags=nvidia_gpu_env
NodeName=old Name=gpu Type=t4 File=/dev/tty3 Flags=nvidia_gpu_env
"""


@contextmanager
def own_slurm(folder: Path) -> Iterator[None]:
    """Run a Slurm with its files in this folder; Slurm's commands use it meanwhile."""
    _write(folder)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        _start(folder)
        yield
    finally:
        _end_jobs()
        _stop(folder)
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def slurm(*words: str) -> str:
    """Return the output of a command of Slurm."""
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _write(folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    host = os.uname().nodename.partition(".")[0]
    ports = {name: PORT + i for i, name in enumerate(NODES, start=1)}
    conf = _CONF.format(host=host, folder=folder, port=PORT, grace=GRACE_S, **ports)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(_GRES)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)


def _start(folder: Path) -> None:
    own = [f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"]
    own += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"]
    own += [f"--seed-file={folder}/munge.seed", "--force"]
    subprocess.run(["munged", *own], check=True)
    subprocess.run(["slurmctld"], check=True)
    for name in NODES:
        subprocess.run(["slurmd", "-N", name], check=True)
    end_s = time.monotonic() + _READY_S
    while len({*slurm("sinfo", "-h", "-t", "idle", "-N", "-o", "%N").split()}) < 3:
        if time.monotonic() > end_s:
            raise TimeoutError("Slurm's nodes are not idle")
        time.sleep(0.5)


def _end_jobs() -> None:
    """Cancel all jobs and wait until none is left: stopping the daemons ends no job."""
    subprocess.run(["scancel", "--user=root"], capture_output=True)
    end_s = time.monotonic() + _READY_S
    while time.monotonic() < end_s:
        told = subprocess.run(["squeue", "-h"], capture_output=True, text=True)
        if not told.stdout.strip():
            return
        time.sleep(0.5)


def _stop(folder: Path) -> None:
    for path in [*folder.glob("slurm*.pid"), folder / "munged.pid"]:
        if path.exists():
            subprocess.run(["kill", path.read_text().strip()], capture_output=True)
