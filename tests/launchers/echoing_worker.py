# SPDX-License-Identifier: Apache-2.0
"""A worker process that prints its number and its input, and ends."""

import os
import sys

if __name__ == "__main__":
    print(os.getpid(), os.environ.get("HETJAX_TEST_WORD"), sys.stdin.readline().strip())
