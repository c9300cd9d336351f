# SPDX-License-Identifier: Apache-2.0
"""Runs two private sshd on this machine, at 127.0.0.2 and 127.0.0.3, and a client.

Needs Debian's openssh-server, and root. Owns their keys and their end. Nothing is
written outside the folder except /run/sshd, which sshd requires.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = {"left": "127.0.0.2", "right": "127.0.0.3"}
PORT = 2322
_CONF = """ListenAddress {address}:{port}
HostKey {folder}/host
PidFile {folder}/sshd-{address}.pid
AuthorizedKeysFile {folder}/user.pub
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
MaxStartups 100
"""
_CLIENT = """#!/bin/sh
exec /usr/bin/ssh -F none -i {folder}/user -o UserKnownHostsFile={folder}/known "$@"
"""


@contextmanager
def own_sshd(folder: Path) -> Iterator[Path]:
    """Let `ssh` in PATH use private keys meanwhile; yield a file of the two hosts."""
    folder.mkdir(mode=0o700)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        words = [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-f",
            str(folder / name),
        ]
        subprocess.run(words, check=True)
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    known = [f"[{address}]:{PORT} {key}\n" for address in ADDRESSES.values()]
    (folder / "known").write_text("".join(known))
    client = folder / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(_CLIENT.format(folder=folder))
    client.chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join([str(client.parent), before])
    try:
        for address in ADDRESSES.values():
            _start(folder, address)
        yield _hosts(folder)
    finally:
        os.environ["PATH"] = before
        for path in folder.glob("sshd-*.pid"):
            subprocess.run(["kill", path.read_text().strip()], capture_output=True)


def _start(folder: Path, address: str) -> None:
    conf = folder / f"sshd-{address}.conf"
    conf.write_text(_CONF.format(folder=folder, address=address, port=PORT))
    log = folder / f"sshd-{address}.log"
    subprocess.run(["/usr/sbin/sshd", "-f", conf, "-E", log], check=True)


def _hosts(folder: Path) -> Path:
    file = folder / "hosts.toml"
    hosts = [
        f'[[host]]\nname = "{name}"\naddress = "{address}"\nport = {PORT}\n'
        for name, address in ADDRESSES.items()
    ]
    file.write_text("\n".join(hosts))
    return file
