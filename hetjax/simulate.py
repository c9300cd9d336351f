# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.simulate PLAN [options]`, which is `hetjax simulate`."""

from hetjax.cli.process import command_main

main = command_main("simulate")

if __name__ == "__main__":
    raise SystemExit(main())
