# SPDX-License-Identifier: Apache-2.0
"""Serves a cloud bucket on a host of the testbed until it is killed.

    python -m experiments.recovery.cloud_host ADDRESS

Writes its URL to standard output. In memory, without credentials: for experiments.
"""

import sys
import threading

from tests.checkpoint.fake_gcs import FakeGcs

BUCKET = "bucket"


def main() -> None:
    with FakeGcs(BUCKET).serving(sys.argv[1]) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
