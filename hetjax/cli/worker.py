# SPDX-License-Identifier: Apache-2.0
"""The command `worker`: lets this machine join a run.

Owns its options and messages, and the sources of a token. Does not own joining
(`hetjax/launchers/joining/joiner.py`).
"""

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path

from hetjax.cli.command import main_of
from hetjax.cli.options.options import parse_options
from hetjax.comm.addresses import address_problems
from hetjax.comm.pinned import read_fingerprint
from hetjax.errors import BadInput
from hetjax.launchers.joining.tokens import read_token
from hetjax.models.named import check_model_name, is_function
from hetjax.names import RULE, is_worker
from hetjax.report.progress import working

_PROGRAM = "python -m hetjax.worker"
_HELP = (
    "Join a run that was started with --launcher join, as one of its nodes. The token "
    "comes from a file, or from standard input. Exit codes: 0 the run is over; 1 the "
    "run cannot be reached, is lost, has stopped or already has this node: try again; "
    "2 the run refuses this machine, or shows another certificate; 143 the run has "
    "released this machine."
)
_TOKEN_BYTES = 256  # longer than any token
_OTHERS = stat.S_IRWXG | stat.S_IRWXO | stat.S_IXUSR


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Which run to join, and as which node."""

    join: str | None = None
    """Address at which the run waits, HOST:PORT."""
    node: str | None = None
    """This machine's node in the run's cluster file; NAME/0, NAME/1 and so on for one
    of several hosts."""
    fingerprint: str | None = None
    """Fingerprint of the run's certificate, as the run prints it: sha256:..."""
    token_file: Path | None = None
    """File with the token, which only its owner may read (chmod 600); None: the first
    line of standard input."""
    address: str = ""
    """IPv4 address at which other machines reach this one; if empty, the address from
    which it connects to the run."""
    allow_model_code: str = ""
    """Function that may be called here as the model, package.module:function; if empty,
    none."""


def worker(arguments: Sequence[str]) -> None:
    """Join as the arguments say, until the run is over."""
    options = parse(arguments)
    address, node = _given(options.join, "--join"), _given(options.node, "--node")
    fingerprint = _fingerprint(_given(options.fingerprint, "--fingerprint"))
    for problem in address_problems("--join", address, least=1):
        raise problem
    if not is_worker(node):
        raise BadInput(
            got=f"--node {node[:80]!r}",
            allowed=f"{RULE}; for a node with several hosts NAME/0 and so on",
            fix="give the node's name in the cluster file",
        )
    _check_code(options.allow_model_code)
    token = _token(options.token_file)
    with working("starting"):  # JAX takes seconds to import
        from hetjax.launchers.joining.joiner import Joining, join
    join(
        Joining(
            address=address,
            worker=node,
            fingerprint=fingerprint,
            token=token,
            own_address=options.address,
            allows=options.allow_model_code,
        )
    )
    print("the run is over")


def parse(arguments: Sequence[str]) -> WorkerOptions:
    """Return the options. Raises as `parse_options` does."""
    return parse_options(
        WorkerOptions(), arguments, program=_PROGRAM, description=_HELP
    )


def _given(value: str | None, option: str) -> str:
    if value is None:
        raise BadInput(
            got=f"no {option}",
            allowed=f"{_PROGRAM} --join HOST:PORT --node NAME --fingerprint sha256:...",
            fix="type the line that the run printed for this node",
        )
    return value


def _fingerprint(text: str) -> bytes:
    try:
        return read_fingerprint(text)
    except ValueError as error:
        raise BadInput(
            got=f"--fingerprint {text[:80]}",
            allowed=str(error),
            fix="copy the whole fingerprint from the run's output",
        ) from None


def _check_code(name: str) -> None:
    if not name:
        return
    if not is_function(name):
        raise BadInput(
            got=f"--allow-model-code {name}",
            allowed="a function, package.module:function",
            fix="leave it out: presets and model files do not need it",
        )
    check_model_name(name)


def _token(file: Path | None) -> bytes:
    """Return the token. No error message shows any of it."""
    if file is not None:
        text = _private_text(file)
    elif sys.stdin is not None and sys.stdin.isatty():
        text = getpass("token: ")
    else:
        text = "" if sys.stdin is None else sys.stdin.readline(_TOKEN_BYTES)
    token = read_token(text)
    if token is None:
        raise BadInput(
            got=f"no token {f'in {file}' if file else 'on standard input'}",
            allowed="the token's 64 lower-case hexadecimal digits, in one line",
            fix="give --token-file FILE, or < FILE, with the file that the run named",
        )
    return token


def _private_text(file: Path) -> str:
    """Return the text of a file that no other user may read or write."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise _not_private(file, error.strerror or str(error)) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _not_private(file, "not a regular file")
        if found.st_uid != os.geteuid():
            raise _not_private(file, f"owned by user {found.st_uid}")
        if found.st_mode & _OTHERS:
            closed = f"chmod 600 {file}; take a new token if others could have read it"
            raise _not_private(file, f"mode {stat.S_IMODE(found.st_mode):o}", closed)
        return os.read(descriptor, _TOKEN_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


_COPY = "copy the file that the run named for this node to a new file of yours"


def _not_private(file: Path, why: str, fix: str = _COPY) -> BadInput:
    return BadInput(
        got=f"--token-file {file} ({why})",
        allowed="your own file, which no other user may read: mode 600 or 400",
        fix=fix,
    )


main = main_of(worker)
