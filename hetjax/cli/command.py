# SPDX-License-Identifier: Apache-2.0
"""What all commands have in common: exit codes, last words, files read and written.

Owns the way from a command's function to the `main` of its module, and the refusal of
files that cannot be read or written before anything is imported that takes seconds.
Does not own any command, what is in files, nor what must hold between them.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hetjax.cluster import catalogue
from hetjax.cluster.cluster_files import load_cluster
from hetjax.costs.measured.layer_profile import read_profile
from hetjax.data.readers import text_files
from hetjax.errors import BadInput, NoFeasiblePlan, RunFailed
from hetjax.files.writing import naming
from hetjax.models.named import check_model_name
from hetjax.plans.plan_files import read_plan
from hetjax.report.pictures.picture import check_picture


class Main(Protocol):
    """Runs a command and gives its exit code; without arguments with the process's."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


def main_of(
    command: Callable[[Sequence[str]], int | None],
    goes_on: str | None = None,
) -> Main:
    """Return the `main` of a command.

    After Ctrl-C it says what the same command would do next, if it `goes_on`.

    >>> main_of(lambda arguments: None)([])
    0
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        warnings.formatwarning = _warning_line
        try:
            _check_system()
            return command(sys.argv[1:] if arguments is None else arguments) or 0
        except (BadInput, NoFeasiblePlan, RunFailed) as error:
            print(f"error\n{error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            if goes_on is None:
                print("interrupted", file=sys.stderr)
            else:
                print(f"interrupted; the same command {goes_on}")
            return 1

    return main


def _warning_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as people read it, without the place in our code."""
    return f"warning: {message}\n"


def _check_system() -> None:
    """Workers are watched, and stopped, by means that Windows lacks."""
    if sys.platform == "win32":
        raise BadInput(
            got="hetjax on Windows itself",
            allowed="Linux, also in WSL 2 on Windows; macOS, on the CPU",
            fix="wsl --install, then install hetjax there",
        )


def check_inputs(
    *,
    cluster: Path | None = None,
    plan: Path | None = None,
    profile: Path | None = None,
    texts: Iterable[tuple[Path, str]] = (),
    model: str | None = None,
) -> None:
    """Raise BadInput for the first of these that cannot be read, or is not there.

    `texts` are paths with the options that they were given by.
    """
    if model is not None:
        check_model_name(model)
    if cluster is not None:
        load_cluster(cluster)
    if profile is not None:
        read_profile(profile)
    if plan is not None:
        read_plan(plan)
    for path, option in texts:
        if not path.is_dir():
            text_files(path, option)


def check_devices(cluster: Path | None) -> None:
    """Raise BadInput for devices of the cluster that nobody has figures of."""
    if cluster is not None:
        catalogue.check_devices(load_cluster(cluster))


def check_outputs(options: Any, *names: str) -> None:
    """Raise BadInput for the first of these options whose file has no folder.

    Also for a picture that could not be drawn; all before anything is computed.
    """
    for name in names:
        path = getattr(options, name)
        if path is not None and not os.path.isdir(path.parent):
            raise BadInput(
                got=f"--{name} {path}, in a folder that is not there",
                allowed="a file in a folder that is there",
                fix=f"mkdir -p {path.parent}",
            )
    if options.plot is not None:
        check_picture(options.plot)


def write_outputs(
    options: Any, writers: Mapping[str, tuple[str, Callable[[Path], object]]]
) -> None:
    """Write the files that are asked for, and print a line on each unless `json`.

    `writers` has, by option, the words of that line ("plan: {}") and what writes.
    BadInput names the options where the system refuses.
    """
    for name, (words, write) in writers.items():
        path = getattr(options, name)
        if path is None:
            continue
        try:
            with naming(path):
                write(path)
        except OSError as error:
            raise BadInput(
                got=f"{error.filename}: {error.strerror}",
                allowed="files that can be written for "
                f"{', '.join(f'--{name}' for name in writers)}",
                fix="give another path",
            ) from error
        if not options.json:
            print(words.format(path))
