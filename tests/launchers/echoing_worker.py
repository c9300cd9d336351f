# SPDX-License-Identifier: Apache-2.0
"""A worker process that says its number and what it is told, and ends."""

import os
import sys

if __name__ == "__main__":
    print(os.getpid(), os.environ.get("HETJAX_TEST_WORD"), sys.stdin.readline().strip())
