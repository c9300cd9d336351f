# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.train PRESET [options]`, which is `hetjax train`."""

from hetjax.cli.process import command_main

main = command_main("train")

if __name__ == "__main__":
    raise SystemExit(main())
