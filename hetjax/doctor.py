# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.doctor [options]`, which is `hetjax doctor`."""

from hetjax.cli.process import command_main

main = command_main("doctor")

if __name__ == "__main__":
    raise SystemExit(main())
