# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.devices [WORD]`, which is `hetjax devices`."""

from hetjax.cli.process import command_main

main = command_main("devices")

if __name__ == "__main__":
    raise SystemExit(main())
