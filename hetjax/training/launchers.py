# SPDX-License-Identifier: Apache-2.0
"""Which launcher a run gets, and what its workers see and are told of the network.

Does not own the launchers themselves (`hetjax/launch/`).
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from hetjax.cluster.cluster import Cluster
from hetjax.comm.tls import Tls
from hetjax.launch.in_process import InThisProcess
from hetjax.launch.isolation import hidden_devices, worker_environments
from hetjax.launch.launching import Launcher, OnThisMachine, StartTerms
from hetjax.launch.on_ray import OnRay
from hetjax.mesh.process_setup import keep_compiled
from hetjax.plans.worker_map import EMBEDDED
from hetjax.runtime.rpc.schema import Json
from hetjax.runtime.worker.service import Work
from hetjax.training.directory.rundir import LOGS
from hetjax.training.layout.hardware import Hardware, is_virtual
from hetjax.training.settings.config import RunConfig


def launcher_of(
    config: RunConfig,
    hardware: Hardware,
    number: int,
    work: Callable[[Json], Work],
    stack: ExitStack,
) -> Launcher:
    """Make the launcher that the settings ask for; `stack` ends its workers.

    `number` is greater with each start of the run; `work` is what the worker of this
    process works on. BadInput where it cannot be.
    """
    if config.launcher == EMBEDDED:
        keep_compiled(config.data.cache_dir.expanduser())
        return InThisProcess(hardware.cluster, work, stack)
    terms = StartTerms(
        number=number,
        patience=config.patience,
        watchdog_factor=config.watchdog_factor,
        tls=_tls_of(config),
    )
    if config.launcher == "ray":
        return OnRay(
            hardware.cluster,
            stack,
            simulate=config.simulate,
            discovered=hardware.discovered,
            terms=terms,
        )
    return OnThisMachine(
        config.run_dir / LOGS,
        stack,
        terms=terms,
        cluster=hardware.cluster,
        environments=partial(_environments, config, hardware),
        spare_after_s=0.0 if config.recovery == "none" else config.foresee_after_s,
    )


def _tls_of(config: RunConfig) -> Tls | None:
    """What encrypts, if something does; BadInput where that cannot be used here."""
    given = config.tls
    if given.cert is None or given.key is None or given.ca is None:
        return None
    found = Tls(*(str(path.absolute()) for path in (given.cert, given.key, given.ca)))
    found.check()
    return found


def _environments(
    config: RunConfig, hardware: Hardware, cluster: Cluster
) -> dict[str, dict[str, str]]:
    """What is set for workers on this machine, so that each sees its own devices."""
    if is_virtual(config):
        return hidden_devices(cluster)
    return worker_environments(cluster, hardware.here, os.environ)
