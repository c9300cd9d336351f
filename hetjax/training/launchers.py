# SPDX-License-Identifier: Apache-2.0
"""Opens the launcher that a run's settings name, with the settings that it needs.

Does not own launchers, nor the table of them (`hetjax/launchers/`).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from hetjax.comm.tls import Tls
from hetjax.files.user_cache import expanded
from hetjax.launchers.bootstraps import StartTerms
from hetjax.launchers.by_joining import check_address
from hetjax.launchers.joining.terms import JoinTerms
from hetjax.launchers.launcher import Launcher, LaunchRequest, launcher_file
from hetjax.launchers.reprovisioning import Follow
from hetjax.launchers.table import LAUNCHERS
from hetjax.models.named import is_function
from hetjax.report.progress import say_aside
from hetjax.runtime.rpc.schema import Json
from hetjax.runtime.worker.service import Work
from hetjax.training.directory.own_disks import gathering_folder
from hetjax.training.directory.progress import evaluated
from hetjax.training.directory.rundir import JOINS, LOGS
from hetjax.training.layout.hardware import Hardware
from hetjax.training.settings.config import RunConfig, is_virtual


def launcher_of(
    config: RunConfig,
    hardware: Hardware,
    number: int,
    work: Callable[[Json], Work],
    stack: ExitStack,
    note: Callable[[str], None] = say_aside,
    files: Mapping[str, Path] | None = None,
    on_waiting: Follow | None = None,
) -> Launcher:
    """Return the launcher that the settings name; `stack` ends its workers.

    `number` grows with each start of the run. `work` builds the work of a worker in
    this process. `note` tells users what they have to do. Workers that may not see the
    `files` of this machine get them by name. A launcher that waits for machines gives
    `on_waiting` a function that returns the nodes to ask for. Raises BadInput if the
    launcher cannot be opened.
    """
    request = LaunchRequest(
        cluster=hardware.cluster,
        discovered=hardware.discovered,
        here=hardware.here,
        only_cpu=is_virtual(config),
        simulate=config.simulate,
        hosts=config.hosts,
        joins=_join_terms(config, note, on_waiting),
        logs=config.run_dir / LOGS,
        cache_dir=expanded(config.data.cache_dir),
        work=work,
        standby_after_s=0.0
        if config.recovery == "none"
        else config.standby_plans_after_s,
        terms=_start_terms(config, number, files or {}),
    )
    return launcher_file(config.launcher).open_launcher(request, stack)


def check_launcher(config: RunConfig) -> None:
    """Raise BadInput if the launcher could not be opened, before it is."""
    if config.join.address is not None:
        check_address(config.join.address)


def _join_terms(
    config: RunConfig,
    note: Callable[[str], None],
    on_waiting: Follow | None,
) -> JoinTerms | None:
    if config.join.address is None:
        return None
    return JoinTerms(
        address=config.join.address,
        folder=config.run_dir / JOINS,
        token_s=config.join.token_s,
        wait_s=config.join.wait_s,
        model_code=config.model if is_function(config.model) else "",
        note=note,
        is_done=lambda: config.steps in evaluated(config.run_dir),
        on_waiting=on_waiting,
    )


def _start_terms(
    config: RunConfig, number: int, files: Mapping[str, Path]
) -> StartTerms:
    has_links = LAUNCHERS[config.launcher].has_worker_processes
    return StartTerms(
        number=number,
        timeout_scale=config.timeout_scale,
        watchdog_factor=config.watchdog_factor,
        tls=_tls_of(config) if has_links else None,
        files=files,
        gathers_in=gathering_folder(config),
    )


def _tls_of(config: RunConfig) -> Tls | None:
    """Return the encryption, if any. Raises BadInput if it cannot be used here."""
    given = config.tls
    if given.cert is None or given.key is None or given.ca is None:
        return None
    found = Tls(*(str(path.absolute()) for path in (given.cert, given.key, given.ca)))
    found.check()
    return found
