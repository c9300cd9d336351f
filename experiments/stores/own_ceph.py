# SPDX-License-Identifier: Apache-2.0
"""Runs a private Ceph on this machine, in memory, and its gateway that speaks S3.

Needs Debian's ceph-mon, ceph-osd, ceph-mgr and radosgw, and root. Owns its settings,
its daemons and their end, a user and a bucket. All listen on loopback.
"""

import os
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.checkpoint.fake_s3 import ENVIRONMENT, KEY, SECRET
from tests.checkpoint.test_fake_s3 import ask

BUCKET = "bucket"
URL = "http://127.0.0.1:17203"
_READY_S = 60.0
_MONITOR = "[v2:127.0.0.1:17201,v1:127.0.0.1:17202]"
_CONF = """[global]
fsid = {fsid}
mon host = {monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail warn = 1
mon data avail crit = 0
osd objectstore = memstore
memstore device bytes = 4294967296
mon data = {folder}/mon
osd data = {folder}/osd
mgr data = {folder}/mgr
keyring = {folder}/keyring
run dir = {folder}
crash dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
[client.gateway]
rgw data = {folder}/gateway
rgw frontends = beast endpoint=127.0.0.1:17203
auth client required = none
ms mon client mode = crc
"""


@contextmanager
def own_ceph(folder: Path) -> Iterator[str]:
    """Run a gateway with an empty bucket; yield its URL.

    Meanwhile the environment has the credentials of a user with all permissions.
    """
    _write(folder)
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT, CEPH_CONF=str(folder / "ceph.conf"))
    try:
        _start(folder)
        _make_bucket()
        yield URL
    finally:
        for path in folder.glob("*.pid"):
            subprocess.run(["kill", path.read_text().strip()], capture_output=True)
        os.environ.clear()
        os.environ.update(before)


def add_user(name: str, key: str, secret: str) -> None:
    """Add a user who owns nothing yet."""
    words = ["--uid", name, "--display-name", name, "--access-key", key]
    _run("radosgw-admin", "user", "create", *words, "--secret-key", secret)


def write_profile(home: Path) -> None:
    """Let programs with this home log in as the owner of the bucket."""
    (home / ".aws").mkdir(parents=True)
    login = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (home / ".aws" / "credentials").write_text(f"[default]\n{login}")


def _write(folder: Path) -> None:
    for name in ("mon", "osd", "mgr", "gateway"):
        (folder / name).mkdir(parents=True)
    fsid = str(uuid.uuid4())
    conf = _CONF.format(folder=folder, fsid=fsid, monitor=_MONITOR)
    (folder / "ceph.conf").write_text(conf)
    keyring, monitors = str(folder / "keyring"), str(folder / "monmap")
    _run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.")
    _run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", _MONITOR, monitors)


def _start(folder: Path) -> None:
    monitors, keyring = str(folder / "monmap"), str(folder / "keyring")
    osd = str(uuid.uuid4())
    _run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "--keyring", keyring)
    _run("ceph-mon", "-i", "a")
    _run("ceph", "osd", "new", osd)
    _run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    _run("ceph-osd", "-i", "0")
    _run("ceph-mgr", "-i", "a")
    _run("radosgw", "-n", "client.gateway")
    end_s = time.monotonic() + _READY_S
    while not _answers():
        if time.monotonic() > end_s:
            raise TimeoutError(f"no gateway: {folder}/client.gateway.log")
        time.sleep(0.5)
    add_user("owner", KEY, SECRET)


def _answers() -> bool:
    try:
        with urllib.request.urlopen(URL, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _make_bucket() -> None:
    status, body, _ = ask(URL, "PUT", "", bucket=BUCKET)
    assert status == 200, body


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=_READY_S)
