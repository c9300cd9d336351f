# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.worker --join HOST:PORT --node NAME ...`, or `hetjax worker`."""

from hetjax.cli.process import command_main

main = command_main("worker")

if __name__ == "__main__":
    raise SystemExit(main())
