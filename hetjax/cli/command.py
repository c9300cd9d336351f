# SPDX-License-Identifier: Apache-2.0
"""Defines what all commands share: exit codes, final messages, input and output files.

Owns how a command's function becomes the `main` of its module. Refuses files that it
cannot read or write, before slow imports. Does not own any command, the contents of
files, nor the conditions between files.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hetjax.cli.process import INTERRUPTED, TERMINATED, Main
from hetjax.cluster import catalogue
from hetjax.cluster.cluster_files import load_cluster
from hetjax.costs.certainty.given import check_calibration
from hetjax.costs.measured.layer_profile import read_profile
from hetjax.data.sources.readers import text_files
from hetjax.errors import BadInput, NoFeasiblePlan, RunFailed
from hetjax.files.writing import naming, write_whole
from hetjax.models.named import check_model_name
from hetjax.plans.plan_files import read_plan
from hetjax.report.pictures.picture import check_picture
from hetjax.report.progress import quiet_if
from hetjax.training.interrupts import Terminated

_QUIET = {"-q", "--quiet"}


def main_of(
    command: Callable[[Sequence[str]], int | None],
    goes_on: str | None = None,
) -> Main:
    """Return the `main` of a command.

    All commands take -q. After Ctrl-C, `main` prints what the same command will do when
    typed again: `goes_on`, if that is given.

    >>> main_of(lambda arguments: None)([])
    0
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        warnings.formatwarning = _warning_line
        try:
            _check_system()
            given = sys.argv[1:] if arguments is None else arguments
            with quiet_if(not _QUIET.isdisjoint(given)):
                return command([word for word in given if word not in _QUIET]) or 0
        except (BadInput, NoFeasiblePlan, RunFailed) as error:
            _print_error(error)
            return error.exit_code
        except KeyboardInterrupt as interrupt:
            then = "" if goes_on is None else f"; the same command {goes_on}"
            is_term = isinstance(interrupt, Terminated)
            how = "ended by SIGTERM before the first step" if is_term else "interrupted"
            print(f"hetjax: {how}{then}", file=sys.stderr)
            return TERMINATED if is_term else INTERRUPTED

    return main


def _warning_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """Return a warning without the source line that raised it."""
    return f"warning: {message}\n"


def _print_error(error: Exception) -> None:
    """Print an error to standard error; in colour on a terminal, unless NO_COLOR is
    set."""
    text = Text(f"hetjax: error\n{error}")
    text.highlight_regex("^hetjax: error", "bold red")
    text.highlight_regex("(?m)^(got|allowed|fix):", "bold")
    Console(stderr=True).print(text, soft_wrap=True)


def print_result(found: object) -> None:
    """Print a result; on a terminal its warnings are red, unless NO_COLOR is set."""
    text = Text(str(found))
    text.highlight_regex("(?m)^warning: .*$", "bold red")
    Console().print(text, soft_wrap=True)


def _check_system() -> None:
    """Raise BadInput on Windows, which cannot watch and stop workers as hetjax does."""
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
    calibration: str | Path | None = None,
    texts: Iterable[tuple[Path, str]] = (),
    model: str | None = None,
) -> None:
    """Raise BadInput for the first of these inputs that is missing or unreadable.

    `texts` are paths with the options that named them.
    """
    if model is not None:
        check_model_name(model)
    if cluster is not None:
        load_cluster(cluster)
    if profile is not None:
        read_profile(profile)
    check_calibration(calibration)
    if plan is not None:
        read_plan(plan)
    for path, option in texts:
        if not path.is_dir():
            text_files(path, option)


def check_devices(cluster: Path | None) -> None:
    """Raise BadInput for devices of the cluster whose figures are unknown."""
    if cluster is not None:
        catalogue.check_devices(load_cluster(cluster))


def check_outputs(options: Any, *names: str) -> None:
    """Raise BadInput for the first of these options whose file has no folder, and for a
    picture that cannot be drawn. To be called before anything is computed.
    """
    for name in names:
        path = getattr(options, name)
        if path is not None and not os.path.isdir(path.parent):
            raise BadInput(
                got=f"--{name} {path}, whose folder does not exist",
                allowed="a file in an existing folder",
                fix=f"mkdir -p {path.parent}",
            )
    if options.plot is not None:
        check_picture(options.plot)


def write_outputs(
    options: Any,
    writers: Mapping[str, tuple[str, Callable[[Path], object]]],
    show: Callable[[], None],
) -> None:
    """Write the requested files, then show the result, because its reader may leave.
    Then print a line on each file, unless `json`.

    `writers` maps an option to the text of that line ("plan: {}") and to the function
    that writes the file. If the system refuses a file, the result is still shown before
    BadInput is raised, which names the options.
    """
    lines: list[str] = []
    try:
        for name, (words, write) in writers.items():
            path = getattr(options, name)
            if path is not None:
                with naming(path):
                    write(path)
                lines.append(words.format(path))
    except OSError as error:
        raise BadInput(
            got=f"{error.filename}: {error.strerror}",
            allowed="files that can be written for "
            f"{', '.join(f'--{name}' for name in writers)}",
            fix="give another path",
        ) from error
    finally:
        show()
        if lines and not options.json:
            print("\n".join(lines))


def write_file(path: Path, text: str, option: str) -> None:
    """Write a file, whole or not at all. Raises BadInput, which names the option."""
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    except OSError as error:
        raise BadInput(
            got=f"{error.filename}: {error.strerror}",
            allowed=f"a file that can be written for {option}",
            fix=f"give another path: {option} PATH",
        ) from error
