# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.demo [options]`, which is `hetjax demo`."""

from hetjax.cli.process import command_main

main = command_main("demo")

if __name__ == "__main__":
    raise SystemExit(main())
