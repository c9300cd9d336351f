# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.plan [PRESET] [options]`, which is `hetjax plan`."""

from hetjax.cli.process import command_main

main = command_main("plan")

if __name__ == "__main__":
    raise SystemExit(main())
