# SPDX-License-Identifier: Apache-2.0
"""A cloud on a host of the testbed: serves one bucket at an address until it is ended.

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
