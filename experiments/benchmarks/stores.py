# SPDX-License-Identifier: Apache-2.0
"""Measures a store's cost on the training machine: CPU seconds per GiB, up and down.

    python -m experiments.benchmarks.stores [--rounds 5] [--file-mib 4 64]

Another process serves the tests' fakes of `gs` and `s3`. This process opens both stores
as a run does and, in turn, uploads and downloads 256 MiB of random bytes in files of
one size, four at a time. CPU seconds are those of this process: all its threads and its
system time, with checksums and disk writes. Wall times would measure the fakes. Figures
are medians over the rounds, without the first; `over_gs` are S3's over those of GCS.
`s3_crc64` sends as to AWS itself, `s3_tls` as to other servers by https, `s3_sha256` as
to those by http. None is encrypted here. Prints one JSON object.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, get_args

from hetjax.checkpoint.file_records import FileRecord, record_of_file
from hetjax.checkpoint.storage import open_store
from hetjax.checkpoint.stores.s3 import Protection, S3Store
from hetjax.checkpoint.stores.s3_login import find_login
from hetjax.checkpoint.stores.store import Store
from tests.checkpoint.fake_s3 import ENVIRONMENT

TOTAL_MIB, NUM_THREADS = 256, 4
SERVER = """
import contextlib, sys
from tests.checkpoint.fake_gcs import FakeGcs
from tests.checkpoint.fake_s3 import FakeS3
with contextlib.ExitStack() as stack:
    servers = FakeGcs("bucket"), FakeS3("bucket")
    for server in servers:
        stack.enter_context(server.serving())
    print(*[server.url for server in servers], flush=True)
    for line in sys.stdin:
        for server in servers:
            server.buckets["bucket"].clear()
            server.log.clear()
        print("cleared", flush=True)
"""


def main() -> None:
    """Print what both stores cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file-mib", type=int, nargs="+", default=[4, 64])
    options = parser.parse_args()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        gcs_url, s3_url = server.stdout.readline().split()
        os.environ.update(ENVIRONMENT, STORAGE_EMULATOR_HOST=gcs_url)

        def clear() -> None:
            assert server.stdin is not None and server.stdout is not None
            print("clear", file=server.stdin, flush=True)
            server.stdout.readline()

        stores: dict[str, Store] = {"gs": open_store("gs://bucket/run")}
        for protection in get_args(Protection):
            stores[f"s3_{protection}"] = S3Store(
                *("bucket", protection, find_login("s3://bucket/run")),
                endpoint=s3_url,
                protection=protection,
            )
        found = {
            f"files_of_{mib}_mib": compare(stores, mib, options.rounds, clear)
            for mib in options.file_mib
        }
        server.stdin.close()
    command = " ".join(["python -m experiments.benchmarks.stores", *sys.argv[1:]])
    print(json.dumps({"command": command, **found}, indent=2))


def compare(
    stores: dict[str, Store], file_mib: int, rounds: int, clear: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """Return CPU seconds per GiB of each store, and those of S3 over those of GCS."""
    with tempfile.TemporaryDirectory() as folder:
        files = _files(Path(folder) / "sent", file_mib)
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in stores}
        for _ in range(rounds + 1):
            for name, store in stores.items():
                clear()
                spent[name].append(_round(store, files, Path(folder) / "got"))
    ends = {
        name: [median(way) * 1024 / TOTAL_MIB for way in zip(*rows[1:], strict=True)]
        for name, rows in spent.items()
    }
    return {
        way: {
            **{name: round(ends[name][i], 3) for name in ends},
            "over_gs": {
                name: round(ends[name][i] / ends["gs"][i], 3)
                for name in ends
                if name != "gs"
            },
        }
        for i, way in enumerate(("put", "get"))
    }


def _round(
    store: Store, files: dict[Path, FileRecord], folder: Path
) -> tuple[float, float]:
    def put(path: Path) -> None:
        store.put(path.name, path, files[path])

    def get(path: Path) -> None:
        store.get(path.name, folder / path.name, files[path])
        (folder / path.name).unlink()

    return _cpu_s(put, files), _cpu_s(get, files)


def _cpu_s(act: Callable[[Path], None], files: dict[Path, FileRecord]) -> float:
    time.sleep(0.1)  # until threads of earlier work have ended
    start_s = _spent_s()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(act, files))
    return _spent_s() - start_s


def _spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _files(folder: Path, file_mib: int) -> dict[Path, FileRecord]:
    folder.mkdir()
    paths = [folder / f"{i:04d}" for i in range(TOTAL_MIB // file_mib)]
    for path in paths:
        path.write_bytes(os.urandom(file_mib << 20))
    return {path: record_of_file(path) for path in paths}


if __name__ == "__main__":
    main()
