# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.preempt RUN_DIR [--node NAME]`, which is `hetjax preempt`."""

from hetjax.cli.process import command_main

main = command_main("preempt")

if __name__ == "__main__":
    raise SystemExit(main())
