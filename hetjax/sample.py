# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.sample RUN_OR_FOLDER --prompt TEXT`, which is `hetjax sample`."""

from hetjax.cli.process import command_main

main = command_main("sample")

if __name__ == "__main__":
    raise SystemExit(main())
