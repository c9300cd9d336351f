# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.profile PRESET [options]`, which is `hetjax profile`."""

from hetjax.cli.process import command_main

main = command_main("profile")

if __name__ == "__main__":
    raise SystemExit(main())
